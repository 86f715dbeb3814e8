"""Weights on a mesh: straight from the checkpoint's memory map to each device's shard."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
import torch
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from quintet.interface.weights import Weight, WeightFormat
from quintet.ops.quantize import attributes, canonicals
from quintet.platforms.tpu.device import AXIS
from quintet.platforms.tpu.torchax_bridge import dtype_of, host_array, torch_dtype

Index = tuple[slice, ...]


class Placement(NamedTuple):
    """Placement of a weight on the mesh.

    A weight that is cut and made of several products (q, k and v; gate and up) has shape [ranks, N / ranks, K]: rank r
    keeps its share of the first product, then of the second, ... A cut through rows that stand one product after the
    other would part what belongs together, and every step would pay for bringing it together. A stack that is cut has
    shape [E, ranks, ...], each rank's share of every matrix: the ranks' results are added up once, after all experts.
    """

    shape: jax.ShapeDtypeStruct
    packed: bool


class Piece(NamedTuple):
    """A tensor of a weight: its last axis' size, and its type."""

    width: int
    dtype: Any


def placements(weight: Weight, mesh: Mesh) -> dict[str, Placement]:
    """Returns the placement of each tensor that the weight becomes, by its attribute's name."""
    if weight.format.plain:
        return {weight.name: _placement(weight, mesh, weight.shape, dtype_of(weight.dtype))}
    return {
        name: _placement(weight, mesh, (weight.shape[0], piece.width), piece.dtype)
        for name, piece in _pieces(weight.format, weight.shape[1]).items()
    }


def _pieces(fmt: WeightFormat, inputs: int) -> dict[str, Piece]:
    """Returns the tensors of a canonical matrix of so many inputs, with their width for each output."""
    assert not fmt.act_order, "products here take inputs as they come"
    values = torch.int8 if fmt.bits == 8 and not fmt.codebook else torch.uint8
    pieces = {"weight": Piece(inputs * fmt.bits // 8, dtype_of(fmt.dtype or values))}
    pieces["scales"] = Piece(fmt.groups(inputs), dtype_of(torch.float32))
    if fmt.mins:
        pieces["mins"] = pieces["scales"]
    return pieces | ({"zeros": Piece(fmt.groups(inputs), dtype_of(torch.uint8))} if fmt.zeros else {})


def _placement(weight: Weight, mesh: Mesh, shape: tuple[int, ...], dtype: Any) -> Placement:
    """Cut along the weight's axis, or whole on each device: single vectors, and what the mesh does not divide."""
    if weight.stack and weight.use != "experts":  # heads are dealt out, each being a matrix; others are kept whole
        dealt = weight.use.endswith("heads") and shape[0] % mesh.size == 0
        spec = PartitionSpec(AXIS if dealt else None, *[None] * (len(shape) - 1))
        return Placement(jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec)), False)
    sizes = [stop - start for start, stop in (part.ranges[weight.rank] for part in weight.slices)]
    divides = mesh.size > 1 and all(size % mesh.size == 0 for size in sizes)
    stacked = bool(weight.stack)
    packed = divides and (stacked or (weight.axis == 0 and len(sizes) > 1 and weight.use != "channels"))
    cut = divides and weight.use not in ("channels", "vector") and shape[weight.axis] % mesh.size == 0
    if packed and stacked:
        share = [size // mesh.size if axis == weight.axis else size for axis, size in enumerate(shape[1:])]
        shape, spec = (shape[0], mesh.size, *share), PartitionSpec(None, AXIS)
    elif packed:
        shape, spec = (mesh.size, shape[0] // mesh.size, *shape[1:]), PartitionSpec(AXIS)
    else:
        spec = PartitionSpec(*(AXIS if cut and axis == weight.axis else None for axis in range(len(shape))))
    sharding = NamedSharding(mesh, spec)
    return Placement(jax.ShapeDtypeStruct(shape, dtype, sharding=sharding), packed)


class Placer:
    """Places the weights of one model."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        # a tied head asks for the same tensor a second time: it gets the same array
        self._placed: WeakTensorKeyDictionary = WeakTensorKeyDictionary()

    def __call__(self, weight: Weight, tensors: Mapping[str, Tensor]) -> dict[str, jax.Array]:
        """As placements() says. Each device's shard is the only copy that is made for it."""
        places = placements(weight, self._mesh)
        if not weight.format.plain:
            pieces = [attributes(each) for each in canonicals(weight, tensors)]
            return {name: self._joined(place, [each[name] for each in pieces], 0) for name, place in places.items()}
        (place,) = places.values()
        if weight.stack:
            return {weight.name: self._stack(place, weight, tensors)}
        if len(weight.slices) > 1 or weight.reader is not None:
            return {weight.name: self._joined(place, weight.local_slices(tensors), weight.axis)}
        known: dict[Any, jax.Array] = self._placed.setdefault(tensors[weight.slices[0].source], {})
        key = weight.slices[0], weight.dtype, place.shape.sharding
        if key not in known:
            known[key] = self._joined(place, weight.local_slices(tensors), weight.axis)
        return {weight.name: known[key]}

    def _joined(self, place: Placement, pieces: list[Tensor], axis: int) -> jax.Array:
        if place.packed:
            return self._put(place, lambda index: _shares(pieces, self._mesh.size, index))
        whole = pieces[0] if len(pieces) == 1 else torch.cat(pieces, axis)
        return self._put(place, lambda index: whole[index])

    def _stack(self, place: Placement, weight: Weight, tensors: Mapping[str, Tensor]) -> jax.Array:
        if place.packed:
            pieces = weight.local_slices(tensors)
            return self._put(place, lambda index: _stacked(weight, pieces, self._mesh.size, index))
        whole = weight.local(tensors)
        return self._put(place, lambda index: whole[index])

    def _put(self, place: Placement, shard: Callable[[Any], Tensor]) -> jax.Array:
        shape = place.shape
        return jax.make_array_from_callback(
            shape.shape, shape.sharding, lambda index: _array(shard(index), shape.dtype), dtype=shape.dtype
        )


def _shares(pieces: list[Tensor], ranks: int, index: Index) -> Tensor:
    """One rank's share of each product."""
    rank = index[0].start or 0
    return torch.cat([piece.chunk(ranks)[rank] for piece in pieces])[None]


def _stacked(weight: Weight, pieces: list[Tensor], ranks: int, index: Index) -> Tensor:
    """One rank's share of each matrix of a stack."""
    rank, count = index[1].start or 0, len(pieces) // weight.stack
    shares = [piece.chunk(ranks, weight.axis)[rank] for piece in pieces]
    matrices = [torch.cat(shares[first : first + count], weight.axis) for first in range(0, len(shares), count)]
    return torch.stack(matrices)[:, None]


def _array(tensor: Tensor, dtype: Any) -> "np.ndarray[Any, Any]":
    """A view of the tensor's memory where nothing has to be converted or brought into order."""
    array: np.ndarray[Any, Any] = host_array(tensor.to(torch_dtype(dtype)).contiguous())
    return array
