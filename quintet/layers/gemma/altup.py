"""Gemma 3n's streams of hidden states, of which a layer computes one and moves the others by it (AltUp), and its MLP.

AltUp: Baykal et al. 2023. The feed-forward's gate keeps what is largest.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import NormalDist

import torch
from torch import Tensor, nn

from quintet.interface.weights import Weight
from quintet.layers.build import BuildContext, Layer, vector_weight
from quintet.layers.mlp import GatedMLP
from quintet.layers.moe.moe import router
from quintet.layers.norm import RMSNorm

Streams = tuple[Tensor, ...]  # [T, H] each


@dataclass(frozen=True)
class AltUpSizes:
    """The sizes of a layer's streams."""

    hidden: int
    count: int
    active: int  # the one that layers compute
    eps: float
    scaled: bool  # whether a checkpoint has correct_output_scale


class AltUp(Layer):
    """Predicts a layer's streams before the layer computes one of them, and corrects them after."""

    def __init__(self, build: BuildContext, lanes: AltUpSizes) -> None:
        super().__init__(build, "predict_streams", "correct_streams", "scale", "softcap")
        self._build, self._lanes, count = build, lanes, lanes.count
        self.router_norm = RMSNorm(build, lanes.hidden, lanes.eps)
        self.modalities = router(build, lanes.hidden, "modality_router", count)
        self.predicting = router(build, count, "prediction_coefs", count**2)
        self.correcting = router(build, count, "correction_coefs", count)
        self.correct_output_scale: Tensor

    def weights(self, path: str) -> list[Weight]:
        if not self._lanes.scaled:
            return []
        return [vector_weight(self._build, f"{path}.correct_output_scale", self._lanes.hidden)]

    def constants(self) -> Mapping[str, Tensor]:
        ones = torch.ones(self._lanes.hidden, dtype=self._build.dtype)
        return {} if self._lanes.scaled else {"correct_output_scale": ones}

    def predict(self, streams: Streams) -> Streams:
        coefs = self.predicting(self._router_modalities(streams[self._lanes.active]))
        predicted: Streams = self.ops.predict_streams(streams, coefs)
        return predicted

    def correct(self, predicted: Streams, layer_output: Tensor) -> tuple[Streams, Tensor]:
        """-> the streams, and the active one scaled."""
        coefs = self.correcting(self._router_modalities(layer_output))
        *streams, scaled = self.ops.correct_streams(
            predicted, layer_output, coefs, self.correct_output_scale, self._lanes.active
        )
        return tuple(streams), scaled

    def _router_modalities(self, x: Tensor) -> Tensor:
        """[T, H] -> [T, N], of -1 to 1."""
        normed = self.ops.scale(self.router_norm(x), 1 / self._lanes.hidden)
        routed: Tensor = self.ops.softcap(self.modalities(normed), 1.0)  # tanh
        return routed


class SparseMLP(GatedMLP):
    """The gate keeps what it has above its mean and some standard deviations: of numbers that are spread as normal ones
    a share of `sparsity` becomes 0."""

    def __init__(self, build: BuildContext, sizes: tuple[int, int], kind: str, sparsity: float) -> None:
        """sizes: (hidden, features inside)."""
        super().__init__(build, *sizes, kind)
        self.ops.take("keep_above")
        self._comm, self._width = build.comm, sizes[1]
        self._deviations = NormalDist().inv_cdf(sparsity)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.ops.gated(self._sparse_gate(self.gate_up(x)), self.kind))

    def _sparse_gate(self, both: Tensor) -> Tensor:
        if self._comm.size == 1:
            kept: Tensor = self.ops.keep_above(both, self._deviations)
            return kept
        gate, up = both.chunk(2, dim=-1)  # a share of them, and the mean is all ranks'
        wide = gate.float()
        mean = self._comm.all_reduce(wide.sum(-1, keepdim=True)) / self._width
        squares = self._comm.all_reduce((wide - mean).pow(2).sum(-1, keepdim=True)) / self._width
        above = (wide - (mean + squares.sqrt() * self._deviations)).clamp(min=0)
        return torch.cat([above.to(both.dtype), up], -1)


class AltUpProjections(nn.Module):
    """One stream becomes several, each as large as the first; or several one, their mean."""

    def __init__(self, build: BuildContext, products: Iterable[nn.Module]) -> None:
        """`products`: of each stream but the first."""
        super().__init__()
        self._products, self._ops = tuple(products), build.ops.take("as_large", "add", "scale")

    def expand(self, x: Tensor) -> Streams:
        return (x, *(self._ops.as_large(product(x), x) for product in self._products))

    def merge(self, streams: Streams) -> Tensor:
        first, *others = streams
        total = first
        for product, each in zip(self._products, others, strict=True):
            total = self._ops.add(self._ops.as_large(product(each), first), total)  # into the new one: first is needed
        mean: Tensor = self._ops.scale(total, 1 / len(streams))
        return mean
