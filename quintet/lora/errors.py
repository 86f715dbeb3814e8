"""AdapterError: the one error of adapters that cannot be used."""

from pathlib import Path

_SUFFIXES = (".json", ".safetensors")  # of an adapter's files
_MAX_NAME = 200  # characters of a name of a file that an error repeats


class AdapterError(ValueError):
    """Names the adapter's folder or file, the tensor or entry, what is wrong with it, and what to do."""

    def __init__(self, place: Path | str, problem: str) -> None:
        """`place`: a path, or the name of a module or tensor."""
        super().__init__(f"{place}: {problem}")
        self.place, self.problem = place, problem


def public_text(error: BaseException) -> str:
    """Returns an error about an adapter for callers of a server: without the folders of this machine, which its log
    names."""
    if isinstance(error, AdapterError):
        if isinstance(error.place, str):
            return str(error)
        return f"{error.place.name}: {error.problem}" if error.place.suffix in _SUFFIXES else error.problem
    if isinstance(error, OSError) and error.filename is not None:
        return f"{Path(str(error.filename)).name}: {error.strerror or type(error).__name__}"
    return str(error) or type(error).__name__


def shown(name: object) -> str:
    """Returns the name quoted, in one line, and cut where it is long."""
    text = repr(name)
    return text if len(text) <= _MAX_NAME else text[:_MAX_NAME] + "..."
