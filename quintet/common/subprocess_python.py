"""Python for processes of our own: it finds modules where this process does, and not in the working directory.

`python -m` and `python -c` look there first: in a folder with another person's files, its torch.py would be torch.
Python 3.11 has -P against that, and 3.10 has not.
"""

import os
import sys

_RUN = "import runpy; runpy.run_module(sys.argv.pop(1), run_name='__main__', alter_sys=True)"


def python_command(module: str, *, reads_orders: bool = False) -> list[str]:
    """The words that run the module, as `python -m` would. `reads_orders`: it imports what it needs and then calls
    read_orders(); garbage is not looked for before that."""
    return [sys.executable, "-c", with_our_path(f"import gc; gc.disable(); {_RUN}" if reads_orders else _RUN), module]


def with_our_path(code: str) -> str:
    """The code for `python -c`, behind a line that sets its sys.path, before anything is imported; `sys` is there."""
    path = [each for each in sys.path if each]  # an empty entry is the working directory, whichever that is
    return f"import sys; sys.path[:] = {path!r}\n{code}"


def leave_working_directory() -> None:
    """Takes away what `python -m` put before the path, unless quintet itself lies there: then that was asked for."""
    if getattr(sys.flags, "safe_path", False):
        return  # -P: it put nothing there
    home = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    try:
        here = os.getcwd()
    except FileNotFoundError:  # it was removed: nothing can be found there
        return
    if sys.path[0] == here != home:
        del sys.path[0]
