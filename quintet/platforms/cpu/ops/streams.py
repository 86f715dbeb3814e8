"""Streams of hidden states, gates that are cut and scaled rows, by quintet._cpu: each row's result is its own."""

from collections.abc import Sequence

import torch
from torch import Tensor

from quintet.ops.elementwise import scale_rows
from quintet.ops.streams import (
    StreamGateSizes,
    as_large,
    collapse_streams,
    correct_streams,
    expand_streams,
    keep_above,
    known_ids,
    predict_streams,
    repeat_streams,
    stream_gates,
)
from quintet.platforms.cpu.arena import empty
from quintet.platforms.cpu.ops.extension import extension, indices, kind_of, missing

COLLAPSE, EXPAND, REPEAT = range(3)  # numbers of mixed_streams()'s ops
MAX_STREAMS = 8  # streams: kMostStreams of csrc/cpu/elementwise/streams.h


def probe() -> str | None:
    """Two streams of one number, and a row of two."""
    if reason := missing("streams"):
        return reason
    one, two = torch.ones(1, 1), torch.full((1, 1), 2.0)
    predicted = _predict((one, two), torch.tensor([[0.0, 1.0, 3.0, 0.0]]))
    corrected = _correct((one, two), two, torch.tensor([[1.0, 0.0]]), torch.full((1,), 4.0), 0)
    got = [each.item() for each in (*predicted, *corrected, _as_large(one, two))]
    got += _keep_above(torch.tensor([[1.0, 3.0, 5.0, 7.0]]), 0.0).flatten().tolist()
    got += _scale_rows(two, torch.full((1, 1), 3.0)).flatten().tolist()
    got += _known_ids(torch.tensor([1, 2], dtype=torch.int32), 2).tolist()
    want = [3, 5, 3, 3, 12, 2, 0, 1, 5, 7, 6, 1, 0]
    return None if got == want else f"streams of 1 and 2 and a row gave {got}, not {want}"


@predict_streams.provide("native", probe)
def _predict(streams: tuple[Tensor, ...], coefs: Tensor) -> tuple[Tensor, ...]:
    return _streams(streams, coefs)


@correct_streams.provide("native", probe)
def _correct(
    streams: tuple[Tensor, ...], made: Tensor, coefs: Tensor, weight: Tensor, active: int
) -> tuple[Tensor, ...]:
    if weight.shape != made.shape[1:] or weight.dtype != made.dtype or not weight.is_contiguous():
        raise ValueError(f"a weight {tuple(weight.shape)} {weight.dtype} does not fit {tuple(made.shape)} {made.dtype}")
    return _streams(streams, coefs, (made.contiguous(), weight), active)


def _streams(
    streams: Sequence[Tensor], coefs: Tensor, made: tuple[Tensor, Tensor] | None = None, active: int = 0
) -> tuple[Tensor, ...]:
    """`made` with its weight, where streams are corrected."""
    count, (tokens, width), dtype = len(streams), streams[0].shape, streams[0].dtype
    wanted = count**2 if made is None else count
    if count > MAX_STREAMS or coefs.shape != (tokens, wanted) or coefs.dtype != dtype:
        raise ValueError(
            f"coefs {tuple(coefs.shape)} {coefs.dtype} do not fit {count} streams of {dtype}, {MAX_STREAMS} at most"
        )
    given = [each.contiguous() for each in streams]
    if any(each.shape != (tokens, width) or each.dtype != dtype for each in (*given, *(made or ())[:1])):
        raise ValueError("streams are of one shape and type")
    coefs = coefs if coefs.stride(1) == 1 else coefs.contiguous()
    out = [empty((tokens, width), dtype) for _ in (*given, *(made or ())[:1])]
    of_made, weight = (0, 0) if made is None else (each.data_ptr() for each in made)
    extension().streams(
        kind_of(dtype), [each.data_ptr() for each in out], [each.data_ptr() for each in given], coefs.data_ptr(),
        of_made, weight, tokens, width, coefs.stride(0), active,
    )  # fmt: skip
    return tuple(out)


@as_large.provide("native", probe)
def _as_large(x: Tensor, like: Tensor) -> Tensor:
    if x.shape != like.shape or x.dtype != like.dtype:
        raise ValueError(f"x {tuple(x.shape)} {x.dtype} and {tuple(like.shape)} {like.dtype} do not match")
    return _sized(x, like.contiguous(), x.shape[1], 0.0)


