"""Tensors that a trainer sends by checkpoint name while an engine runs: checked, and written into the weights.

A name is that of the checkpoint's files. What one weight is made of (q, k and v of a fused product, the experts of a
stack) may come one by one and in any order: tensors wait here until all are there, are placed together, and are let go.
"""

import hashlib
import re
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from quintet.common.suggestions import nearest_name
from quintet.interface.platform import Platform
from quintet.interface.weights import (
    FLOATS,
    CheckpointSlice,
    Matrix,
    ShardRange,
    StoredTensor,
    Weight,
    WeightFormat,
)
from quintet.layers.attention import kv_scales
from quintet.layers.build import named_layers
from quintet.layers.decoder import ModelBase
from quintet.model_loader.loader import LONGEST, DeclaredWeight, TensorEntry, declared_weights
from quintet.model_loader.text_names import text_names
from quintet.model_loader.tied_head import WEIGHT as HEAD
from quintet.model_loader.weight_files import DECODER_PREFIXES, format_names
from quintet.ops.quantize import quantize


class _InMemory:
    """One tensor, with the methods of an open file that TensorEntry calls."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def get_tensor(self, name: str) -> Tensor:
        return self._tensor

    def get_slice(self, name: str) -> "_InMemory":
        return self

    def get_shape(self) -> list[int]:
        return list(self._tensor.shape)

    def get_dtype(self) -> torch.dtype:
        return self._tensor.dtype


@dataclass(frozen=True)
class QuantizedFloats:
    """Reads floats as a matrix in the format of an engine's quantized checkpoint: each share is quantized by itself."""

    weight_format: WeightFormat

    def stored(self, part: CheckpointSlice) -> dict[str, StoredTensor]:
        return {part.source: StoredTensor(part.stored_shape, FLOATS)}

    def format(self, shard: ShardRange) -> WeightFormat:
        return self.weight_format

    def matrix(self, part: CheckpointSlice, shard: ShardRange, tensors: Mapping[str, Tensor]) -> Matrix:
        return quantize(self.floats(part, shard, tensors), self.weight_format)

    def floats(self, part: CheckpointSlice, shard: ShardRange, tensors: Mapping[str, Tensor]) -> Tensor:
        tensor = tensors[part.source].t() if part.transposed else tensors[part.source]
        return tensor[slice(*shard.outputs), slice(*shard.inputs)].float()


@dataclass(eq=False)
class _Target:
    """One weight of the model, and the tensors for it that have come."""

    declared: DeclaredWeight
    weight: Weight  # as declared, or with a reader of floats
    held: dict[str, Tensor] = field(default_factory=dict)
    written: bool = False  # since the update began

    @property
    def missing(self) -> list[str]:
        return [name for name in self.weight.stored if name not in self.held]

    @property
    def pending(self) -> bool:
        """True if some of its tensors have come, and not all."""
        return bool(self.held)

    def use(self, floats: bool) -> None:
        """Takes floats, or the tensors of the checkpoint's format; those of the other form that wait are dropped."""
        weight = _of_floats(self.declared.weight) if floats else self.declared.weight
        if weight.reader != self.weight.reader:
            self.weight = weight
            self.held.clear()


