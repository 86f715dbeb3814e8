"""Scales of groups of inputs, where a rank keeps some of the inputs."""

import math
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from quintet.interface.weights import PLAIN, CheckpointSlice, ShardRange, WeightFormat, WeightReader
from quintet.ops.quantized import dequantized

MIN_GROUP = 16  # inputs that a group is cut down to


def shard_format(fmt: WeightFormat, shard: ShardRange) -> WeightFormat:
    """The format of the cut: with smaller groups where it begins or ends within one, plain if they get too small."""
    start, stop = shard.inputs
    if not fmt.group:
        return PLAIN if (stop - start) * fmt.bits % 8 else fmt
    whole = stop % fmt.group == 0 or fmt.dtype is not None  # whole numbers have no short group at the end
    if start % fmt.group == 0 and whole:
        return fmt
    group = math.gcd(fmt.group, start, stop)
    return PLAIN if group < MIN_GROUP else replace(fmt, group=group)


def dequantized_shard(
    reader: WeightReader, group: int, part: CheckpointSlice, shard: ShardRange, tensors: Mapping[str, Tensor]
) -> Tensor:
    """Returns the share of a part, dequantized from the whole groups of so many inputs that it lies in."""
    (start, stop), unit = shard.inputs, group or MIN_GROUP
    wide = start - start % unit, min(stop + -stop % unit, part.shape[1])
    known = dequantized(reader.matrix(part, ShardRange(shard.outputs, wide), tensors))
    return known[:, start - wide[0] : stop - wide[0]]


def regroup(x: Tensor, stored: int, wanted: int, inputs: tuple[int, int]) -> Tensor:
    """[N, G], for groups of so many stored inputs -> for groups of so many wanted ones, within a range of them."""
    if not wanted:
        return x.contiguous()
    return x[:, torch.arange(*inputs, wanted) // stored].contiguous()
