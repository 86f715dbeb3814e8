"""Arguments for the ops of ranks that keep whole experts."""

from collections.abc import Iterator

import torch

from quintet.conformance.cases.random_arguments import Case, Cases, randn


def local_experts(dtype: torch.dtype) -> Iterator[Case]:
    for tokens, num, width, k, columns in ((1, 1, 1, 1, 1), (7, 6, 40, 2, 16), (33, 3, 24, 3, 3), (90, 9, 8, 4, 1)):
        seed = torch.Generator().manual_seed(tokens)
        ids = torch.randint(-1, num + 1, (tokens, k), generator=seed, dtype=torch.int32)
        places = torch.randint(-1, num, (num, columns), generator=seed, dtype=torch.int32)
        yield f"{tokens} tokens, {k} of {num}, {columns} columns", (randn(tokens, width, dtype=dtype), ids, places)


def count_experts(dtype: torch.dtype) -> Iterator[Case]:
    # at most 2**24: where tensors are opaque, results come as float32
    for tokens, num, k, most in ((1, 1, 1, 0), (7, 6, 2, 9), (33, 3, 3, 2**24 - 40)):
        seed = torch.Generator().manual_seed(tokens)
        ids = torch.randint(-1, num + 1, (tokens, k), generator=seed, dtype=torch.int32)
        yield f"{tokens} tokens, {k} of {num}, after {most}", (ids, torch.full((num,), most, dtype=torch.int32))


EXPERT_PLACEMENT: dict[str, Cases] = {"count_experts": count_experts, "local_experts": local_experts}
