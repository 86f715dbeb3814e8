"""Checkpoints' names for a model's tensors, as transformers has them, and tensors that are made of several.

A tensor is made when it is read, one at a time.
"""

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quintet.layers.moe.moe import DOWN, GATE, UP, unstacked

GATE_UP, TRUNK = "gate_up_proj", "model."  # of transformers' stacks; of names


@dataclass(frozen=True)
class Made:
    """A tensor that is made of a checkpoint's when it is read: what the loader asks of an entry."""

    name: str  # the modules'
    converter: Any  # transformers' WeightConverter
    sources: tuple[tuple[str, tuple[Any, ...]], ...]  # its patterns, and the entries that fit each, in order
    target: str  # the first that the converter makes
    model: "Outline"

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self._run(False)[self.name].shape)

    @property
    def dtype(self) -> torch.dtype | str:
        found: torch.dtype | str = self.sources[0][1][0].dtype
        return found

    def tensor(self) -> Tensor:
        return self._run(True)[self.name]

    def names(self) -> list[str]:
        """Returns the names of all tensors that the converter makes of the same entries."""
        return list(self._run(False))

    def _run(self, read: bool) -> dict[str, Tensor]:
        """Converts the entries' tensors; with `read` False only their shapes."""
        converter = copy.deepcopy(self.converter)
        for pattern, entries in self.sources:
            for entry in entries:
                tensor = entry.tensor() if read else torch.empty(entry.shape, device="meta")
                converter.collected_tensors[pattern].append(tensor)
        found = converter.convert(self.target, model=self.model, config=self.model.config)
        if isinstance(found, tuple):  # transformers 5.0 gives its record of errors, too, and raises no less
            found = found[0]
        return {name: each[0] if isinstance(each, list) else each for name, each in found.items()}


class Outline:
    """The model that a converter looks at: its parameters on the meta device, before any module is replaced."""

    def __init__(self, model: Any) -> None:
        self.config, self.base_model_prefix = model.config, model.base_model_prefix
        self._tensors = {name: tensor.to("meta") for name, tensor in model.state_dict().items()}

    def state_dict(self) -> dict[str, Tensor]:
        """Returns its tensors by name."""
        return self._tensors

    def get_parameter(self, name: str) -> Tensor:
        """Returns a tensor by its name, as nn.Module's does."""
        if name not in self._tensors:
            raise AttributeError(f"the model has no parameter {name}")
        return self._tensors[name]

    get_buffer = get_parameter_or_buffer = get_parameter


@dataclass(frozen=True)
class Number:
    """A tensor without axes, as a vector."""

    entry: Any

    def __getattr__(self, name: str) -> Any:
        return getattr(self.entry, name)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.entry.shape) or (1,)

    def tensor(self) -> Tensor:
        tensor: Tensor = self.entry.tensor()
        return tensor.reshape(self.shape)


class WeightNames:
    """Applies transformers' renames and conversions of checkpoint tensors. Made before modules are replaced."""

    def __init__(self, model: Any) -> None:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter

        transforms = get_model_conversion_mapping(model)
        self._converters = [each for each in transforms if isinstance(each, WeightConverter)]
        self._renamings = [each for each in transforms if not isinstance(each, WeightConverter)]
        self._prefix, self._model = model.base_model_prefix, Outline(model)
        self._wanted = dict.fromkeys(model.state_dict(), True)
        self._numbers = {name for name, tensor in model.state_dict().items() if not tensor.dim()}
        self._apart: set[str] = set()  # modules of experts with matrices that are wanted one by one

    def separable(self, path: str) -> bool:
        """Returns whether checkpoints keep this module's experts one by one, gate before up, or as the stacks
        themselves: their matrices are then returned one by one."""
        for name, merged in ((GATE_UP, ["MergeModulelist", "Concatenate"]), (DOWN, ["MergeModulelist"])):
            for each in self._converters:
                if f"{path}.{name}".endswith(each.target_patterns[0]):
                    done = [type(operation).__name__ for operation in each.operations]
                    if done != merged or len(each.source_patterns) != len(merged):
                        return False
        self._apart.add(path)
        return True

    def renamed(self, name: str) -> str:
        """Returns the modules' name of a checkpoint's tensor, or of what it is made into with others."""
        return self._renamed(name)[0]

    def gathered(self, entries: Mapping[str, Any]) -> dict[str, Any]:
        """A checkpoint's tensors under the modules' names. ValueError where two come by one name."""
        from transformers.core_model_loading import dot_natural_key

        found: dict[str, Any] = {}
        several: dict[str, tuple[Any, dict[str, list[Any]]]] = {}
        for name in sorted(entries, key=dot_natural_key):
            own, pattern = self._renamed(name)
            if pattern is None:
                if own in found:
                    raise ValueError(
                        f"the checkpoint holds {own} twice, once as {name}; remove what is not the model's"
                    )
                found.update(self._whole(own, entries[name]))
                continue
            converter = next(each for each in self._converters if pattern in each.source_patterns)
            several.setdefault(own, (converter, {}))[1].setdefault(pattern, []).append(entries[name])
        for target, (converter, sources) in several.items():
            path, _, stack = target.rpartition(".")
            made = (
                _apart(path, stack, converter, sources)
                if path in self._apart
                else self._made(target, converter, sources)
            )
            found.update(made)
        return found

    def _whole(self, name: str, entry: Any) -> dict[str, Any]:
        """Returns a checkpoint's tensor by its name; for a stack with matrices that are wanted one by one, these."""
        if name in self._numbers:
            return {name: Number(entry)}
        if name.rpartition(".")[0] not in self._apart:
            return {name: entry}
        return {each: entry._replace(at=at) for each, at in unstacked(name, entry.shape).items()} or {name: entry}

    def _renamed(self, name: str) -> tuple[str, str | None]:
        """The modules' name, and the pattern of the converter that the tensor is for."""
        from transformers.core_model_loading import rename_source_key

        short = name.removeprefix(TRUNK)  # which the loader puts before the names of a trunk
        if name not in self._wanted and short in self._wanted:
            return short, None
        own, pattern = rename_source_key(name, self._renamings, self._converters, self._prefix, self._wanted)
        if own in self._wanted or name not in self._wanted:
            return (own, pattern) if own in self._wanted else (own, None)
        plain, _ = rename_source_key(name, [], [], self._prefix, self._wanted)
        return plain, None

    def _made(self, target: str, converter: Any, sources: Mapping[str, list[Any]]) -> dict[str, Any]:
        whole = tuple((pattern, tuple(entries)) for pattern, entries in sources.items())
        made = Made(target, converter, whole, target, self._model)
        try:
            names = made.names()
        except Exception as error:  # whatever a converter raises
            reason = " ".join(str(error).split())[:200]
            raise ValueError(f"the checkpoint's tensors do not make {target} ({reason}); fetch it anew") from error
        return {name: Made(name, converter, whole, target, self._model) for name in names}


def _apart(path: str, stack: str, converter: Any, sources: Mapping[str, list[Any]]) -> dict[str, Any]:
    """The matrices of which a stack would be made, under our names for them."""
    own = (DOWN,) if stack == DOWN else (GATE, UP)
    return {
        f"{path}.{expert}.{name}.weight": entry
        for name, pattern in zip(own, converter.source_patterns, strict=True)
        for expert, entry in enumerate(sources.get(pattern, ()))
    }
