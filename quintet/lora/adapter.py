"""LoRA adapters in PEFT's format: reads and checks a folder, and computes the digest that tells adapters apart."""

import functools
import hashlib
import json
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from quintet.lora import tensor_names as names
from quintet.lora.errors import AdapterError, shown
from quintet.lora.peft_config import CONFIG, WEIGHTS, PeftLoraConfig, parse_peft_config, read_peft_config, weights_file
from quintet.lora.tensor_file import HashedTensor, read_tensors

MAX_BYTES = 8 * 2**30  # with copies of an embedding and a head of 128,000 rows
MAX_TENSORS = 100_000

__all__ = [
    "AdapterError",
    "LoRAAdapter",
    "LoRABounds",
    "LoRAWeights",
    "adapter_digest",
    "read_adapter",
    "write_adapter",
]


@dataclass(frozen=True)
class LoRAWeights:
    """Low-rank change of one module: scaling * lora_b @ lora_a is added to its weight [N, K]; or of a parameter that is
    a stack of E such weights, as fused experts are."""

    lora_a: Tensor  # [r, K]; of an embedding [r, V]; of a stack [E, r, K]
    lora_b: Tensor  # [N, r]; of an embedding [H, r]; of a stack [E, N, r]
    scaling: float  # alpha / r, or alpha / sqrt(r) with use_rslora
    magnitude: Tensor | None = None  # DoRA's [N], of an embedding [H], float32: norm of each output's merged weights
    bias: Tensor | None = None  # lora_bias's [N]: scaling * bias is added to the module's bias
    embedding: bool = False

    @property
    def rank(self) -> int:
        return self.lora_a.shape[-2]

    @property
    def is_stack(self) -> bool:
        return self.lora_a.dim() == 3


@dataclass(frozen=True)
class LoRAAdapter:
    """An adapter, on the CPU, in the types of its file."""

    digest: bytes  # 16 bytes, of the entries that change results and of all tensors: adapter_digest has the same
    # by the module's path in the base model ("model.layers.0.self_attn.q_proj"), or the name of a stack
    modules: Mapping[str, LoRAWeights]
    saved: Mapping[str, Tensor]  # whole tensors, trained with the adapter, by the base model's name ("score.weight")
    rank: int  # the largest
    base_model: str  # its name at the training; "" if unknown
    nbytes: int  # of all tensors
    base_copies: frozenset[str] = frozenset()  # names in `saved` of copies of the base's: of embeddings with LoRA


@dataclass(frozen=True)
class LoRABounds:
    """Limits of adapters that are read."""

    max_rank: int
    max_bytes: int = MAX_BYTES
    max_tensors: int = MAX_TENSORS


def read_adapter(folder: Path, bounds: LoRABounds) -> LoRAAdapter:
    """Reads adapter_config.json and adapter_model.safetensors; nothing is ever unpickled.

    AdapterError names the entry or tensor that is wrong, not supported, or above its bound, and the remedy.
    """
    config = read_peft_config(folder)
    parts, hashed, nbytes = _Parts(config, weights_file(folder)), [], 0
    for each in read_tensors(parts.file, bounds.max_bytes, bounds.max_tensors, keep=True):
        parts.add(each)
        nbytes += each.entry.num_bytes
        hashed.append(HashedTensor(each.entry, each.digest, None))
    modules = parts.modules()
    rank = max(weights.rank for weights in modules.values())
    if rank > bounds.max_rank:
        largest = next(path for path, weights in modules.items() if weights.rank == rank)
        raise AdapterError(
            folder, f"module {shown(largest)} has rank {rank}, and {bounds.max_rank} is the largest that is allowed; "
            f"raise max_lora_rank to {rank}",
        )  # fmt: skip
    return LoRAAdapter(
        _digest(config, hashed), modules, parts.saved, rank, config.base_model, nbytes, frozenset(parts.base_copies)
    )


def adapter_digest(folder: Path) -> bytes:
    """Returns the digest that read_adapter gives, without keeping tensors; 16 bytes.

    It is computed once for each state of the two files: path, size, times and inode. Checks the configuration and the
    file's header, not the tensors' numbers.
    """
    if not (folder / CONFIG).is_file():
        read_peft_config(folder)  # raises
    return _digest_of(folder.absolute(), _state(folder / CONFIG), _state(weights_file(folder)))


