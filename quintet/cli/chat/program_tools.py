"""Programs as tools: a list of words, which no shell ever reads, with bounds on time and output."""

import contextlib
import json
import os
import re
import select
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quintet.cli.chat.tool import MAX_NAME
from quintet.common.suggestions import refuse_unknown

MAX_OUTPUT = 65_536  # bytes; a program that writes more is ended
MAX_SECONDS = 600.0
_KEYS = ("name", "description", "command", "parameters", "timeout")
_PLACEHOLDER = re.compile(r"\{(\w+)\}")


@dataclass(frozen=True)
class ProgramTool:
    """Program that gets its arguments as JSON on standard input, and in those words of its command that name one.

    A word with an absent argument is left out. A word that begins with one may not begin with "-", which a program
    takes for an option, unless the word "--" stands before it.
    """

    name: str
    description: str
    parameters: dict[str, Any]
    command: tuple[str, ...]
    timeout: float = 30.0  # seconds

    def run(self, arguments: dict[str, Any]) -> str:
        """Returns its output and standard error, less the last line's end; ValueError with that text if it fails."""
        missing = [each for each in self.parameters.get("required", ()) if each not in arguments]
        if missing:
            raise ValueError(f"{', '.join(missing)} must be given")
        with tempfile.TemporaryFile() as output:
            output.write(json.dumps(arguments, ensure_ascii=False).encode())
            output.seek(0)
            with subprocess.Popen(
                self.command_line(arguments), stdin=output, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                start_new_session=True,
            ) as process:  # fmt: skip
                return self._watch(process)

    def command_line(self, arguments: Mapping[str, Any]) -> list[str]:
        """The command with the arguments in their places."""
        there = self.parameters.get("properties", {})
        words: list[str] = []
        for word in self.command:
            named = [each for each in _PLACEHOLDER.findall(word) if each in there]
            if any(each not in arguments for each in named):
                continue
            filled = _PLACEHOLDER.sub(lambda at: _text(arguments[at[1]]) if at[1] in there else at[0], word)
            if named and filled[:1] == "-" != word[:1] and "--" not in words:
                raise ValueError(f"{named[0]} may not begin with '-'")
            words.append(filled)
        return words

    def _watch(self, process: "subprocess.Popen[bytes]") -> str:
        assert process.stdout is not None
        end, output, why = time.monotonic() + self.timeout, bytearray(), ""
        try:
            while not why:
                if not select.select([process.stdout], [], [], max(0.0, end - time.monotonic()))[0]:
                    why = f"took longer than {self.timeout:g} seconds"
                elif not (piece := os.read(process.stdout.fileno(), 65_536)):
                    break
                elif len(output := output + piece) > MAX_OUTPUT:
                    why = f"wrote more than {MAX_OUTPUT} bytes"
            if not why:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(max(0.0, end - time.monotonic()))
        finally:  # also at Ctrl-C, which does not reach a session of its own
            if process.returncode is None:  # not reaped yet: its id is still its own, though it may have ended
                why = why or f"took longer than {self.timeout:g} seconds"
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, signal.SIGKILL)  # and what it has started
        text = bytes(output[:MAX_OUTPUT]).decode(errors="replace")
        if why or process.returncode:
            raise ValueError(f"{self.command[0]} {why or f'ended with status {process.returncode}'}\n{text}".rstrip())
        return text.rstrip("\n")


def program_tool(given: Any, where: str) -> ProgramTool:
    """Reads a tool from an entry of a file. ValueError names the place."""
    entry = given if isinstance(given, dict) else {}
    refuse_unknown(f"key in {where}", map(str, entry), _KEYS)
    name, command, timeout = entry.get("name"), entry.get("command"), entry.get("timeout", 30)
    parameters = entry.get("parameters") or {"type": "object", "properties": {}}
    if not isinstance(name, str) or not re.fullmatch(rf"[\w-]{{1,{MAX_NAME}}}", name):
        raise ValueError(f"{where}.name must be 1 to {MAX_NAME} letters, digits, _ or -")
    if not isinstance(command, list) or not command or not all(isinstance(each, str) for each in command):
        raise ValueError(f"{where}.command must be a list of words; no shell reads it")
    if _PLACEHOLDER.search(command[0]):
        raise ValueError(f"{where}.command must name the program in its first word; a call may not choose it")
    if not isinstance(parameters, dict) or not isinstance(parameters.get("properties", {}), dict):
        raise ValueError(f"{where}.parameters must be a JSON schema of an object")
    if not isinstance(timeout, int | float) or not 0 < timeout <= MAX_SECONDS:
        raise ValueError(f"{where}.timeout must be seconds, over 0 and at most {MAX_SECONDS:g}")
    return ProgramTool(name, str(entry.get("description") or ""), parameters, tuple(command), float(timeout))


def _text(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    if "\0" in text:
        raise ValueError("an argument of a program holds no NUL")
    return text