class Incoming:
    """One update of a rank's weights. Not to be used while a step runs.

    After the first write the model is torn until finish() has returned.
    """

    def __init__(self, model: ModelBase, platform: Platform, module_name: Callable[[str], str] | None = None) -> None:
        """`module_name`: of a tensor of a tower, whose names are not those of a text model."""
        self._model, self._platform, self._module_name = model, platform, module_name
        self._targets = [_Target(each, each.weight) for each in declared_weights(model)]
        self._by_source: dict[str, list[tuple[_Target, bool]]] = {}  # with True where it is the name of floats
        self._elsewhere: set[str] = set(model.other_stage_tensors)  # that other ranks keep whole
        for target in self._targets:
            weight = target.declared.weight
            forms = [(weight, False)] if weight.reader is None else [(weight, False), (_of_floats(weight), True)]
            for form, floats in forms:
                self._elsewhere |= set(form.stored_on_all_ranks)
                for name in form.stored:
                    self._by_source.setdefault(name, []).append((target, floats))
        self._elsewhere -= set(self._by_source)
        self._ignored = [re.compile(pattern) for pattern in model.ignored_tensors]
        gathers = type(model).gathered is not ModelBase.gathered
        # of a family whose modules' tensors are made of several of the files': all wait until finish()
        self._gathered: dict[str, TensorEntry] | None = {} if gathers else None
        self._shares_head = HEAD not in self._by_source and any(each.fullmatch(HEAD) for each in self._ignored)
        self._tables: dict[
            str, tuple[torch.dtype, int]
        ] = {}  # types and digests of the embedding, and of a head that the model shares with it
        self.num_written = 0  # weights

    @property
    def pending(self) -> list[str]:
        """Names of tensors without which some that have come make no weight; at most a few."""
        return [name for target in self._targets if target.pending for name in target.missing]

    def check(self, names: Sequence[str]) -> None:
        """ValueError for names of tensors that this model has no place for. Nothing is changed."""
        if self._gathered is not None:
            return
        unknown = [name for name in names if not self._known(name)]
        if unknown:
            hint = nearest_name(unknown[0], self._by_source)
            nearest = f" (did you mean {hint!r}?)" if hint else ""
            raise ValueError(
                f"the model has no place for {format_names(unknown)}{nearest}; names are those of the checkpoint's "
                "files"
            )

    def expect(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> None:
        """Checks a tensor that is to come. ValueError if it has no place, or is of another shape or type."""
        self._check_name(name)
        if self._gathered is None:
            self._entries(name, torch.empty(tuple(shape), dtype=dtype, device="meta"))

    def put(self, name: str, tensor: Tensor, owned: bool = False) -> None:
        """Takes a tensor by its name in the checkpoint's files; writes the weights that it completes.

        ValueError if it has no place, or is of another shape or type: then nothing has changed. The tensor is copied
        if it must wait, unless it is `owned`: the caller does not change it any more.
        """
        self._check_name(name)
        given = tensor.detach()
        tensor = given.cpu()  # itself, where it is on the host
        owned = owned or tensor.data_ptr() != given.data_ptr()
        if self._gathered is not None:
            self._gathered[name] = TensorEntry(_InMemory(tensor if owned else tensor.clone()), name)
            return
        for own, part in self._entries(name, tensor):
            self._take(own, part, owned)

    def takes(self, name: str) -> bool:
        """True if a tensor of this name is a weight of the model, or a part of one."""
        self._check_name(name)
        known = self._by_source.keys() | self._elsewhere | set(self._model.gathered_from)
        return any(own in known for own in self._candidates(name))

    def finish(self, partial: bool = False) -> None:
        """Checks that the update is complete. ValueError names tensors that never came: unless `partial`, every weight
        must have been written; in any case those must be complete of which some tensors came."""
        self.place_waiting()
        if lacking := self.pending:
            raise ValueError(
                f"weights are incomplete: {format_names(lacking)} never came, and others that they make one weight "
                "with did; send them together"
            )
        missing = [
            name
            for target in self._targets
            if not target.written and not isinstance(target.declared.weight.reader, kv_scales.HeadScales)
            for name in target.declared.weight.stored
        ]
        if missing and not partial:
            raise ValueError(
                f"{format_names(sorted(set(missing)))} never came; send all tensors of the model, or finish with "
                "partial=True to keep the others as they are"
            )
        head = self._tables.get(HEAD)
        tables = [each for name, each in self._tables.items() if name != HEAD]
        if head is not None and any(head != each for each in tables if head[0] == each[0]):
            raise ValueError(
                f"{HEAD} differs from the token embedding, and the model was built with one weight for both; start an "
                "engine on a checkpoint that has both"
            )

    def _check_name(self, name: str) -> None:
        if not isinstance(name, str) or not name.isprintable() or len(name) > LONGEST:
            raise ValueError(f"a tensor is called {repr(name)[:64]}, which no model has; give the checkpoint's name")

    def _known(self, name: str) -> bool:
        return self.takes(name) or self._is_ignored(name, None) or not self._candidates(name) or self._unstacks(name)

    def _unstacks(self, name: str) -> bool:
        """True if a tensor of some number of axes by this name is a stack of several that the model wants."""
        stems = {own.rpartition(".experts.")[0] for own in self._by_source if ".experts." in own}
        return any(own.rpartition(".experts.")[0] in stems for own in self._candidates(name) if ".experts." in own)

    def _candidates(self, name: str) -> list[str]:
        """Modules' names that a tensor of this name may have; none for a part that is not of the text model."""
        if self._module_name is not None:
            return [self._module_name(name)]
        text = text_names([name])(name)
        if text is None:
            return []
        names = [name, text] + [f"model.{text}"] * text.startswith(DECODER_PREFIXES)
        return list(dict.fromkeys(self._model.canonical(each) for each in names))

    def _entries(self, name: str, tensor: Tensor) -> list[tuple[str, Tensor]]:
        """Returns the modules' names for a tensor, and the part of it that each has; none if it is ignored."""
        candidates = self._candidates(name)
        for own in candidates:
            several = self._model.unstacked(own, list(tensor.shape))
            found = [(each, tensor[at]) for each, at in several.items()] if several else [(own, tensor)]
            if all(each in self._by_source or each in self._elsewhere for each, _ in found):
                for each, part in found:
                    self._form(each, part)
                return found
        if candidates and not self._is_ignored(name, tensor):
            self.check([name])
            raise ValueError(f"the model has no place for {name} of shape {list(tensor.shape)}")
        if self._shares_head and HEAD in candidates and not tensor.is_meta:
            self._tables[HEAD] = _digest(tensor)
        return []

    def _is_ignored(self, name: str, tensor: Tensor | None) -> bool:
        suffixes = self._model.ignored_suffixes
        for own in self._candidates(name):
            silent = own.endswith(suffixes) or kv_scales.is_ignored_scale(own)
            if silent or any(pattern.fullmatch(own) for pattern in self._ignored):
                return True
        if tensor is None or tensor.is_meta:
            return name.endswith(".bias")
        return name.endswith(".bias") and not bool(tensor.any())  # AutoGPTQ gives one to every product

    def _form(self, own: str, tensor: Tensor) -> list[tuple[_Target, bool]]:
        """Returns the weights that take a tensor of this name, and whether as floats. ValueError for one that has
        another shape or type than each of them takes."""
        found: dict[int, tuple[_Target, bool]] = {}
        reasons: dict[int, list[str]] = {}
        for target, floats in self._by_source.get(own, ()):
            weight = _of_floats(target.declared.weight) if floats else target.declared.weight
            why = _mismatch(own, tensor, weight.stored[own]) or (_not_made(target.declared) if floats else None)
            if why is None:
                found.setdefault(id(target), (target, floats))
            else:
                reasons.setdefault(id(target), []).append(why)
        for key, whys in reasons.items():
            if key not in found:
                raise ValueError(whys[-1])
        return list(found.values())

    def _take(self, own: str, tensor: Tensor, owned: bool) -> None:
        takers = self._form(own, tensor)
        for target, floats in takers:
            target.use(floats)
        if self._shares_head and len(takers) > 1:
            self._tables[own] = _digest(tensor)
        plain = [target.weight for target, _ in takers if target.weight.reader is None]
        if len(takers) > 1 and plain and (plain[0].format.plain or plain[0].shared):
            tensor, owned = tensor.to(plain[0].dtype), owned or tensor.dtype != plain[0].dtype
        if not owned and any(len(target.weight.stored) > 1 for target, _ in takers):
            complete = all(set(target.missing) <= {own} for target, _ in takers)
            tensor = tensor if complete else tensor.clone(memory_format=torch.contiguous_format)
        for target, _ in takers:
            target.held[own] = tensor
            if not target.missing:
                self._place(target)

    def _place(self, target: _Target) -> None:
        self.num_written += 1  # before: an error in the midst of it leaves a torn weight
        tensors, target.held = target.held, {}
        self._platform.place(target.weight, tensors, into=target.declared.layer.assigned_tensors)
        target.written = True

    def place_waiting(self) -> None:
        """Makes the modules' tensors of those that wait for the end of the update, and writes them. ValueError if some
        have no place."""
        if not self._gathered:
            return
        waiting, self._gathered = self._gathered, None
        try:
            entries: dict[str, Any] = {}
            for name, entry in waiting.items():
                for own, at in self._located(name, entry):
                    entries[own] = entry._replace(at=at)
            for own, made in self._model.gathered(entries).items():
                if own in self._by_source:
                    self._take(own, made.tensor(), True)
                elif own not in self._elsewhere and not self._is_ignored(own, made.tensor()):
                    raise ValueError(f"the model has no place for {own}")
        finally:
            self._gathered = {}

    def _located(self, name: str, entry: TensorEntry) -> list[tuple[str, tuple[Any, ...]]]:
        if self._module_name is not None:
            return [(name, ())]
        text = text_names([name])(name)
        if text is None:
            return []
        own = self._model.canonical(text)
        several = self._model.unstacked(own, list(entry.shape))
        return list(several.items()) if several else [(own, ())]


def _of_floats(weight: Weight) -> Weight:
    return replace(weight, reader=QuantizedFloats(weight.format))


def _mismatch(name: str, tensor: Tensor, want: StoredTensor) -> str | None:
    """Returns what is wrong with a tensor's shape or type."""
    if want.shape is not None and tuple(tensor.shape) not in (want.shape, *want.other_shapes):
        return f"{name} is {list(tensor.shape)}, not {list(want.shape)}"
    if tensor.dtype not in want.dtypes:
        wanted = "floats" if want.dtypes == FLOATS else " or ".join(str(each) for each in want.dtypes)
        return f"{name} is of {tensor.dtype}, not of {wanted}"
    return None


def _not_made(declared: DeclaredWeight) -> str | None:
    """Returns why floats cannot become what a weight of a quantized checkpoint is held in; None if they can."""
    weight, fmt = declared.weight, declared.weight.format
    if fmt.plain:
        return None
    if not (fmt.zeros or fmt.mins or fmt.act_order or fmt.block_type):
        return None
    wanted = format_names(sorted(weight.stored))
    return (
        f"{weight.slices[0].source} came in floats, and the engine's checkpoint is quantized in a form that cannot be "
        f"made of floats ({fmt.kind}); send {wanted}, or start the engine on the model that is not quantized"
    )


def _digest(tensor: Tensor) -> tuple[torch.dtype, int]:
    return tensor.dtype, zlib.crc32(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)


def weight_checksums(model: nn.Module, paths: Collection[str] | None = None) -> Mapping[str, str]:
    """Returns the SHA-256 of each weight of a rank as it is placed, in hexadecimal digits, by layer and attribute.
    Equal settings and weights give equal checksums. `paths`: of these layers alone."""
    found = {}
    for path, layer in named_layers(model):
        for name, tensor in layer.assigned_tensors.items() if paths is None or path in paths else ():
            content = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
            found[f"{path}.{name}"] = hashlib.sha256(content.data).hexdigest()
    return found
