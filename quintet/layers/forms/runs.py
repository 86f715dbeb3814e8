"""Scales of runs of a matrix's numbers, row after row, whose length no row need be a multiple of."""

import math

import torch
from torch import Tensor

from quintet.weights import Cut


def divided(run: int, cut: Cut) -> int:
    """The most inputs of a cut that surely have one scale, wherever its groups of so many begin.

    A cut that does not say how long the rows are (Cut.row) is taken for one to the end of them.
    """
    return math.gcd(run, cut.row or cut.inputs[1], *cut.inputs)


def indices(run: int, group: int, row: int, cut: Cut) -> Tensor:
    """Which run each group of the cut's inputs lies in: [N, G]."""
    rows, columns = torch.arange(*cut.outputs), torch.arange(*cut.inputs, group)
    return (rows[:, None] * row + columns) // run


def in_cut(flat: Tensor, first: int, row: int, cut: Cut) -> Tensor:
    """Of numbers in a row, from the whole matrix's number `first` on: those of the cut [N, K]."""
    (start, stop), offset = cut.outputs, cut.outputs[0] * row - first
    whole = flat[offset : offset + (stop - start) * row].reshape(stop - start, row)
    return whole[:, slice(*cut.inputs)]
