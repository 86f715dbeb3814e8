"""A peer in a process of its own that answers orders, a JSON line each."""

import json
import subprocess
from pathlib import Path
from typing import Any


class Peer:
    """A process of `python` that runs this class's script with the peer's name, and has the first order answered."""

    script: str

    def __init__(self, name: str, python: str, start: dict[str, Any]) -> None:
        pipe, silent = subprocess.PIPE, subprocess.DEVNULL
        self.name = name
        self._process = subprocess.Popen(
            [python, str(Path(__file__).with_name(self.script)), name],
            stdin=pipe,
            stdout=pipe,
            stderr=silent,
            text=True,
        )
        self.ask(start)

    def ask(self, order: dict[str, Any]) -> dict[str, Any]:
        """Returns the answer to an order. RuntimeError if the process ends instead."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.name} ended; run {self._process.args} by hand to see its error")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        """Ends the process."""
        self._process.kill()
        self._process.wait()
