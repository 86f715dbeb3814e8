"""Scales of runs of a matrix's numbers, row after row; a row need not be a multiple of a run's length."""

import math

import torch
from torch import Tensor

from quintet.interface.weights import ShardRange


def largest_uniform_group(run: int, shard: ShardRange) -> int:
    """The most inputs of a cut that surely have one scale, wherever its groups of so many begin.

    A cut that does not say how long the rows are (Cut.row) is taken for one to the end of them.
    """
    return math.gcd(run, shard.row or shard.inputs[1], *shard.inputs)


def run_indices(run: int, group: int, row: int, shard: ShardRange) -> Tensor:
    """Returns the run of each group of the cut's inputs: [N, G]."""
    rows, columns = torch.arange(*shard.outputs), torch.arange(*shard.inputs, group)
    return (rows[:, None] * row + columns) // run


def shard_values(flat: Tensor, first: int, row: int, shard: ShardRange) -> Tensor:
    """Returns the numbers of the cut [N, K]; `flat` begins with number `first` of the whole matrix."""
    (start, stop), offset = shard.outputs, shard.outputs[0] * row - first
    whole = flat[offset : offset + (stop - start) * row].reshape(stop - start, row)
    return whole[:, slice(*shard.inputs)]