def write_adapter(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Writes an adapter that came as tensors: `config` has the entries of adapter_config.json, `tensors` PEFT's names.

    The folder is made if need be, and each file appears when it is whole. AdapterError names an entry that
    read_adapter would refuse.
    """
    entries = json.loads(json.dumps(config, default=_as_json))
    parse_peft_config(entries, folder / CONFIG)
    for name, tensor in tensors.items():
        if not tensor.is_floating_point():
            raise AdapterError(folder, f"tensor {shown(name)} has dtype {tensor.dtype}; give floats")
    folder.mkdir(parents=True, exist_ok=True)
    copies = {
        name: tensor.detach().cpu().clone(memory_format=torch.contiguous_format) for name, tensor in tensors.items()
    }
    with tempfile.TemporaryDirectory(dir=folder) as beside:
        (Path(beside) / WEIGHTS).write_bytes(save(copies, metadata={"format": "pt"}))
        (Path(beside) / CONFIG).write_text(json.dumps(entries, indent=2) + "\n", encoding="utf-8")
        for file in (WEIGHTS, CONFIG):
            os.replace(Path(beside) / file, folder / file)


def _as_json(value: Any) -> Any:
    """PEFT's to_dict() has sets and enums."""
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, set | frozenset):
        return sorted(value)
    raise AdapterError(CONFIG, f"an entry holds a {type(value).__name__}, which JSON has not; give plain values")


def _state(file: Path) -> tuple[int, ...]:
    state = file.stat()
    return state.st_size, state.st_mtime_ns, state.st_ctime_ns, state.st_ino, state.st_dev


@functools.lru_cache(maxsize=1024)
def _digest_of(folder: Path, *states: tuple[int, ...]) -> bytes:
    """`states` are the files': with another one, the digest is computed again."""
    config = read_peft_config(folder)
    return _digest(config, read_tensors(weights_file(folder), sys.maxsize, sys.maxsize, keep=False))


def _digest(config: PeftLoraConfig, tensors: Iterable[HashedTensor]) -> bytes:
    """The order of tensors in the file does not count."""
    digest = hashlib.blake2b(config.canonical(), digest_size=16)
    rows = [[each.entry.name, each.entry.dtype, each.entry.shape, each.digest.hex()] for each in tensors]
    digest.update(json.dumps(sorted(rows)).encode())
    return digest.digest()


