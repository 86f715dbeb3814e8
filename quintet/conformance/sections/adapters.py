"""Adapters (LoRA) in tensors that are there: place(into=) writes the rows that are named, and leaves all others."""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from quintet.conformance.check import NotSupported, Trial, check, require
from quintet.conformance.close import dtype_name
from quintet.conformance.harness.subject import Subject
from quintet.interface.weights import CheckpointSlice, Weight

SHAPES = ((5, 3, 4, 7), (5, 16, 48), (5, 9))  # of lora_a, lora_b and ranks
WRITTEN = ((1, 1), (0, 1), (4, 1), (2, 2))  # first row and how many, one after the other


@check("adapters.rows")
def rows_of_tensors(subject: Subject) -> Iterator[Trial]:
    for dtype in (*subject.facts.dtypes, torch.int32):
        yield Trial(f"rows of tensors of {dtype_name(dtype)}", partial(_rows, subject, dtype), ("lora",))


def require_lora(subject: Subject) -> None:
    """Lacking where a platform serves no adapters."""
    if not subject.facts.lora:
        raise NotSupported("no adapter can be written beside others: Capabilities.lora is False")


def _rows(subject: Subject, dtype: torch.dtype) -> None:
    require_lora(subject)
    for shape in SHAPES:
        want = _numbers(shape, dtype, 0)
        there = subject.place(want.clone(), "vector")
        tensor = there["x"]
        for turn, (first, count) in enumerate(WRITTEN, 1):
            new = _numbers((count, *shape[1:]), dtype, turn)
            part = CheckpointSlice("x", tuple(new.shape), ((0, count),))
            weight = Weight("x", (part,), 0, 0, dtype, "vector", rows=(first, count))
            placed = subject.platform.place(weight, {"x": new.clone()}, there)
            want[first : first + count] = new
            require(placed["x"] is tensor, f"rows of {shape}: place(into=) returned another tensor than it was given")
            got = subject.down(tensor)
            wrong = sorted({int(row) for row in (got != want).reshape(len(want), -1).any(1).nonzero()})
            require(not wrong, f"rows {first} to {first + count - 1} of {shape} were written; rows {wrong} are wrong")


def _numbers(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    """Whole numbers, which every type holds."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-99, 100, shape, generator=generator).to(dtype)
