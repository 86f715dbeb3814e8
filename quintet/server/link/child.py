"""What every child process does first: read its orders, and end when its parent is gone."""

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable

import msgspec

from quintet.server.link.wire import Orders
from quintet.server.logs import install_for_server

PARENT_GONE, REFUSED = 3, 4  # exit codes; refused: the engine has said what the user can mend
ENDING = (signal.SIGINT, signal.SIGTERM)


def read_orders() -> Orders:
    """From standard input, which stays open as long as the parent lives.

    Signals that end a server often go to all its processes; what they mean is the parent's to say. It started this one
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
    """Ends this process with its parent; calls `told`, from a thread, if the parent wants its end before.

    It is given the reason: empty, to let running calls end first.
    """
    threading.Thread(target=_follow, args=(told,), name="quintet-parent", daemon=True).start()


def _follow(told: Callable[[str], object]) -> None:
    """A pipe's end is seen whatever killed the other side. Nothing is worth saving: at once, in the midst of a step."""
    with open(sys.stdin.fileno(), "rb", buffering=0, closefd=False) as pipe:
        while (line := pipe.readline()).endswith(b"\n"):
            with contextlib.suppress(RuntimeError):  # its loop has ended: so does the process
                told(line[:-1].decode())
    os._exit(PARENT_GONE)
