"""Arguments for the ops around layers of several streams (quintet/ops/streams.py), and for ops that scale rows."""

from collections.abc import Iterator

import torch

from quintet.conformance.cases.random_arguments import Case, Cases, randn
from quintet.ops.streams import StreamGateSizes

SIZES = ((1, 4, 48), (9, 3, 65), (33, 2, 128), (5, 8, 7))  # tokens, streams, numbers


def predict_streams(dtype: torch.dtype) -> Iterator[Case]:
    for tokens, count, width in SIZES:
        streams = tuple(randn(tokens, width, dtype=dtype) for _ in range(count))
        yield f"{tokens} tokens, {count} of {width}", (streams, randn(tokens, count * count, dtype=dtype))


def correct_streams(dtype: torch.dtype) -> Iterator[Case]:
    for tokens, count, width in SIZES:
        streams = tuple(randn(tokens, width, dtype=dtype) for _ in range(count))
        made, coefs = randn(tokens, width, dtype=dtype), randn(tokens, count, dtype=dtype)
        yield f"{tokens} tokens, {count} of {width}", (streams, made, coefs, randn(width, dtype=dtype), count - 1)


def as_large(dtype: torch.dtype) -> Iterator[Case]:
    for tokens, _, width in SIZES:
        for scale in (1.0, 1e-4):
            x, like = randn(tokens, width, dtype=dtype, scale=scale), randn(tokens, width, dtype=dtype, scale=3.0)
            yield f"{tokens} of {width} times {scale}", (x, like)


def keep_above(dtype: torch.dtype) -> Iterator[Case]:
    for tokens, _, width in SIZES:
        x = randn(tokens, 2 * width, dtype=dtype) + 0.5
        for deviations in (-0.5, 0.0, 1.6449):
            yield f"{tokens} of {width}, above {deviations} deviations", (x, deviations)


def known_ids(dtype: torch.dtype) -> Iterator[Case]:
    yield "7 of 5", (torch.tensor([0, 4, 5, 3, -1, 2**31 - 1, 1], dtype=torch.int32), 5)


GATES = (  # logits have weights of inputs; of outputs, too; of streams, too
    StreamGateSizes(4, 1e-6),
    StreamGateSizes(4, 1e-6, 2.5, 1e-6),
    StreamGateSizes(4, 1e-6, 2.0, 0.0, 20),
    StreamGateSizes(3, 1e-4, 2.0, 0.0, 1),
    StreamGateSizes(1, 1e-6, 2.0, 0.0, 2),
)


def _floats(*shape: int) -> torch.Tensor:
    return randn(*shape, dtype=torch.float32, scale=2.0)


def _gates(tokens: int, sizes: StreamGateSizes) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, StreamGateSizes]:
    kinds = 1 + (sizes.magnitude > 0) + (sizes.iterations > 0)
    count = sizes.streams
    width = sum((count, count, count * count)[:kinds])
    return _floats(tokens, width), _floats(kinds), _floats(width), sizes


def stream_gates(dtype: torch.dtype) -> Iterator[Case]:
    for tokens in (1, 9, 33):
        for sizes in GATES:
            yield f"{tokens} tokens, {sizes}", _gates(tokens, sizes)


def collapse_streams(dtype: torch.dtype) -> Iterator[Case]:
    for tokens, count, width in SIZES:
        for rows in {1, tokens}:
            gates = _floats(rows, 2 * count)
            yield f"{tokens} tokens, {count} of {width}", (randn(tokens, count * width, dtype=dtype), gates, count)


def expand_streams(dtype: torch.dtype) -> Iterator[Case]:
    for tokens, count, width in SIZES:
        x, made = randn(tokens, count * width, dtype=dtype), randn(tokens, width, dtype=dtype)
        for kinds in (2, 2 + count):
            yield f"{tokens} tokens, {count} of {width}, by {kinds}", (x, made, _floats(tokens, kinds * count))


def repeat_streams(dtype: torch.dtype) -> Iterator[Case]:
    for tokens, count, width in SIZES:
        yield f"{tokens} tokens, {count} of {width}", (randn(tokens, width, dtype=dtype), count)


def scale_rows(dtype: torch.dtype) -> Iterator[Case]:
    for tokens, _, width in SIZES:
        wide, factors = randn(tokens, width + 3, dtype=dtype), randn(tokens, 1, dtype=torch.float32)
        yield f"{tokens} of {width}", (wide[:, :width], factors)


STREAMS: dict[str, Cases] = {
    "as_large": as_large,
    "collapse_streams": collapse_streams,
    "correct_streams": correct_streams,
    "expand_streams": expand_streams,
    "keep_above": keep_above,
    "known_ids": known_ids,
    "predict_streams": predict_streams,
    "repeat_streams": repeat_streams,
    "scale_rows": scale_rows,
    "stream_gates": stream_gates,
}
