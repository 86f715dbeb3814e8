"""Gated delta nets (Yang, Kautz and Hatamizadeh 2025), and the gated attention beside them in Qwen3-Next."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quintet.interface.types import StateSpec
from quintet.interface.weights import Weight
from quintet.layers.attention.attention import AttentionSizes, SelfAttention
from quintet.layers.build import BuildContext, Layer, Shards, split_heads, vector_weight
from quintet.layers.layer_state import StepState
from quintet.layers.linear import SectionedLinear, TensorSection, row_parallel
from quintet.layers.rope import Rotary
from quintet.layers.ssm.mamba import GatedNorm
from quintet.layers.ssm.short_conv import ShortConv
from quintet.ops.states import DeltaRuleInputs, ScanWeights

HEAD_PARAMETERS = ("A_log", "dt_bias")  # of each head


@dataclass(frozen=True)
class DeltaNetSizes:
    """The whole layer's sizes, before it is shared out over ranks."""

    hidden: int
    key_heads: int
    heads: int  # of values
    key_dim: int  # of a head of queries or keys
    value_dim: int
    conv_kernel: int  # of the convolution
    eps: float
    beta_scale: float = 1.0  # 2.0: a state's eigenvalues may be negative


@dataclass(frozen=True)
class SeparateTensors:
    """Names in a checkpoint that keeps all heads of a kind together."""

    qkv: tuple[str, ...]  # one tensor of all, or three
    gate: str
    beta: str
    decay: str


QWEN3_5 = SeparateTensors(("in_proj_qkv",), "in_proj_z", "in_proj_b", "in_proj_a")
OLMO = SeparateTensors(("q_proj", "k_proj", "v_proj"), "g_proj", "b_proj", "a_proj")


class DeltaNet(Layer):
    """x [T, hidden] -> [T, hidden]. Ranks share the heads of values, and those of keys as attention shares KV heads.

    `tensors`: the checkpoint's; None: all of a key head's stand together.
    """

    def __init__(self, build: BuildContext, shape: DeltaNetSizes, tensors: SeparateTensors | None) -> None:
        super().__init__(build)
        if shape.key_heads % build.size:
            raise ValueError(
                f"{build.size} ranks cannot share {shape.key_heads} heads of keys; choose a tensor_parallel_size that "
                "divides them"
            )
        self._build, self._shape = build, shape
        heads, keys = split_heads(shape.heads, shape.key_heads, build.size)
        self._heads, self._keys = heads, keys
        kept, inner = keys.times(shape.key_dim), heads.times(shape.value_dim)
        laid = (
            _separate_sections(tensors, [kept, kept, inner], heads)
            if tensors
            else _interleaved_sections(shape, build.size)
        )
        self.in_proj = SectionedLinear(build, shape.hidden, laid[0])
        self.rates = SectionedLinear(build, shape.hidden, laid[1])
        self.conv1d = ShortConv(build, [kept, kept, inner], shape.conv_kernel, silu=True)
        self.norm = GatedNorm(
            build, Shards(shape.value_dim, ((0, shape.value_dim),) * build.size), shape.eps, NORM_BEFORE_GATE
        )
        self.out_proj = row_parallel(build, inner, ("out_proj", shape.hidden))
        size = (heads.local(build.rank), shape.value_dim, shape.key_dim)
        self.mixing = build.make_mixer(StateSpec("delta_rule", size))
        self.A_log: Tensor  # [H] float32, as the next
        self.dt_bias: Tensor

    def weights(self, path: str) -> list[Weight]:
        return [vector_weight(self._build, f"{path}.{name}", self._heads, torch.float32) for name in HEAD_PARAMETERS]

    def forward(self, x: Tensor, cache: StepState) -> Tensor:
        shape, tokens, rank = self._shape, x.shape[0], self._build.rank
        heads, keys = self._heads.local(rank), self._keys.local(rank)
        kept, inner = keys * shape.key_dim, heads * shape.value_dim
        mixed, gate = self.in_proj(x).split([2 * kept + inner, inner], dim=-1)
        learn, forget = self.rates(x).split([heads, heads], dim=-1)
        q, k, v = self.conv1d(mixed, cache).split([kept, kept, inner], dim=-1)
        q, k, v = q.reshape(tokens, keys, -1), k.reshape(tokens, keys, -1), v.reshape(tokens, heads, -1)
        out = self.mixing.run_state_op(
            cache,
            DeltaRuleInputs(q, k, v, forget, learn),
            ScanWeights(self.A_log, self.dt_bias),
            settings=(shape.beta_scale,),
        )
        made: Tensor = self.out_proj(self.norm(out.reshape(tokens, inner), gate, shape.value_dim))
        return made


