"""Processes that tests start and end."""

import signal
import subprocess
import threading
import time
from collections.abc import Callable

import psutil

from tests.helpers.serving import until


def gone(*processes: int) -> bool:
    """Whether none of them runs any more."""
    return not any(psutil.pid_exists(each) and psutil.Process(each).status() != "zombie" for each in processes)


def outlives_ctrl_c(process: "subprocess.Popen[str]", processes: list[int]) -> None:
    """It says "interrupted" each time, and goes on; when it is killed, none of `processes` is left."""
    assert process.stdout is not None
    try:
        for _ in range(3):
            time.sleep(0.2)
            process.send_signal(signal.SIGINT)
            assert process.stdout.readline() == "interrupted\n"
    finally:
        process.kill()
        process.wait()
    assert until(lambda: gone(*processes), 10)


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