@keep_above.provide("native", probe)
def _keep_above(x: Tensor, deviations: float) -> Tensor:
    if x.shape[1] % 2:
        raise ValueError(f"gate beside up are {x.shape[1]} wide, which is odd")
    return _sized(x, None, x.shape[1] // 2, deviations)


def _sized(x: Tensor, like: Tensor | None, width: int, deviations: float) -> Tensor:
    x = x if x.stride(1) == 1 else x.contiguous()
    out = empty(tuple(x.shape), x.dtype)
    extension().sized(
        kind_of(x.dtype), out.data_ptr(), x.data_ptr(), 0 if like is None else like.data_ptr(), len(x), width,
        x.stride(0), deviations,
    )  # fmt: skip
    return out


@scale_rows.provide("native", probe)
def _scale_rows(x: Tensor, factors: Tensor) -> Tensor:
    if factors.shape != (len(x), 1) or factors.dtype != torch.float32:
        raise ValueError(f"factors {tuple(factors.shape)} {factors.dtype} do not fit {len(x)} rows")
    x, factors = x if x.stride(1) == 1 else x.contiguous(), factors.contiguous()
    out = empty(tuple(x.shape), x.dtype)
    extension().scale_rows(
        kind_of(x.dtype), out.data_ptr(), x.data_ptr(), factors.data_ptr(), len(x), x.shape[1], x.stride(0)
    )
    return out


@known_ids.provide("native", probe)
def _known_ids(ids: Tensor, count: int) -> Tensor:
    out = empty(tuple(ids.shape), torch.int32)
    extension().known_ids(out.data_ptr(), indices(ids), len(ids), count)
    return out


def probe_mixed() -> str | None:
    """Two streams of one number."""
    if reason := missing("mixed_streams"):
        return reason
    zeros = torch.zeros(1, 8)
    gates = _gates(zeros, torch.ones(3), zeros[0], StreamGateSizes(2, 0.0, 2.0, 0.0, 2))
    x = torch.tensor([[2.0, 4.0]])
    one, made = _collapse(x, gates, 2), _expand(x, torch.ones(1, 1), gates)
    got = [*gates.flatten().tolist(), *one.flatten().tolist(), *made.flatten().tolist(), *_repeat(one, 2)[0].tolist()]
    want = [0.5, 0.5, 1, 1, 0.5, 0.5, 0.5, 0.5, 3, 4, 4, 3, 3]
    return None if got == want else f"streams of 2 and 4 gave {got}, not {want}"


@stream_gates.provide("native", probe_mixed)
def _gates(logits: Tensor, scale: Tensor, base: Tensor, sizes: StreamGateSizes) -> Tensor:
    given = logits, scale, base
    if any(each.dtype != torch.float32 or not each.is_contiguous() for each in given):
        raise ValueError("logits, scale and base are float32, side by side")
    (tokens, width), count = logits.shape, sizes.streams
    kinds = {count: 1, 2 * count: 2, (2 + count) * count: 3}.get(width)
    if kinds is None or scale.shape != (kinds,) or base.shape != (width,) or count > MAX_STREAMS:
        raise ValueError(
            f"scale {tuple(scale.shape)} and base {tuple(base.shape)} do not fit logits {tuple(logits.shape)} of "
            f"{count} streams, {MAX_STREAMS} at most"
        )
    out = empty((tokens, width), torch.float32)
    places = (each.data_ptr() for each in (out, *given))
    extension().stream_gates(
        *places, tokens, count, width, sizes.eps, sizes.magnitude, sizes.output_eps, sizes.iterations
    )
    return out


@collapse_streams.provide("native", probe_mixed)
def _collapse(x: Tensor, gates: Tensor, streams: int) -> Tensor:
    return _mixed(COLLAPSE, x, None, gates, (streams, x.shape[1] // streams))


@expand_streams.provide("native", probe_mixed)
def _expand(x: Tensor, layer_output: Tensor, gates: Tensor) -> Tensor:
    width = layer_output.shape[1]
    if layer_output.dtype != x.dtype or len(layer_output) != len(x):
        raise ValueError(f"a layer gave {tuple(layer_output.shape)} {layer_output.dtype} for {len(x)} of {x.dtype}")
    return _mixed(EXPAND, x, layer_output, gates, (x.shape[1] // width, width))


@repeat_streams.provide("native", probe_mixed)
def _repeat(x: Tensor, streams: int) -> Tensor:
    return _mixed(REPEAT, x, None, None, (streams, x.shape[1]))


def _mixed(op: int, x: Tensor, layer_output: Tensor | None, gates: Tensor | None, sizes: tuple[int, int]) -> Tensor:
    """`sizes`: the number of streams, and their width."""
    (count, width), tokens = sizes, len(x)
    stride = 0
    if gates is not None:
        least = 2 * count if op == EXPAND else count
        if gates.dtype != torch.float32 or gates.shape[1] < least or len(gates) not in (1, tokens):
            raise ValueError(f"gates {tuple(gates.shape)} {gates.dtype} do not fit {tokens} of {count} streams")
        gates = gates.contiguous()
        stride = gates.shape[1] if len(gates) == tokens else 0
    if x.shape[1] != (width if op == REPEAT else count * width) or count > MAX_STREAMS:
        raise ValueError(f"x {tuple(x.shape)} is not of {count} streams of {width}, {MAX_STREAMS} at most")
    x = x.contiguous()
    layer_output = None if layer_output is None else layer_output.contiguous()
    out = empty((tokens, width if op == COLLAPSE else count * width), x.dtype)
    beside = (0 if each is None else each.data_ptr() for each in (layer_output, gates))
    matrices = gates is not None and gates.shape[1] > 2 * count
    extension().mixed_streams(
        kind_of(x.dtype), op, out.data_ptr(), x.data_ptr(), *beside, tokens, count, width, stride, matrices
    )
    return out
