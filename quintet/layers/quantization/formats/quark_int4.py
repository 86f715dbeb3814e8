"""Four bits as Quark packs them into int32: along the outputs with groups of inputs, else along the inputs."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from quintet.interface.weights import FLOATS, CheckpointSlice, Matrix, ShardRange, StoredTensor, WeightFormat
from quintet.layers.quantization.block_scales import full_shape, sibling_name
from quintet.layers.quantization.group_scales import dequantized_shard, regroup, shard_format

PACKED = 8  # numbers in an int32
ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the i-th 4 bits, from the lowest, are of this one of the eight
SIGN = 8


@dataclass(frozen=True)
class QuarkInt4:
    """With groups: "weight" int32 [K, N / 8], "weight_scale" [G, N], "weight_zero_point" int32 [G, N / 8]; without:
    [N, K / 8], [N] and [N / 8]. Signed numbers have no zero points."""

    group: int
    signed: bool
    reordered: bool = True

    def stored(self, part: CheckpointSlice) -> dict[str, StoredTensor]:
        outputs, inputs = full_shape(part)
        group = self.group or inputs
        if outputs % PACKED or inputs % PACKED or inputs % group:
            raise ValueError(f"{part.source} [{outputs}, {inputs}] does not divide into eights, and groups of {group}")
        words = (inputs, outputs // PACKED) if self.group else (outputs, inputs // PACKED)
        lead = (inputs // group,) if self.group else ()
        found = {
            part.source: StoredTensor(words, (torch.int32,)),
            sibling_name(part, "weight_scale"): StoredTensor((*lead, outputs), FLOATS),
        }
        if not self.signed:
            found[sibling_name(part, "weight_zero_point")] = StoredTensor((*lead, outputs // PACKED), (torch.int32,))
        return found

    def format(self, shard: ShardRange) -> WeightFormat:
        return shard_format(WeightFormat("int4", 4, 16, self.group, zeros=not self.signed), shard)

    def matrix(self, part: CheckpointSlice, shard: ShardRange, tensors: Mapping[str, Tensor]) -> Matrix:
        fmt, outputs, inputs = self.format(shard), slice(*shard.outputs), slice(*shard.inputs)
        words = tensors[part.source]
        held = self._apart(words[inputs]).t()[outputs] if self.group else self._apart(words[outputs])[:, inputs]
        held = (held ^ SIGN if self.signed else held).contiguous()
        scales = self._regroup(tensors[sibling_name(part, "weight_scale")].float(), shard, fmt)
        zeros = None
        if not self.signed:
            points = tensors[sibling_name(part, "weight_zero_point")]
            zeros = self._regroup(self._apart(points if self.group else points[None]), shard, fmt)
        return Matrix(held[:, ::2] | held[:, 1::2] << 4, scales, zeros, format=fmt)

    def floats(self, part: CheckpointSlice, shard: ShardRange, tensors: Mapping[str, Tensor]) -> Tensor:
        return dequantized_shard(self, self.group, part, shard, tensors)

    def _regroup(self, x: Tensor, shard: ShardRange, fmt: WeightFormat) -> Tensor:
        """[G, N], or [N] -> [n, G'] of the share."""
        return regroup(x.reshape(-1, x.shape[-1]).t()[slice(*shard.outputs)], self.group, fmt.group, shard.inputs)

    def _apart(self, words: Tensor) -> Tensor:
        """int32 [M, W] -> uint8 [M, 8 W]."""
        held = words.contiguous().view(torch.uint8)
        apart = torch.stack([held & 15, held >> 4], -1).reshape(len(words), -1, PACKED)
        places = torch.tensor(ORDER).argsort() if self.reordered else torch.arange(PACKED)
        return apart[:, :, places].reshape(len(words), -1)
