"""Arguments for adapters (quintet/ops/lora.py)."""

from collections.abc import Iterator

import torch

from quintet.conformance.cases.random_arguments import Case, Cases, randn

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


LORA: dict[str, Cases] = {"add_lora": add_lora, "scale_adapted": scale_adapted, "adapter_rows": adapter_rows}
