"""Thoughts that go on behind an end that a budget set, up to the end that the model writes itself."""

from collections.abc import Callable

from quintet.parsers.events import Content, Event, Reasoning


class LateEnd:
    """Holds the first content behind a thought, which a second end makes thought. `most`: its characters; 0: none."""

    def __init__(self, emit: Callable[[Event], None], most: int) -> None:
        self._emit, self._most = emit, most
        self._held: list[str] | None = None

    def close(self, first: bool) -> None:
        """An end of a thought. `first`: the one that stands behind the thought."""
        if first:
            self._held = [] if self._most else None
        elif self._held:
            text, self._held = "".join(self._held), None
            self._emit(Reasoning(text))

    def add(self, event: Event) -> None:
        """The next event."""
        if self._held is None:
            self._emit(event)
        elif isinstance(event, Content):
            self._held.append(event.text)
            if sum(map(len, self._held)) > self._most:
                self.release()
        else:
            self.release()
            self._emit(event)

    def release(self) -> None:
        """Emits what is held: it is content."""
        held, self._held = self._held, None
        if held:
            self._emit(Content("".join(held)))
