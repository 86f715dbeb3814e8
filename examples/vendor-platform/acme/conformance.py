"""`python -m acme.conformance`: makes each fault in turn; the kit is to break the clause that the fault is against.

One line per fault; the exit code is 1 if one is not caught.
"""

import argparse
import sys
import time

from quintet.conformance import kit
from quintet.conformance.harness.subject import Subject

from acme.faults import Fault, injected, known


def caught(fault: Fault) -> str | None:
    """What the first trial of its clause that fails says; None if all pass."""
    with injected(fault.name):
        return kit.first_failure(Subject("acme"), fault.clause)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m acme.conformance", description=__doc__)
    parser.add_argument("--fault", action="append", metavar="NAME", help="this one; again for more; all if not given")
    parser.add_argument("--list", action="store_true", help="print the faults, and run nothing")
    arguments = parser.parse_args()
    faults = known()
    if arguments.list:
        print("\n".join(f"{each.name:22} {each.clause:26} {each.sentence}" for each in faults.values()))
        return 0
    missed = 0
    for name in arguments.fault or faults:
        began = time.perf_counter()
        found = caught(faults[name])
        missed += found is None
        took = time.perf_counter() - began
        print(
            f"{name:22} {faults[name].clause:26} {'missed' if found is None else 'caught':7} {took:5.1f} s", flush=True
        )
        print(f"  {(found or '')[:200]}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
