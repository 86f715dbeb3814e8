"""Processes that tests start and end."""

import signal
import subprocess
import time

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
