"""Our layers in the places of transformers' modules: the same inputs and outputs, whatever their leading axes are."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from quintet.interface.weights import CheckpointSlice, Weight
from quintet.layers.build import BuildContext, Layer
from quintet.layers.embedding import VocabParallelEmbedding
from quintet.layers.layer_state import LayerMixer, StepState
from quintet.layers.linear import ColumnParallelLinear, LMHead, RowParallelLinear
from quintet.layers.moe.moe import Experts
from quintet.layers.norm import RMSNorm


@dataclass
class Running:
    """State of the running step for the modules; each model has its own."""

    cache: StepState | None = None
    turns: dict[int, int] = field(default_factory=dict)  # how often a module has been called in it, by its id
    hidden: Tensor | None = None  # what went into the head

    def begin(self, cache: StepState) -> None:
        self.cache, self.hidden = cache, None
        self.turns.clear()

    def end(self) -> None:
        """No memory of a step is kept."""
        self.cache = self.hidden = None

    @property
    def step(self) -> StepState:
        assert self.cache is not None, "a layer of a model was called outside of its steps"
        return self.cache


class Attended:
    """The attention of one module, which a step may call several times: each call has a cache of its own."""

    def __init__(self, running: Running) -> None:
        self._running, self._calls = running, list[tuple[LayerMixer, int, int]]()

    def add(self, mixing: LayerMixer, head_dim: int, value_dim: int) -> None:
        """Adds attention for the next call: head_dim as the KV cache keeps it, and value_dim of the values."""
        self._calls.append((mixing, head_dim, value_dim))

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> tuple[Tensor, None]:
        """q [1, H, T, D], k and v [1, Hkv, T, D] -> [1, T, H, Dv]."""
        turn = self._running.turns.get(id(self), 0)
        self._running.turns[id(self)] = turn + 1
        mixing, width, value_dim = self._calls[turn]
        q, k, v = (_padded(each[0].transpose(0, 1), width) for each in (q, k, v))
        out = mixing(q, k, v, self._running.step, sinks)
        return out[None, ..., :value_dim], None


def _padded(x: Tensor, width: int) -> Tensor:
    """Zeros in q and k change no score, and those in v are cut off again."""
    return x.contiguous() if x.shape[-1] == width else nn.functional.pad(x, (0, width - x.shape[-1]))


class HFColumnParallelLinear(ColumnParallelLinear):
    """nn.Linear."""

    def forward(self, x: Tensor) -> Tensor:
        return _in_rows(super().forward, x)


class HFRowParallelLinear(RowParallelLinear):
    """nn.Linear that sees a rank's share of the inputs."""

    def forward(self, x: Tensor) -> Tensor:
        return _in_rows(super().forward, x)


def _in_rows(call: Any, x: Tensor) -> Tensor:
    y: Tensor = call(x.reshape(-1, x.shape[-1]))
    return y.reshape(*x.shape[:-1], y.shape[-1])


class HFRMSNorm(RMSNorm):
    """A norm with one weight, of the root of the mean of squares."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        y: Tensor = self.ops.rms_norm(rows, self.weight, self.eps, self.offset)
        return y.reshape(x.shape)


class HFEmbedding(VocabParallelEmbedding):
    """The embedding of tokens: of the step's, some of which may come as embeddings."""

    def __init__(self, build: BuildContext, count: int, width: int, scale: float, running: Running) -> None:
        super().__init__(build, count, width)
        self._running, self._scale = running, scale

    def forward(self, ids: Tensor) -> Tensor:
        if ids.dim() == 1:  # as of() asks
            return super().forward(ids)
        return self.embed(self._running.step.batch, self._scale)[None]


class HFTable(VocabParallelEmbedding):
    """nn.Embedding of anything else by its row, such as a layer's own embeddings of tokens."""

    def __init__(self, build: BuildContext, count: int, width: int, scale: float) -> None:
        super().__init__(build, count, width)
        self._scale = scale

    def forward(self, ids: Tensor) -> Tensor:
        rows = super().forward(ids.reshape(-1).int())
        rows = rows if self._scale == 1.0 else self.ops.scale(rows, self._scale)
        return rows.reshape(*ids.shape, self.width)


class HFLMHead(Layer):
    """Logits of the rows that are wanted: [1, T, H] -> [1, L, V]."""

    def __init__(self, build: BuildContext, shape: tuple[int, int], source: str, bias: bool, running: Running) -> None:
        super().__init__(build, "take_rows")
        self.product = LMHead(build, *shape, source, bias)
        self._running = running

    def forward(self, x: Tensor) -> Tensor:
        running = self._running
        if running.step.lora is not None:
            running.step.lora.select_output_rows(self.ops.take_rows)
        running.hidden = self.ops.take_rows(x.reshape(-1, x.shape[-1]), running.step.batch.logits_indices)
        logits: Tensor = self.product(running.hidden)
        return logits[None]


class HFExperts(Experts):
    """The experts of a mixture, by the indices and weights of a router of transformers."""

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:  # type: ignore[override]
        """x [..., H], ids and weights [T, k] -> [..., H]."""
        rows = x.reshape(-1, x.shape[-1])
        share = super().forward(rows, weights.float().contiguous(), ids.int().contiguous())
        return self._build.comm.all_reduce(share).reshape(x.shape)


@dataclass(frozen=True)
class Loose:
    """A tensor of a module that is none of our layers."""

    owners: tuple[tuple[nn.Module, str], ...]  # the modules that have it, and under which name
    tensor: Tensor  # as it is without a checkpoint
    stored: bool  # in checkpoints; else it is computed
    dtype: torch.dtype

    def set(self, tensor: Tensor) -> None:
        for module, name in self.owners:
            if name in module._buffers:
                module._buffers[name] = tensor
            else:
                module._parameters[name] = nn.Parameter(tensor, requires_grad=False)


class Rest(Layer):
    """Tensors that transformers' modules keep themselves, whole on every rank."""

    def __init__(self, build: BuildContext, loose: Mapping[str, Loose]) -> None:
        super().__init__(build)
        self._build, self._loose = build, dict(loose)

    def weights(self, path: str) -> list[Weight]:
        found, build = [], self._build
        plan = build.quantization.for_embedding()  # only what was quantized before: these are computed in floats
        for name, each in self._loose.items():
            if each.stored:
                shape = tuple(each.tensor.shape) or (1,)  # a number is a vector here, as names.py has it
                part = CheckpointSlice(name, shape, ((0, shape[0]),) * build.size)
                module, _, last = name.rpartition(".")
                reader = plan.reader(module) if last == "weight" and len(shape) == 2 else None
                found.append(Weight(name, (part,), 0, build.rank, each.dtype, "vector", reader=reader))
        return found

    def constants(self) -> Mapping[str, Tensor]:
        return {name: each.tensor.reshape(-1) for name, each in self._loose.items() if not each.stored}

    def assign(self, tensors: Mapping[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            self._loose[name].set(tensor.reshape(self._loose[name].tensor.shape))

    @property
    def assigned_tensors(self) -> dict[str, Tensor]:
        found = {}
        for name, each in self._loose.items():
            module, attribute = each.owners[0]
            found[name] = module._buffers.get(attribute, module._parameters.get(attribute))
        return {name: tensor for name, tensor in found.items() if tensor is not None}
