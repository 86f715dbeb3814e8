"""Scales of groups of inputs, where a rank keeps some of the inputs."""

import math
from dataclasses import replace

import torch
from torch import Tensor

from quintet.weights import Cut, Form

LEAST = 16  # inputs that a group is cut down to


def fitted(form: Form, cut: Cut) -> Form:
    """The form of the cut: with smaller groups where it begins or ends within one. ValueError if they get too small."""
    start, stop = cut.inputs
    if not form.group:
        return form
    whole = stop % form.group == 0 or form.dtype is not None  # whole numbers have no short group at the end
    if start % form.group == 0 and whole:
        return form
    group = math.gcd(form.group, start, stop)
    if group < LEAST:
        raise ValueError(
            f"inputs {start} to {stop} of a rank cut groups of {form.group} into pieces of {group}; choose a "
            f"tensor_parallel_size whose shares are multiples of {LEAST}"
        )
    return replace(form, group=group)


def spread(x: Tensor, stored: int, wanted: int, inputs: tuple[int, int]) -> Tensor:
    """[N, G], for groups of so many stored inputs -> for groups of so many wanted ones, within a range of them."""
    if not wanted:
        return x.contiguous()
    return x[:, torch.arange(*inputs, wanted) // stored].contiguous()
