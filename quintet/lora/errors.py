"""AdapterError: the one error of adapters that cannot be used."""

from pathlib import Path

_MAX_NAME = 200  # characters of a name of a file that an error repeats


class AdapterError(ValueError):
    """Names the adapter's folder or file, the tensor or entry, what is wrong with it, and what to do."""

    def __init__(self, place: Path | str, problem: str) -> None:
        super().__init__(f"{place}: {problem}")


def shown(name: object) -> str:
    """Returns the name quoted, in one line, and cut where it is long."""
    text = repr(name)
    return text if len(text) <= _MAX_NAME else text[:_MAX_NAME] + "..."