NORM_BEFORE_GATE = "before the gate"


def _separate_sections(
    names: SeparateTensors, qkv: Sequence[Shards], heads: Shards
) -> tuple[list[TensorSection], list[TensorSection]]:
    if len(names.qkv) == 1:
        total, first = sum(split.total for split in qkv), 0
        sections = []
        for split in qkv:
            sections.append(TensorSection(names.qkv[0], first, split, total))
            first += split.total
    else:
        sections = [TensorSection(name, 0, split, split.total) for name, split in zip(names.qkv, qkv, strict=True)]
    rates = [TensorSection(name, 0, heads, heads.total) for name in (names.beta, names.decay)]
    return [*sections, TensorSection(names.gate, 0, qkv[-1], qkv[-1].total)], rates


def _interleaved_sections(shape: DeltaNetSizes, size: int) -> tuple[list[TensorSection], list[TensorSection]]:
    """A key head's q, k, values and gates stand side by side, and so do both rates of its heads."""
    each = shape.heads // shape.key_heads
    wide = [shape.key_dim, shape.key_dim, each * shape.value_dim, each * shape.value_dim]
    return (
        sections_by_head("in_proj_qkvz", shape.key_heads, wide, size),
        sections_by_head("in_proj_ba", shape.key_heads, [each, each], size),
    )


def sections_by_head(source: str, heads: int, widths: Sequence[int], size: int) -> list[TensorSection]:
    """Sections of a tensor in which each head has all of its pieces side by side: the first pieces of all heads, then
    the second ones. Each head is one rank's."""
    row, sections, first = sum(widths), [], 0
    for width in widths:
        for head in range(heads):
            owner = head * size // heads
            ranges = tuple((0, width) if rank == owner else (0, 0) for rank in range(size))
            sections.append(TensorSection(source, head * row + first, Shards(width, ranges), heads * row))
        first += width
    return sections


class GatedAttention(SelfAttention):
    """Attention with its output multiplied by the sigmoid of a gate beside each head's query."""

    def __init__(self, build: BuildContext, shape: AttentionSizes, rotary: Rotary | None) -> None:
        super().__init__(build, shape, rotary)
        queries, keys = split_heads(shape.heads, shape.kv_heads, build.size)
        if shape.heads % build.size:
            raise ValueError(
                f"{build.size} ranks cannot share {shape.heads} heads with gates; choose a tensor_parallel_size that "
                "divides them"
            )
        q, *rest = shape.names
        kept = keys.times(shape.head_dim)
        both = sections_by_head(q, shape.heads, [shape.head_dim, shape.head_dim], build.size)
        others = [TensorSection(name, 0, kept, kept.total) for name in rest]
        self.qkv = SectionedLinear(
            build, shape.hidden, [*both[: shape.heads], *others, *both[shape.heads :]], shape.bias
        )
        self._ops = build.ops.take("sigmoid_gate")

    def forward(self, x: Tensor, cache: StepState) -> Tensor:
        tokens, inner = x.shape[0], self._heads * self._head_dim
        self._choose_blocks(x, cache)
        made = self.qkv(x)
        taken, gate = made.split([made.shape[1] - inner, inner], dim=-1)
        sizes = [inner, *[self._kv_heads * self._head_dim] * 2]
        q, k, v = (each.reshape(tokens, -1, self._head_dim) for each in taken.split(sizes, dim=-1))
        out: Tensor = self.out(self._ops.sigmoid_gate(self.mix(q, k, v, cache), gate))
        return out
