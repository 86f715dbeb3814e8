"""Start of every child process: reads its orders, and ends the process when its parent is gone."""

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable

import msgspec

from quintet.common.logging_setup import install_for_server
from quintet.server.processes.messages import Orders

PARENT_GONE, REFUSED = 3, 4  # exit codes; refused: the engine has printed an error that the user can fix
ENDING = (signal.SIGINT, signal.SIGTERM)


def read_orders() -> Orders:
    """Reads the orders from standard input, which stays open as long as the parent lives.

    Signals that end a server often go to all its processes; the parent decides what they mean. It started this process
    with them blocked, since imports take a while.
    """
    for each in ENDING:
        signal.signal(each, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING)
    with open(sys.stdin.fileno(), "rb", buffering=0, closefd=False) as pipe:  # what comes after the line stays there
        orders = msgspec.json.decode(pipe.readline(), type=Orders)
    install_for_server(orders.server)
    return orders


def follow_parent(told: Callable[[str], object] = lambda why: None) -> None:
    """Ends this process with its parent; calls the function, from a thread, if the parent wants its end before.

    Its argument is the reason: empty, to let running calls end first.
    """
    threading.Thread(target=_follow, args=(told,), name="quintet-parent", daemon=True).start()


def _follow(told: Callable[[str], object]) -> None:
    """A pipe's end is seen whatever killed the other side. Nothing is worth saving: at once, in the midst of a step."""
    with open(sys.stdin.fileno(), "rb", buffering=0, closefd=False) as pipe:
        while (line := pipe.readline()).endswith(b"\n"):
            with contextlib.suppress(RuntimeError):  # its loop has ended: so does the process
                told(line[:-1].decode())
    os._exit(PARENT_GONE)
