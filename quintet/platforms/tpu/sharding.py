"""Weights on a mesh: straight from the checkpoint's memory map to each device's shard."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
import torch
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from quintet.platforms.tpu.bridge import dtype_of, host_array
from quintet.platforms.tpu.device import AXIS
from quintet.types import Weight

Index = tuple[slice, ...]


class Placement(NamedTuple):
    """Where a weight goes.

    A weight that is cut and made of several products (q, k and v; gate and up) has shape [ranks, N / ranks, K]: rank r
    keeps its share of the first product, then of the second, ... A cut through rows that stand one product after the
    other would part what belongs together, and every step would pay for bringing it together. A stack that is cut has
    shape [E, ranks, ...], each rank's share of every matrix: the ranks' results are added up once, after all experts.
    """

    shape: jax.ShapeDtypeStruct
    packed: bool


def placement(weight: Weight, mesh: Mesh) -> Placement:
    """Cut along the weight's axis, or whole on each device: single vectors, and what the mesh does not divide."""
    sizes = [stop - start for start, stop in (part.ranges[weight.rank] for part in weight.parts)]
    divides = mesh.size > 1 and all(size % mesh.size == 0 for size in sizes)
    shape = weight.shape
    stacked = bool(weight.stack)
    packed = divides and (stacked or (weight.axis == 0 and len(sizes) > 1))  # the products' biases go with them
    cut = divides and weight.use != "vector"
    if packed and stacked:
        share = [size // mesh.size if axis == weight.axis else size for axis, size in enumerate(shape[1:])]
        shape, spec = (shape[0], mesh.size, *share), PartitionSpec(None, AXIS)
    elif packed:
        shape, spec = (mesh.size, shape[0] // mesh.size, *shape[1:]), PartitionSpec(AXIS)
    else:
        spec = PartitionSpec(*(AXIS if cut and axis == weight.axis else None for axis in range(len(shape))))
    sharding = NamedSharding(mesh, spec)
    return Placement(jax.ShapeDtypeStruct(shape, dtype_of(weight.dtype), sharding=sharding), packed)


class Placer:
    """Places the weights of one model."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        # a tied head asks for the same tensor a second time: it gets the same array
        self._placed: WeakTensorKeyDictionary = WeakTensorKeyDictionary()

    def __call__(self, weight: Weight, tensors: Mapping[str, Tensor]) -> jax.Array:
        """The weight in its dtype, as placement() says. Each device's shard is the only copy that is made for it."""
        place = placement(weight, self._mesh)
        pieces = weight.pieces(tensors)
        if place.packed and weight.stack:
            return self._put(place, lambda index: _stacked(weight, pieces, self._mesh.size, index), weight.dtype)
        if place.packed:
            return self._put(place, lambda index: _packed(pieces, self._mesh.size, index), weight.dtype)
        if weight.stack or len(pieces) > 1:
            whole = weight.local(tensors)
            return self._put(place, lambda index: whole[index], weight.dtype)
        known: dict[Any, jax.Array] = self._placed.setdefault(tensors[weight.parts[0].source], {})
        key = weight.parts[0], weight.dtype, place.shape.sharding
        if key not in known:
            known[key] = self._put(place, lambda index: pieces[0][index], weight.dtype)
        return known[key]

    def _put(self, place: Placement, shard: Any, dtype: torch.dtype) -> jax.Array:
        shape = place.shape
        return jax.make_array_from_callback(
            shape.shape, shape.sharding, lambda index: _array(shard(index), dtype), dtype=shape.dtype
        )


def _packed(pieces: list[Tensor], ranks: int, index: Index) -> Tensor:
    """One rank's share of each product."""
    rank = index[0].start or 0
    return torch.cat([piece.chunk(ranks)[rank] for piece in pieces])[None]


def _stacked(weight: Weight, pieces: list[Tensor], ranks: int, index: Index) -> Tensor:
    """One rank's share of each matrix of a stack."""
    rank, count = index[1].start or 0, len(pieces) // weight.stack
    shares = [piece.chunk(ranks, weight.axis)[rank] for piece in pieces]
    matrices = [torch.cat(shares[first : first + count], weight.axis) for first in range(0, len(shares), count)]
    return torch.stack(matrices)[:, None]


def _array(tensor: Tensor, dtype: torch.dtype) -> "np.ndarray[Any, Any]":
    """A view of the tensor's memory where nothing has to be converted or brought into order."""
    array: np.ndarray[Any, Any] = host_array(tensor.to(dtype).contiguous())
    return array
