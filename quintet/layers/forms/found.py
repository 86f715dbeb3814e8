"""A plan that goes by what a checkpoint's files hold, module by module."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from quintet.weights import OnFile, Part, Reader


@dataclass(frozen=True)
class Found:
    """The modules' readers; one that has none holds floats."""

    readers: Mapping[str, Reader] = field(hash=False)

    def reader(self, module: str) -> Reader | None:
        return self.readers.get(module)


def modules(tensors: Mapping[str, OnFile], end: str) -> list[str]:
    """Those that have a tensor whose name ends so."""
    return [name.removesuffix(end) for name in tensors if name.endswith(end)]


def outputs_of(part: Part) -> int:
    """Of the whole tensor on file, whichever share of its outputs the part is."""
    return part.shape[0] if part.total is None else part.total
