"""The process of an engine that computes beside one that is measured."""

import sys

from quintet.server.simulation.measuring import main_of_company

if __name__ == "__main__":
    sys.exit(main_of_company())
