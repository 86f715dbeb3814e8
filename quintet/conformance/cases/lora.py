"""Arguments for adapters (quintet/ops/lora.py)."""

from collections.abc import Iterator

import torch
from torch import Tensor

from quintet.conformance.cases.random_arguments import Case, Cases, randn
from quintet.interface.weights import Matrix
from quintet.ops.moe import ExpertGate, ExpertsLoRA

SLOTS = {  # of tokens: 1 + the adapter, or 0
    "one token": (2,),
    "mixed": (3, 0, 1, 2, 0, 1, 1, 3, 2, 2, 0, 1),
    "neighbours": (1, 1, 1, 1, 1, 3, 3, 0, 0),
    "prompts": (1,) * 70 + (0,) * 9 + (3,) * 33,
    "no adapter": (0, 0, 0),
}
COLUMNS = {  # stretches of y: part and width
    "one part": ((0, 77),),
    "three parts": ((0, 64), (1, 16), (2, 9)),
    "parts in strips": ((1, 8), (0, 24), (1, 8), (0, 24)),
}


def add_lora(dtype: torch.dtype) -> Iterator[Case]:
    """Yields three adapters of ranks from 0 on, between the ranks of other products; what lies beyond a rank is NaN."""
    for (tokens, slots), (what, columns) in (
        (slots, columns) for slots in SLOTS.items() for columns in COLUMNS.items()
    ):
        parts, width = 1 + max(part for part, _ in columns), sum(width for _, width in columns)
        for inputs, rank in ((48, 4), (77, 9)):
            y, x = randn(len(slots), width, dtype=dtype), randn(len(slots), inputs, dtype=dtype)
            lora_a = randn(3, parts, rank, inputs, dtype=dtype, scale=inputs**-0.5)
            lora_b = randn(3, rank, width, dtype=dtype, scale=rank**-0.5)
            ranks = torch.tensor([[99, rank, rank - 1, 1, 99], [99, 0, 2, rank, 99], [99, 3, 3, 0, 99]]).int()
            for adapter, used in enumerate(ranks[:, 1 : 1 + parts].tolist()):
                for part, count in enumerate(used):
                    lora_a[adapter, part, count:] = torch.nan
                for column, count in enumerate(used[part] for part, width in columns for _ in range(width)):
                    lora_b[adapter, count:, column] = torch.nan
            given = torch.tensor(slots, dtype=torch.int32)
            yield f"{tokens}, {what}, {inputs} by rank {rank}", (y, x, lora_a, lora_b, ranks, given, 1, columns)


def scale_adapted(dtype: torch.dtype) -> Iterator[Case]:
    """Yields three adapters, of which each token has one or none."""
    for tokens, slots in SLOTS.items():
        for width in (5, 64, 77):
            y = randn(len(slots), width, dtype=dtype)
            gains, offsets = (randn(3, width, dtype=torch.float32) + shift for shift in (1, 0))
            yield f"{tokens}, {width} wide", (y, gains, offsets, torch.tensor(slots, dtype=torch.int32))


def adapter_rows(dtype: torch.dtype) -> Iterator[Case]:
    """Yields ids of tables of nine rows, from several rows on: some are in no table."""
    del dtype  # whole numbers
    for tokens, slots in SLOTS.items():
        ids = torch.arange(len(slots), dtype=torch.int32) % 14
        for first in (0, 4):
            yield f"{tokens}, from row {first}", (ids, torch.tensor(slots, dtype=torch.int32), 3, 9, first)


def lora_experts(experts: Cases, dtype: torch.dtype) -> Iterator[Case]:
    """Yields experts()'s cases, with and without biases, with two adapters of ranks 0 to 3; what lies beyond a rank is
    NaN."""
    rank, slots = 3, torch.tensor([1, 0, 2, 2, 0, 1, 1], dtype=torch.int32)
    for what, (x, gate_up, down, weights, ids, kind) in experts(dtype):
        (num, hidden, inner), of_tokens = down.shape, slots.repeat(len(x))[: len(x)].contiguous()
        for biases in (None, (randn(num, 2 * inner, dtype=dtype), randn(num, hidden, dtype=dtype))):
            columns = ((0, inner), (1, inner)) if biases is None else ((0, 2 * inner),)
            ranks = (torch.arange(2 * num * (len(columns) + 1)) * 7 % (rank + 1)).reshape(2 * num, -1).int()
            sizes = ((len(columns), hidden, columns), (1, inner, ((0, hidden),)))
            first, second = (
                _matrices(ranks[:, at * len(columns) :][:, :parts], rank, inputs, widths, dtype)
                for at, (parts, inputs, widths) in enumerate(sizes)
            )
            gate = ExpertGate(kind) if biases is None else ExpertGate("", biases, (1.702, 0.9))
            lora = ExpertsLoRA(*first, *second, ranks, of_tokens, columns)
            name = what if biases is None else f"{what}, biases"
            yield name, (x, (Matrix(gate_up), Matrix(down)), gate, weights, ids, lora)


def _matrices(
    ranks: Tensor, rank: int, inputs: int, columns: tuple[tuple[int, int], ...], dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """A [N, P, R, K] and B [N, R, outputs] of so many adapters."""
    count, parts = ranks.shape
    lora_a = randn(count, parts, rank, inputs, dtype=dtype, scale=inputs**-0.5)
    lora_b = randn(count, rank, sum(width for _, width in columns), dtype=dtype, scale=rank**-0.5)
    lora_a[torch.arange(rank) >= ranks[..., None]] = torch.nan
    of_columns = torch.cat([ranks[:, part, None].expand(-1, width) for part, width in columns], 1)
    lora_b[torch.arange(rank)[:, None] >= of_columns[:, None]] = torch.nan
    return lora_a, lora_b


LORA: dict[str, Cases] = {"add_lora": add_lora, "scale_adapted": scale_adapted, "adapter_rows": adapter_rows}
