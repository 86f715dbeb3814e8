"""Checkpoints' names for a model's tensors, and the tensors that several of a checkpoint's make, as transformers has
them."""

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Made:
    """A tensor that is made of a checkpoint's when it is read: what the loader asks of an entry."""

    name: str  # the modules'
    converter: Any  # transformers' WeightConverter
    sources: tuple[tuple[str, tuple[Any, ...]], ...]  # its patterns, and the entries that fit each, in order
    target: str  # the first that the converter makes
    config: Any

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self._run("meta")[self.name].shape)

    @property
    def dtype(self) -> torch.dtype | str:
        found: torch.dtype | str = self.sources[0][1][0].dtype
        return found

    def tensor(self) -> Tensor:
        return self._run("cpu")[self.name]

    def names(self) -> list[str]:
        """All that the converter makes of the same entries."""
        return list(self._run("meta"))

    def _run(self, device: str) -> dict[str, Tensor]:
        converter = copy.deepcopy(self.converter)
        for pattern, entries in self.sources:
            for entry in entries:
                tensor = entry.tensor() if device == "cpu" else torch.empty(entry.shape, device="meta")
                converter.collected_tensors[pattern].append(tensor)
        found = converter.convert(self.target, config=self.config)
        return {name: each[0] if isinstance(each, list) else each for name, each in found.items()}


class Names:
    """What transformers does with the names of a model's checkpoints. Made before modules are replaced."""

    def __init__(self, model: Any) -> None:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter

        transforms = get_model_conversion_mapping(model)
        self._converters = [each for each in transforms if isinstance(each, WeightConverter)]
        self._renamings = [each for each in transforms if not isinstance(each, WeightConverter)]
        self._prefix, self._config = model.base_model_prefix, model.config
        self._wanted = dict.fromkeys(model.state_dict(), True)

    def gathered(self, entries: Mapping[str, Any]) -> dict[str, Any]:
        """A checkpoint's tensors under the modules' names. ValueError where two come by one name."""
        from transformers.core_model_loading import dot_natural_key

        found: dict[str, Any] = {}
        several: dict[str, tuple[Any, dict[str, list[Any]]]] = {}
        for name in sorted(entries, key=dot_natural_key):
            own, pattern = self._renamed(name)
            if pattern is None:
                if own in found:
                    raise ValueError(f"the checkpoint holds {own} twice, once as {name}; remove what is not the model's")
                found[own] = entries[name]
                continue
            converter = next(each for each in self._converters if pattern in each.source_patterns)
            several.setdefault(own, (converter, {}))[1].setdefault(pattern, []).append(entries[name])
        for name, each in self._made(several):
            found[name] = each
        return found

    def _renamed(self, name: str) -> tuple[str, str | None]:
        """The modules' name, and the pattern of the converter that the tensor is for."""
        from transformers.core_model_loading import rename_source_key

        own, pattern = rename_source_key(name, self._renamings, self._converters, self._prefix, self._wanted)
        if own in self._wanted or name not in self._wanted:
            return (own, pattern) if own in self._wanted else (own, None)
        plain, _ = rename_source_key(name, [], [], self._prefix, self._wanted)
        return plain, None

    def _made(self, several: Mapping[str, tuple[Any, dict[str, list[Any]]]]) -> Iterator[tuple[str, Made]]:
        for target, (converter, sources) in several.items():
            whole = tuple((pattern, tuple(entries)) for pattern, entries in sources.items())
            made = Made(target, converter, whole, target, self._config)
            try:
                names = made.names()
            except (RuntimeError, ValueError, IndexError, KeyError, TypeError) as error:
                reason = " ".join(str(error).split())[:200]
                raise ValueError(f"the checkpoint's tensors do not make {target} ({reason}); fetch it anew") from error
            for name in names:
                yield name, Made(name, converter, whole, target, self._config)
