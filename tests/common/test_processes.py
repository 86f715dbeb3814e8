"""Children of this process: their orders, their ends, and theirs when this process goes."""

import gc
import os
import queue
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from quintet.common.processes import PARENT_GONE, Child, Exit, close_all, end
from quintet.common.subprocess_python import python_command

FOLLOWS = """
import sys, threading
from quintet.common.processes import follow_parent, read_orders
print(read_orders(dict[str, int]), flush=True)
follow_parent(lambda why: print("told", why, flush=True))
threading.Event().wait()
"""
STARTS = """
import sys, threading
from quintet.common.processes import Child
child = Child("follows", {"a": 1})
print(child.pid, flush=True)
threading.Event().wait()
"""


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules that children run."""
    (tmp_path / "follows.py").write_text(FOLLOWS)
    (tmp_path / "starts.py").write_text(STARTS)
    monkeypatch.syspath_prepend(tmp_path)


def follows() -> Child:
    """A child that has its orders."""
    child = Child("follows", {"a": 1}, stdout=subprocess.PIPE)
    assert child.stdout.readline() == b"{'a': 1}\n"
    return child


@pytest.mark.usefixtures("modules")
def test_a_child_gets_orders_and_messages_ignores_signals_and_ends_when_it_is_let_go() -> None:
    child, ended = follows(), queue.SimpleQueue[Exit]()
    assert os.getsid(child.pid) == child.pid, "Ctrl-C in a terminal is not for it"
    for number in (signal.SIGINT, signal.SIGTERM):
        os.kill(child.pid, number)
    child.ask_to_end("no\nreason")
    child.ask_to_end()
    assert [child.stdout.readline() for _ in range(2)] == [b"told no reason\n", b"told \n"]
    assert child.exit is None
    child.follow(ended.put)
    child.close()
    assert ended.get(timeout=60) == child.exit == Exit(PARENT_GONE)
    assert not child.tell(b"more"), "it reads no more"
    child.close()


@pytest.mark.usefixtures("modules")
@pytest.mark.parametrize("how", ["closed", "forgotten"])
def test_a_child_that_was_stopped_ends_too(how: str) -> None:
    child = follows()
    process = psutil.Process(child.pid)
    os.kill(child.pid, signal.SIGSTOP)
    if how == "closed":
        close_all([child])
    del child
    gc.collect()
    psutil.wait_procs([process], timeout=60)
    assert not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


@pytest.mark.usefixtures("modules")
def test_a_killed_child_is_named_and_none_is_left() -> None:
    child = follows()
    child.kill()
    assert str(child.wait(60)) == "it was killed by SIGKILL; the system may have run out of memory"
    child.close()
    assert not psutil.pid_exists(child.pid)
    assert (str(Exit(7)), str(Exit(PARENT_GONE))) == ("it exited with code 7", "its parent had gone")


@pytest.mark.usefixtures("modules")
@pytest.mark.skipif(sys.platform != "linux", reason="the system ends it")
def test_a_stopped_child_does_not_outlive_a_killed_parent() -> None:
    with subprocess.Popen(python_command("starts"), stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        assert parent.stdout.readline() == b"{'a': 1}\n", "it has taken its orders"
        child.suspend()
        parent.kill()
    psutil.wait_procs([child], timeout=60)
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE


def test_one_that_does_not_heed_sigterm_is_killed() -> None:
    code = "import signal, sys; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(1, flush=True); sys.stdin.read()"
    words = [sys.executable, "-c", code]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline()
        end(process, 0.1)
        assert process.returncode == -signal.SIGKILL


@pytest.mark.usefixtures("modules")
def test_a_child_looks_for_garbage_once_it_has_its_orders(tmp_path: Path) -> None:
    code = "import gc\nfrom quintet.common.processes import read_orders\n"
    (tmp_path / "looks.py").write_text(f"{code}print(gc.isenabled())\nread_orders(int)\nprint(gc.isenabled())\n")
    child = Child("looks", 1, stdout=subprocess.PIPE)
    assert child.stdout.read() == b"False\nTrue\n"
    child.close()


@pytest.mark.parametrize("ended", [False, True], ids=["under way", "ended"])
def test_a_device_call_that_never_returns_does_not_keep_a_process(ended: bool) -> None:
    program = (
        "import atexit, threading; from quintet.common.processes import DEVICE_CALL, exit_process\n"
        "atexit.register(print, 'in good order', flush=True); held = threading.Event()\n"
        "call = threading.Thread(target=held.wait, name=DEVICE_CALL); call.start()\n"
        f"if {ended}: held.set(); call.join()\n"
        "exit_process(7)"
    )
    done = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, timeout=60)
    assert (done.returncode, done.stdout) == (7, b"in good order\n" if ended else b"")
