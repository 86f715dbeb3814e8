"""Factors between K and V as a layer computes them and as its cache holds them, where that has too few steps."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quintet.interface.weights import (
    FLOATS,
    PLAIN,
    CheckpointSlice,
    Matrix,
    ShardRange,
    StoredTensor,
    Weight,
    WeightFormat,
)
from quintet.layers.build import BuildContext, Layer, Shards

SIDES = ("k", "v")
# What checkpoints call the scales of K (and V): beside the projections, of the attention inside, or of a projection.
SCALE_NAME = re.compile(
    r"(?P<path>.*?)(\.attn)?(\.(?P<side>[kv])_proj)?\.(?P<name>k_scale|v_scale|kv_scale|output_scale)"
)
IGNORED_SCALE = re.compile(
    r".*\.(q_scale|prob_scale|k_zero_point|v_zero_point)"
)  # of queries and softmax, which stay floats
MARGIN = 2.0  # what computed scales leave above the largest number that they were computed from


def kv_scale_names(tensors: Iterable[str]) -> dict[str, tuple[str, str]]:
    """An attention's path -> its scales of K and V, by the names of a checkpoint's tensors."""
    found: dict[str, dict[str, str]] = {}
    for name in tensors:
        match = _scale(name)
        if match is None:
            continue
        sides = SIDES if match["name"] == "kv_scale" else (match["side"] or match["name"][0],)
        found.setdefault(match["path"], {}).update(dict.fromkeys(sides, name))
    return {path: (each["k"], each["v"]) for path, each in found.items() if each.keys() >= set(SIDES)}


def _scale(name: str) -> re.Match[str] | None:
    """Matches the name of a KV scale; output_scale counts only under k_proj and v_proj."""
    match = SCALE_NAME.fullmatch(name)
    return None if match is None or (match["name"] == "output_scale" and match["side"] is None) else match


def is_ignored_scale(name: str) -> bool:
    """True if a tensor is an attention scale or zero point that a cache without scales ignores."""
    return IGNORED_SCALE.fullmatch(name) is not None or _scale(name) is not None


class FactorReader:
    """Reads a tensor of floats as factors: floats() makes them of the whole tensor."""

    def stored(self, part: CheckpointSlice) -> dict[str, StoredTensor]:
        return {part.source: StoredTensor(None, FLOATS)}

    def format(self, shard: ShardRange) -> WeightFormat:
        return PLAIN

    def matrix(self, part: CheckpointSlice, shard: ShardRange, tensors: Mapping[str, Tensor]) -> Matrix:
        return Matrix(self.floats(part, shard, tensors))

    def floats(self, part: CheckpointSlice, shard: ShardRange, tensors: Mapping[str, Tensor]) -> Tensor:
        raise NotImplementedError


@dataclass(frozen=True)
class HeadScales(FactorReader):
    """Reads a checkpoint's scale, one for all heads or one for each; `inverse`: what it is divided by."""

    inverse: bool

    def floats(self, part: CheckpointSlice, shard: ShardRange, tensors: Mapping[str, Tensor]) -> Tensor:
        """[heads of the cut, 1] float32."""
        scales, heads = tensors[part.source].float().reshape(-1), part.shape[0]
        if scales.numel() not in (1, heads):
            raise ValueError(f"{part.source} has {scales.numel()} scales for {heads} heads; 1 or {heads} would fit")
        if not bool((scales.isfinite() & (scales > 0)).all()):
            raise ValueError(f"{part.source} is to be above 0 and finite; fetch the model anew")
        whole = scales.expand(heads)[slice(*shard.outputs), None]
        return 1 / whole if self.inverse else whole.clone()


class KVScales(Layer):
    """A cached K is K / k: queries are multiplied by k instead, and what comes out by v.

    Used where a checkpoint has scales and the cache is in fp8, or where scales are computed; otherwise it does nothing.
    """

    def __init__(self, build: BuildContext, heads: Shards) -> None:
        super().__init__(build)
        self._build, self._heads = build, heads
        self._names: tuple[str, str] | None = None  # in the checkpoint
        self.computed = build.kv_scales.computed
        self.peaks: dict[str, Tensor] | None = None  # of each head's K and V, while they are looked at
        self._scales: dict[str, Tensor] = {}  # what was computed: weights that are read again find it
        if self.computed:
            self.ops.take("scale_heads")

    def finalize(self, path: str) -> None:
        self._names = self._build.kv_scales.names.get(path.rpartition(".")[0])
        if self._names is not None:
            self.ops.take("scale_heads")

    @property
    def enabled(self) -> bool:
        return self.computed or self._names is not None

    def weights(self, path: str) -> list[Weight]:
        if self.computed or self._names is None:
            return []
        shape, rank = (self._heads.total, 1), self._build.rank

        def weight(side: str, source: str, inverse: bool) -> Weight:
            name, part = side + "_inverse" * inverse, CheckpointSlice(source, shape, self._heads.ranges)
            return Weight(name, (part,), 0, rank, torch.float32, "vector", reader=HeadScales(inverse))

        named = zip(SIDES, self._names, strict=True)
        return [weight(side, source, inverse) for side, source in named for inverse in (False, True)]

    def constants(self) -> Mapping[str, Tensor]:
        names = [f"{side}{end}" for side in SIDES for end in ("", "_inverse")] if self.computed else []
        ones = torch.ones(self._heads.local(self._build.rank), 1)
        return {name: self._scales.get(name, ones).clone() for name in names}  # written to, one by one

    def scale_inputs(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q, and k and v as the cache holds them; all [T, heads, D]."""
        if self.peaks is not None:
            self._observe(k, v)
        scaled, held = self.ops.scale_heads, self._parameters
        return self.scale_queries(q), scaled(k, held["k_inverse"]), scaled(v, held["v_inverse"])

    def scale_queries(self, q: Tensor) -> Tensor:
        """q [T, heads, D], for keys as the cache holds them."""
        held: Mapping[str, Any] = self._parameters
        scaled: Tensor = self.ops.scale_heads(q, held["k"])
        return scaled

    def scale_output(self, out: Tensor) -> Tensor:
        held: Mapping[str, Any] = self._parameters
        result: Tensor = self.ops.scale_heads(out, held["v"])
        return result

    def _observe(self, k: Tensor, v: Tensor) -> None:
        assert self.peaks is not None
        for side, x in zip(SIDES, (k, v), strict=True):
            peak = x.float().abs().amax((0, 2))
            self.peaks[side] = torch.maximum(self.peaks[side], peak) if side in self.peaks else peak

    def compute_scales(self, largest: float) -> dict[str, Tensor]:
        """Scales that bring what was seen to a half of the largest number of the cache's type; looking ends."""
        assert self.peaks, "nothing was looked at"
        scales = {side: (peak * MARGIN / largest).clamp(min=1e-6)[:, None] for side, peak in self.peaks.items()}
        self.peaks = None
        found = scales | {f"{side}_inverse": 1 / scale for side, scale in scales.items()}
        self._scales = {name: scale.float().cpu() for name, scale in found.items()}
        return found
