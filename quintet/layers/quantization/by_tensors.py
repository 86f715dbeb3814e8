"""A plan that goes by what a checkpoint's files hold, module by module."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from quintet.interface.weights import CheckpointSlice, StoredTensor, WeightReader


@dataclass(frozen=True)
class TensorPlan:
    """The modules' readers; one that has none holds floats."""

    readers: Mapping[str, WeightReader] = field(hash=False)

    def reader(self, module: str) -> WeightReader | None:
        return self.readers.get(module)


def modules_with_tensor(tensors: Mapping[str, StoredTensor], end: str) -> list[str]:
    """Returns the modules that have a tensor with this ending."""
    return [name.removesuffix(end) for name in tensors if name.endswith(end)]


def outputs_of(part: CheckpointSlice) -> int:
    """Returns the outputs of the whole tensor on file, whichever share of them the part is."""
    return part.shape[0] if part.total is None else part.total
