"""Terminal output of a conversation: content to standard output; reasoning and everything else to standard error."""

import re
import sys
from collections.abc import Iterable

from quintet.parsers import Content, Event, Reasoning

_CONTROL_CHARACTERS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # control characters but tab and line feed
_DIM, _PLAIN = "\x1b[2m", "\x1b[0m"


class Screen:
    """One answer as it comes."""

    def __init__(self, quiet: bool) -> None:
        """quiet: no thoughts."""
        self._quiet = quiet
        self._thinking = False
        self._said = False

    def show(self, events: Iterable[Event]) -> None:
        for event in events:
            if isinstance(event, Reasoning) and not self._quiet:
                self._show_reasoning(event.text)
            elif isinstance(event, Content):
                self._end_reasoning()
                sys.stdout.write(_safe(event.text) if sys.stdout.isatty() else event.text)
                self._said = True
        sys.stdout.flush()

    def end(self) -> None:
        """Ends the last line, if there is one."""
        self._end_reasoning()
        if self._said:
            print(flush=True)

    def _show_reasoning(self, text: str) -> None:
        if not self._thinking and sys.stderr.isatty():
            sys.stderr.write(_DIM)
        self._thinking = True
        sys.stderr.write(_safe(text) if sys.stderr.isatty() else text)
        sys.stderr.flush()

    def _end_reasoning(self) -> None:
        if self._thinking:
            sys.stderr.write(f"{_PLAIN}\n" if sys.stderr.isatty() else "\n")
            sys.stderr.flush()
            self._thinking = False


def _safe(text: str) -> str:
    """Escapes control characters, so that a model's output cannot control the terminal."""
    return _CONTROL_CHARACTERS.sub(lambda at: ascii(at[0])[1:-1], text)