@dataclass
class _Parts:
    """Tensors of an adapter by module and role, as they are read."""

    config: PeftLoraConfig
    file: Path
    saved: dict[str, Tensor] = field(default_factory=dict)
    base_copies: set[str] = field(default_factory=set)
    _by_module: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    _raw: dict[names.TensorRole, str] = field(default_factory=dict)  # names in the file

    def add(self, hashed: HashedTensor) -> None:
        raw, tensor = hashed.entry.name, hashed.tensor
        assert tensor is not None
        role = names.role_of(raw, self.file)
        if role.role == names.UNUSED:
            return
        if tensor.numel() == 0:
            raise self._wrong(
                raw, f"is empty ({list(tensor.shape)}): shards were not gathered (DeepSpeed ZeRO-3, FSDP); "
                "gather them and save the adapter again",
            )  # fmt: skip
        if not tensor.sum().isfinite() and not tensor.isfinite().all():  # a sum takes a tenth of the time
            raise self._wrong(raw, "holds NaN or infinite numbers; train or save the adapter again")
        if role.role == names.BASE_COPY:
            self.base_copies.add(role.name)
            role = names.TensorRole(role.name, names.SAVED)
        if (other := self._raw.setdefault(role, raw)) != raw:
            raise self._wrong(raw, f"and tensor {shown(other)} have one role; save each adapter in a folder of its own")
        if role.role == names.SAVED:
            self.saved[role.name] = tensor
        else:
            self._by_module.setdefault(role.name, {})[role.role] = tensor

    def modules(self) -> dict[str, LoRAWeights]:
        """Weights of the modules, checked against one another and the configuration."""
        if not self._by_module:
            raise AdapterError(self.file, "holds no tensor of LoRA (MODULE.lora_A.weight); was the adapter trained?")
        found, wrappers = {}, Counter(_module_of(path) for path in self._by_module)
        for path, parts in sorted(self._by_module.items()):
            parameter = self._parameter_of(path, wrappers)
            weights = self._module(path, parts, parameter or path)
            is_stack = parameter is not None and weights.is_stack
            found[parameter if parameter is not None and is_stack else path] = weights
        return found

    def _parameter_of(self, path: str, wrappers: Mapping[str, int]) -> str | None:
        """Returns the parameter that a module's LoRA is of; None: its weight. PEFT wraps a module once for each of its
        parameters, and the LoRA of the first stands the furthest inside."""
        module, depth = _module_of(path), path.count(names.BASE_LAYER)
        parameters = self.config.parameters_of(module)
        if wrappers[module] != max(1, len(parameters)) or depth >= wrappers[module]:
            raise AdapterError(
                self.file, f"module {shown(path)} has LoRA of one of {wrappers[module]} parameters, and {CONFIG} "
                f"names {len(parameters)} (target_parameters); save the adapter again",
            )  # fmt: skip
        return f"{module}.{parameters[-1 - depth]}" if parameters else None

    def _module(self, path: str, parts: Mapping[str, Tensor], pattern: str) -> LoRAWeights:
        """`pattern`: the name that the configuration's patterns are of."""
        embedding = names.EMBEDDING_A in parts or names.EMBEDDING_B in parts
        if embedding and (names.A in parts or names.B in parts):
            raise AdapterError(self.file, f"module {shown(path)} has LoRA of a linear layer and of an embedding")
        first, second = (names.EMBEDDING_A, names.EMBEDDING_B) if embedding else (names.A, names.B)
        for role in (first, second):
            if role not in parts:
                has = ", ".join(sorted(parts))
                raise AdapterError(
                    self.file, f"module {shown(path)} has {has} and no {role}; save the adapter again with both"
                )
        lora_a, lora_b = self._matrices(path, parts, (first, second), pattern)
        self._check_options(path, parts)
        magnitude = parts.get(names.MAGNITUDE)
        return LoRAWeights(
            lora_a,
            lora_b,
            self.config.scaling_of(pattern, lora_a.shape[-2]),
            None if magnitude is None else magnitude.float(),
            parts.get(names.BIAS),
            embedding,
        )

    def _matrices(
        self, path: str, parts: Mapping[str, Tensor], roles: tuple[str, str], pattern: str
    ) -> tuple[Tensor, Tensor]:
        """Checks A and B, and returns them as LoRAWeights has them."""
        (first, second), (lora_a, lora_b) = roles, (parts[role] for role in roles)
        for role, tensor in ((first, lora_a), (second, lora_b)):
            if tensor.dim() != 2:
                raise self._wrong(
                    self._raw_name(path, role), f"has the shape {list(tensor.shape)}, not two dimensions; LoRA of "
                    "convolutions is not supported; merge the adapter with PEFT",
                )  # fmt: skip
        rank, expected = lora_a.shape[0], self.config.rank_of(pattern)
        if lora_b.shape[1] != rank:
            raise self._wrong(
                self._raw_name(path, second), f"has the shape {list(lora_b.shape)}, which does not fit {first} of "
                f"{list(lora_a.shape)}: the ranks differ; save the adapter again",
            )  # fmt: skip
        is_stack = pattern != path and rank != expected and rank % expected == 0
        if rank != expected and not is_stack:
            raise self._wrong(
                self._raw_name(path, first), f"has rank {rank}, and {CONFIG} gives the module rank {expected} (r, "
                "rank_pattern), so that its scaling is unknown; correct r or rank_pattern",
            )  # fmt: skip
        for role in (names.BIAS, names.MAGNITUDE):
            if role in parts and (is_stack or parts[role].shape != lora_b.shape[:1]):
                raise self._wrong(
                    self._raw_name(path, role), f"has the shape {list(parts[role].shape)}, and the module has "
                    f"{lora_b.shape[0]} outputs; save the adapter again",
                )  # fmt: skip
        if not is_stack:
            return lora_a, lora_b
        # rows of A go through an expert's rank and then through experts, columns of B the other way around
        count = rank // expected
        return lora_a.view(count, expected, -1), lora_b.view(len(lora_b), expected, count).permute(2, 0, 1)

    def _check_options(self, path: str, parts: Mapping[str, Tensor]) -> None:
        """Tensors and configuration agree: PEFT would ignore the one, or leave the other as it was initialized."""
        options = {
            names.MAGNITUDE: ("use_dora", self.config.use_dora),
            names.BIAS: ("lora_bias", self.config.lora_bias),
        }
        for role, (entry, wanted) in options.items():
            if role in parts and not wanted:
                raise self._wrong(self._raw_name(path, role), f"is there, and {CONFIG} has no {entry}; set it to true")
            if wanted and role not in parts and not (role == names.BIAS and names.EMBEDDING_A in parts):
                raise AdapterError(
                    self.file, f"module {shown(path)} has no {role}, and {CONFIG} has {entry}; save the adapter again, "
                    f"or set {entry} to false",
                )  # fmt: skip

    def _raw_name(self, path: str, role: str) -> str:
        return self._raw[names.TensorRole(path, role)]

    def _wrong(self, raw: str, what: str) -> AdapterError:
        return AdapterError(self.file, f"tensor {shown(raw)} {what}")


def _module_of(path: str) -> str:
    return path.replace(names.BASE_LAYER, "")
