"""Processes that tests start and end."""

import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import psutil

from quintet.common.processes import ENDING
from tests.helpers.servers.serving import until


@contextmanager
def the_same_signals() -> Iterator[None]:
    """A server that runs in this process changes what signals mean, and leaves them so: it is about to end."""
    handlers, blocked = {each: signal.getsignal(each) for each in ENDING}, signal.pthread_sigmask(signal.SIG_BLOCK, ())
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


def gone(*processes: int) -> bool:
    """Whether none of them runs any more."""
    return not any(psutil.pid_exists(each) and psutil.Process(each).status() != "zombie" for each in processes)


def interrupted(process: "subprocess.Popen[str]", times: int = 3) -> list[str]:
    """What it says to Ctrl-C each time; then it is killed."""
    assert process.stdout is not None
    said = []
    try:
        for _ in range(times):
            time.sleep(0.2)
            process.send_signal(signal.SIGINT)
            said.append(process.stdout.readline())
    finally:
        process.kill()
        process.wait()
    return said


def killed_while_it_starts(start: Callable[[], object]) -> BaseException:
    """Kills the first process that `start`, which runs in a thread, has begun -> what came of it."""
    before, found = {each.pid for each in psutil.Process().children()}, list[BaseException]()

    def run() -> None:
        try:
            start()
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()

    def children() -> list[psutil.Process]:
        return [each for each in psutil.Process().children() if each.pid not in before]

    assert until(lambda: bool(children()), 30)
    children()[0].kill()
    thread.join(60)
    assert not thread.is_alive()
    [error] = found
    return error
