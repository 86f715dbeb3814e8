"""`python -m quintet` is `quintet`."""

import sys

from quintet.common.subprocess_python import leave_working_directory


def _main() -> int:
    leave_working_directory()  # before more is imported
    from quintet.cli.main import main

    return main()


sys.exit(_main())
