"""`quintet serve` as users start it: a process tree with a port of its own."""

import contextlib
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx
import psutil

NULL = ("--device", "null", "--load-format", "dummy")  # the bundled model's tokenizer, and no arithmetic
ENDLESS = ("--hf-overrides", '{"max_position_embeddings": 1048576}', "--max-model-len", "1048576", "--num-pages=140k")
LONG = {"prompt": "a", "max_tokens": 1_000_000, "ignore_eos": True, "stream": True}  # there: minutes, at 0.1 ms a token
START = 240.0  # seconds; a machine that runs other tests beside takes some
PATIENCE = 60.0  # seconds for what takes a fraction of one, unless the machine is busy
_READY = re.compile(rb"ready: .* at (\S+)\n")


def until(true: Callable[[], bool], seconds: float = PATIENCE) -> bool:
    """Waits for it, at most so long; whether it came."""
    end = time.monotonic() + seconds
    while not true():
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


class Server:
    """with Server("--max-model-len", "256") as server: httpx.get(server.url + "/health")"""

    def __init__(self, *flags: str, wait: bool = True, before: tuple[str, ...] = ()) -> None:
        """`before`: words of a command that runs it, such as on another host."""
        descriptor, name = tempfile.mkstemp(prefix="quintet-serve-", suffix=".log")
        self.log = Path(name)
        port = () if "--uds" in flags else ("--port", "0")
        with open(descriptor, "wb") as out:
            self.process = subprocess.Popen(
                [*before, sys.executable, "-m", "quintet.cli.main", "serve", *flags, *port],
                stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT,
            )  # fmt: skip
        self.url = ""
        self._tree = {self.process.pid: psutil.Process(self.process.pid)}
        if wait:
            self.wait_ready()

    def __enter__(self) -> "Server":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None and self.log.exists():
            print(self.output)  # pytest shows it beside the failure
        self.close()

    def wait_ready(self) -> None:
        end = time.monotonic() + START
        while (found := _READY.search(self.log.read_bytes())) is None:
            if self.process.poll() is not None or time.monotonic() > end:
                said = self.output
                self.close()
                raise AssertionError(f"the server did not get ready:\n{said}")
            time.sleep(0.02)
        self.url = found[1].decode()
        self.children()

    @property
    def output(self) -> str:
        return self.log.read_text(errors="replace")

    def children(self) -> list[psutil.Process]:
        """Engine and further API processes, in the order of their start."""
        found: list[psutil.Process] = psutil.Process(self.process.pid).children(recursive=True)
        self._tree.update((each.pid, each) for each in found)
        return found

    def those(self, module: str) -> list[psutil.Process]:
        """The children that run that module, such as "engine_process" or "api_process"."""
        wanted = {f"quintet.{package}.processes.{module}" for package in ("engine", "server")}
        return [each for each in self.children() if not wanted.isdisjoint(words_of(each))]

    def find(self, module: str) -> psutil.Process:
        """The first of them."""
        return self.those(module)[0]

    def api_processes(self) -> list[psutil.Process]:
        """All that answer; the server's own process is the first of them."""
        return [psutil.Process(self.process.pid), *self.those("api_process")]

    @contextlib.contextmanager
    def only(self, process: psutil.Process) -> Iterator[httpx.Client]:
        """A client whose connection this API process took: they share a socket, so the others stand still meanwhile."""
        others = [each for each in self.api_processes() if each != process]
        with httpx.Client(base_url=self.url, timeout=PATIENCE) as client:
            try:
                for each in others:
                    each.suspend()
                assert until(lambda: all(each.status() == psutil.STATUS_STOPPED for each in others))
                assert client.get("/health").status_code == 200
            finally:
                for each in others:
                    each.resume()
            yield client

    def all_there(self) -> bool:
        """Whether every API process answers the others. Then it has its orders, and soon knows the model."""
        return self.metrics()["quintet:peers_silent"] == 0

    def leftovers(self, seconds: float = PATIENCE) -> list[int]:
        """Processes of this server that live on after that time."""
        until(lambda: not any(map(_lives, self._tree.values())), seconds)
        return [each.pid for each in self._tree.values() if _lives(each)]

    def stop(self, number: int = signal.SIGTERM, seconds: float = PATIENCE) -> int:
        """Its exit code."""
        self.process.send_signal(number)
        return self.process.wait(seconds)

    def metrics(self) -> dict[str, float]:
        """Name -> the sum of its samples."""
        totals: dict[str, float] = {}
        for line in httpx.get(self.url + "/metrics", timeout=PATIENCE).text.splitlines():
            if line and not line.startswith("#"):
                name, value = re.sub(r"\{.*\}", "", line).split()[:2]
                totals[name] = totals.get(name, 0.0) + float(value)
        return totals

    def complete(self, prompt: Any = "Once upon a time", **fields: Any) -> httpx.Response:
        body = {"prompt": prompt, "temperature": 0, "max_tokens": 8, **fields}
        return httpx.post(self.url + "/v1/completions", json=body, timeout=PATIENCE)

    def close(self) -> None:
        """Whatever state it is in."""
        if self.process.poll() is None:
            self.children()
        for each in self._tree.values():
            with contextlib.suppress(psutil.NoSuchProcess):  # its parent may just have ended it
                each.kill()
        self.process.wait()
        self.log.unlink(missing_ok=True)


def words_of(process: psutil.Process) -> list[str]:
    """Of its command line; none where it has ended."""
    try:
        return list(process.cmdline())
    except psutil.Error:
        return []


def _lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
