"""Messages to the terminal, apart from the output of a command."""

import sys


def print_stderr(text: str) -> None:
    """Prints a line to standard error."""
    print(text, file=sys.stderr, flush=True)
