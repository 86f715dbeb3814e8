"""`python -m quintet` is `quintet`."""

import sys

from quintet.interpreter import leave_working_directory


def _main() -> int:
    leave_working_directory()  # before more is imported
    from quintet.server.cli import main

    return main()


sys.exit(_main())
