"""Embeddings of n-grams that some layers add to their streams, gated and convolved (Qwen4-Exp 2026)."""

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from quintet.interface.types import StateSpec
from quintet.interface.weights import CheckpointSlice, Weight
from quintet.layers.build import BuildContext, Layer, replicated, vector_weight
from quintet.layers.embedding import VocabParallelEmbedding
from quintet.layers.layer_state import StepState
from quintet.layers.linear import column_parallel
from quintet.layers.norm import RMSNorm
from quintet.ops.states import ConvWeights

MAX_EXACT = 2**24  # whole numbers up to it are exact in float32
MAX_ROWS = 2**31  # of a table: numbers of rows are int32
_BITS = (1 << 64) - 1


@dataclass(frozen=True)
class NGramSizes:
    """Sizes of a layer's table of n-grams, and of what is made of its rows."""

    hidden: int
    streams: int
    eps: float
    width: int  # of all rows of a token, side by side
    kernel: int  # taps of the convolution, each `order` tokens apart
    order: int  # tokens of the longest n-gram
    heads: int  # rows of a token for each length of n-grams
    least: int  # rows of a head: the next primes from this on
    multiple: int  # the rows of all heads are padded to a multiple of it
    parts: int  # tensors of the table in a checkpoint
    vocab: int
    separator: int  # the token that n-grams do not reach across
    seed: int
    place: int  # of the layer among those that have a table

    @classmethod
    def from_config(cls, config: Any, place: int) -> "NGramSizes":
        """Under the names of Qwen4-Exp's configs; ValueError for what is not computed."""
        eos = config.eos_token_id
        sizes = cls(
            hidden=config.hidden_size,
            streams=config.hc_count,
            eps=config.rms_norm_eps,
            width=config.ple_embed_dim,
            kernel=config.ple_conv_kernel_size,
            order=config.ngram_size,
            heads=config.heads_per_ngram,
            least=config.ngram_vocab_size_base,
            multiple=config.make_ngram_vocab_size_divisible_by,
            parts=config.split_ngram_parts,
            vocab=config.vocab_size,
            separator=eos[0] if isinstance(eos, list) and eos else eos,
            seed=config.seed,
            place=place,
        )
        if not isinstance(sizes.separator, int):
            raise ValueError(f"{config.model_type} has eos_token_id {eos}, and n-grams end at that token; name it")
        least = sizes.least * (sizes.order - 1) * sizes.heads
        if least >= MAX_ROWS or sizes.rows >= MAX_ROWS or sizes.vocab >= MAX_EXACT:
            raise ValueError(
                f"{config.model_type} with {least} rows of n-grams, or more, and a vocabulary of {sizes.vocab} is not "
                f"computed; they are below {MAX_ROWS} and {MAX_EXACT}"
            )
        return sizes

    @property
    def head_rows(self) -> list[int]:
        """Rows of each head: primes, which go on from those of the layer before."""
        count = (self.order - 1) * self.heads
        return _primes(self.least, (self.place + 1) * count)[self.place * count :]

    @property
    def rows(self) -> int:
        """Rows of the table."""
        return -(-sum(self.head_rows) // self.multiple) * self.multiple

    @property
    def factors(self) -> list[int]:
        """Odd multipliers of a token and those before it, by which n-grams are hashed: products stay below 2**63."""
        half = max(1, ((1 << 63) - 1) // max(self.vocab, 1) // 2)
        base = self.seed + 10007 * self.place
        return [2 * (_splitmix64(base + 0x9E3779B97F4A7C15 * (at + 1)) % half) + 1 for at in range(self.order)]


class NGramTable(VocabParallelEmbedding):
    """The rows, which a checkpoint holds in several tensors. They are floats."""

    def __init__(self, build: BuildContext, sizes: NGramSizes) -> None:
        super().__init__(build, sizes.rows, sizes.width // len(sizes.head_rows))
        self._parts = sizes.parts

    def finalize(self, path: str) -> None:
        """Tables of n-grams are not quantized."""

    def weights(self, path: str) -> list[Weight]:
        rows, width = self._shape
        slices = []
        for at, (start, stop) in enumerate(part_rows(rows, self._parts)):
            own = tuple((_within(first, start, stop), _within(last, start, stop)) for first, last in self._split.ranges)
            slices.append(CheckpointSlice(f"{path}.shard_{at}.weight", (stop - start, width), own))
        return [Weight("weight", tuple(slices), 0, self._build.rank, self._build.dtype, "embedding")]


class NGramEmbedding(Layer):
    """The rows of each token's n-grams [T, width]: those that end with it, and do not reach across a separator."""

    def __init__(self, build: BuildContext, sizes: NGramSizes) -> None:
        super().__init__(build)
        self._sizes = sizes
        self.ngram_embedding = NGramTable(build, sizes)
        before = sizes.order - 1
        self.mixing = build.make_mixer(StateSpec("short_conv", (before, before), torch.float32))
        self.taps: Tensor
        self.factors: Tensor
        self.heads: Tensor

    def constants(self) -> Mapping[str, Tensor]:
        """taps: of convolutions, each of which returns an earlier token; factors [order]; heads [2, H]: rows and first
        row of each head."""
        sizes, before = self._sizes, self._sizes.order - 1
        taps = torch.zeros(before, sizes.order)
        for back in range(1, sizes.order):
            taps[back - 1, before - back] = 1.0
        rows = torch.tensor(sizes.head_rows)
        heads = torch.stack([rows, rows.cumsum(0) - rows])
        return {"taps": taps, "factors": torch.tensor(sizes.factors), "heads": heads}

    def forward(self, cache: StepState) -> Tensor:
        if self.factors.dtype != torch.int64:
            raise ValueError("n-grams are hashed in 64 bits, which this platform does not compute; use device='cpu'")
        ids, sizes = cache.batch.token_ids, self._sizes
        given = (ids + 1).float()[:, None].expand(-1, sizes.order - 1).contiguous()  # 0 stands for no token
        kept = self.mixing.run_state_op(cache, given, None, ConvWeights(self.taps, None), settings=(False,))
        places = self._places(ids.long(), kept.round().long() - 1)
        rows: Tensor = self.ngram_embedding(places.reshape(-1).to(torch.int32))
        return rows.reshape(len(ids), -1)

    def _places(self, ids: Tensor, before: Tensor) -> Tensor:
        """Returns the rows [T, H] of ids [T], of which before [T, order - 1] are the tokens before, the nearest first,
        and -1 for none."""
        sizes, (rows, first), found = self._sizes, self.heads, []
        inside, mixed = torch.ones_like(ids, dtype=torch.bool), ids * self.factors[0]
        for back in range(1, sizes.order):
            token = before[:, back - 1]
            inside = inside & (token >= 0) & (token != sizes.separator)
            mixed = mixed ^ torch.where(inside, token, sizes.separator) * self.factors[back]
            own = slice((back - 1) * sizes.heads, back * sizes.heads)
            found.append(mixed[:, None] % rows[own] + first[own])
        return torch.cat(found, -1)


class GroupedNorm(Layer):
    """Each stream of x [T, N H] divided by its root mean square, times a weight of its own that is kept around 0."""

    def __init__(self, build: BuildContext, hidden: int, streams: int, eps: float) -> None:
        super().__init__(build)
        self._build, self._shape = build, (streams, hidden)
        self.plain = RMSNorm(replace(build, dtype=torch.float32), hidden, eps, has_weight=False)
        self.weight: Tensor

    def weights(self, path: str) -> list[Weight]:
        return [vector_weight(self._build, f"{path}.weight", math.prod(self._shape), torch.float32, shift=1.0)]

    def forward(self, x: Tensor) -> Tensor:
        normed = self.plain(x.float().reshape(-1, self._shape[1]))
        return (normed.reshape(x.shape) * self.weight).to(x.dtype)


class DilatedConv(Layer):
    """A short convolution whose taps are several tokens apart, with silu behind it; every rank has all channels."""

    def __init__(self, build: BuildContext, channels: int, taps: int, apart: int) -> None:
        super().__init__(build)
        self._build, self._shape, self._apart = build, (channels, 1, taps), apart
        self._reach = (taps - 1) * apart + 1
        self.mixing = build.make_mixer(StateSpec("short_conv", (channels, self._reach - 1), build.dtype))
        self.weight: Tensor  # [C, 1, K]

    def weights(self, path: str) -> list[Weight]:
        part = CheckpointSlice(f"{path}.weight", self._shape, ((0, self._shape[0]),) * self._build.size)
        return [Weight("weight", (part,), 0, self._build.rank, self._build.dtype, "channels")]

    def forward(self, x: Tensor, cache: StepState) -> Tensor:
        spread = self.weight.new_zeros(len(self.weight), self._reach)
        spread[:, :: self._apart] = self.weight[:, 0]
        return self.mixing.run_state_op(cache, x, None, ConvWeights(spread, None), settings=(True,))


class NGramLayer(Layer):
    """Streams x [T, N H] -> what n-grams add to them [T, N H]: a value that each stream gates, and its convolution."""

    def __init__(self, build: BuildContext, sizes: NGramSizes) -> None:
        super().__init__(build, "squash", "add")
        self._sizes, wide = sizes, sizes.streams * sizes.hidden
        self.ple_embedding = NGramEmbedding(build, sizes)
        outputs = {"key_proj": replicated(wide, build.size), "value_proj": replicated(sizes.hidden, build.size)}
        self.both = column_parallel(build, sizes.width, outputs)
        self.norm_key, self.norm_query, self.norm_conv = (
            GroupedNorm(build, sizes.hidden, sizes.streams, sizes.eps) for _ in range(3)
        )
        self.conv1d = DilatedConv(build, wide, sizes.kernel, sizes.order)

    def forward(self, x: Tensor, cache: StepState) -> Tensor:
        sizes, tokens = self._sizes, len(x)
        key, value = self.both(self.ple_embedding(cache)).split([x.shape[1], sizes.hidden], dim=-1)
        alike = (self.norm_key(key) * self.norm_query(x)).reshape(tokens, sizes.streams, sizes.hidden).float()
        gate = alike.sum(-1) / math.sqrt(sizes.hidden)
        gate = gate.abs().clamp(min=1e-6).sqrt() * gate.sign()
        gate = self.ops.squash(gate.contiguous(), "sigmoid").to(x.dtype)
        gated = (gate[:, :, None] * value[:, None]).flatten(1)
        added: Tensor = self.ops.add(self.conv1d(self.norm_conv(gated), cache), gated)
        return added


def part_rows(rows: int, parts: int) -> Sequence[tuple[int, int]]:
    """Returns the first and the end of the rows of each of a table's tensors, as torch.chunk() cuts it."""
    size = -(-rows // parts)
    return [(start, min(start + size, rows)) for start in range(0, rows, size)]


def _within(row: int, start: int, stop: int) -> int:
    return min(max(row, start), stop) - start


@functools.cache
def _primes(least: int, count: int) -> list[int]:
    """Returns the first primes from `least` on; the list is not to be changed."""
    found: list[int] = []
    number = max(least, 2)
    while len(found) < count:
        if number == 2 or number % 2 and all(number % each for each in range(3, math.isqrt(number) + 1, 2)):
            found.append(number)
        number += 1
    return found


def _splitmix64(value: int) -> int:
    """Steele, Lea and Flood 2014."""
    value = (value + 0x9E3779B97F4A7C15) & _BITS
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _BITS
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _BITS
    return value ^ (value >> 31)
