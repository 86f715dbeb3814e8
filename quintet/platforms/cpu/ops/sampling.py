"""The sampling ops by quintet._cpu: each row's tokens are the specification's, whatever rows stand beside it."""

from typing import Any

import torch
from torch import Tensor

from quintet.ops.random import gumbel
from quintet.ops.sampling import (
    Draw,
    ban_tokens,
    bias_tokens,
    filter_logits,
    greedy,
    keep_tokens,
    penalize,
    sample,
    scale_logits,
    top_logprobs,
    widen,
)
from quintet.platforms.cpu.arena import empty
from quintet.platforms.cpu.ops.extension import extension

SERVED = (torch.float32, torch.bfloat16, torch.float16)
UNSURE = -2  # a row of two tokens that a rounding of the logarithm may exchange, or that stands on the edge of top_p


def probe() -> str | None:
    """Two rows, one of which cannot be drawn."""
    try:
        from quintet import _cpu
    except ImportError as error:
        return f"the compiled extension is not there: {error}"
    if not hasattr(_cpu, "Logits"):
        return "the compiled extension is older than this provider; build it again with `make`"
    found = _greedy(torch.tensor([[1.0, 3.0, 2.0], [0.0, float("nan"), 0.0]])).tolist()
    return None if found == [1, -1] else f"the largest of two rows stood at {found}, not [1, -1]"


@greedy.provide("native", probe)
def _greedy(logits: Tensor) -> Tensor:
    out = torch.empty(logits.shape[0], dtype=torch.int32)
    kind = _kind(logits)
    logits = _rows(logits)
    extension().greedy(_table(logits), *kind, out.data_ptr())
    return out


@sample.provide("native", probe)
def _sample(logits: Tensor, draw: Draw, width: int) -> Tensor:
    """The specification itself decides where it and we may have rounded differently: one draw in some 100,000."""
    logits, draw = _rows(logits, torch.float32), _checked(draw, logits.shape[0])
    out, log_min_p = torch.empty(logits.shape[0], dtype=torch.int32), torch.log(draw.min_p)
    unsure = extension().sample(
        _table(logits), draw.temperature.data_ptr(), draw.top_k.data_ptr(), draw.top_p.data_ptr(),
        log_min_p.data_ptr(), draw.keys.data_ptr(), draw.positions.data_ptr(), out.data_ptr(),
    )  # fmt: skip
    if unsure:
        for row in _rows_where(out == UNSURE):
            out[row] = sample.reference(logits[row], _draw_of(draw, row), logits.shape[1])
    return out


@filter_logits.provide("native", probe)
def _filter_logits(logits: Tensor, draw: Draw, width: int) -> Tensor:
    """As for sample; but flat rows with top_p are often unsure, as there a token's mass is no more than an error's."""
    logits, draw = _rows(logits, torch.float32), _checked(draw, logits.shape[0])
    out, log_min_p = torch.empty(logits.shape), torch.log(draw.min_p)
    edge = torch.empty(logits.shape[0], dtype=torch.int32)
    unsure = extension().filter_logits(
        _table(logits), draw.top_k.data_ptr(), draw.top_p.data_ptr(), log_min_p.data_ptr(), out.data_ptr(),
        edge.data_ptr(),
    )  # fmt: skip
    if unsure:
        for row in _rows_where(edge == 1):
            out[row] = filter_logits.reference(logits[row], _draw_of(draw, row), logits.shape[1])
    return out


@gumbel.provide("native", probe)
def _gumbel(keys: Tensor, positions: Tensor, token_ids: Tensor) -> Tensor:
    rows, count = keys.shape[0], token_ids.shape[1]
    ids = token_ids.contiguous()
    out = torch.empty(rows, count)
    extension().gumbel(
        _column(keys, torch.int32, 2 * rows).data_ptr(), _column(positions, torch.int32, rows).data_ptr(),
        _column(ids, torch.int32, ids.numel()).data_ptr(), rows, ids.shape[0], count, out.data_ptr(),
    )  # fmt: skip
    return out


@top_logprobs.provide("native", probe)
def _top_logprobs(
    logits: Tensor, token_ids: Tensor, num: int, normalize: bool, wanted: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    rows = logits.shape[0]
    logits = _rows(logits.float())
    ids = torch.empty(rows, num + 1, dtype=torch.int32)
    values, ranks = torch.empty(rows, num + 1), torch.empty(rows, dtype=torch.int32)
    extension().top_logprobs(
        _table(logits), _column(token_ids, torch.int32, rows).data_ptr(),
        _column(wanted, torch.int32, rows).data_ptr(), num, normalize, ids.data_ptr(), values.data_ptr(),
        ranks.data_ptr(),
    )  # fmt: skip
    return ids, values, ranks


@widen.provide("native", probe)
def _widen(logits: Tensor, count: int, copy: bool) -> Tensor:
    logits = logits[:count]
    if logits.dtype == torch.float32 and not copy:
        return logits
    out = empty(logits.shape, torch.float32)  # routers are given it within a step
    kind = _kind(logits)
    logits = _rows(logits)
    extension().widen(_table(logits), *kind, out.data_ptr())
    return out


@scale_logits.provide("native", probe)
def _scale_logits(logits: Tensor, temperature: Tensor) -> Tensor:
    logits = _rows(logits, torch.float32)
    out = torch.empty(logits.shape)
    extension().scale_logits(
        _table(logits), _column(temperature, torch.float32, len(logits)).data_ptr(), out.data_ptr()
    )
    return out


@penalize.provide("native", probe)
def _penalize(logits: Tensor, rows: Tensor, ids: Tensor, counts: Tensor, penalties: Tensor) -> Tensor:
    _column(penalties, torch.float32, 3 * logits.shape[0])
    extension().penalize(
        *_places(logits, rows, ids), _column(counts, torch.int32, len(rows)).data_ptr(), penalties.data_ptr()
    )
    return logits


@bias_tokens.provide("native", probe)
def _bias_tokens(logits: Tensor, rows: Tensor, ids: Tensor, values: Tensor) -> Tensor:
    extension().bias_tokens(*_places(logits, rows, ids), _column(values, torch.float32, len(rows)).data_ptr())
    return logits


@ban_tokens.provide("native", probe)
def _ban_tokens(logits: Tensor, rows: Tensor, ids: Tensor) -> Tensor:
    extension().ban_tokens(*_places(logits, rows, ids))
    return logits


@keep_tokens.provide("native", probe)
def _keep_tokens(logits: Tensor, bits: Tensor) -> Tensor:
    table = _edited(logits)
    extension().keep_tokens(table, _column(bits, torch.int32, logits.shape[0] * -(-logits.shape[1] // 32)).data_ptr())
    return logits


def _kind(logits: Tensor) -> tuple[int, bool]:
    if logits.dtype not in SERVED:
        raise ValueError(f"logits are {', '.join(map(str, SERVED))}, not {logits.dtype}")
    return 8 * logits.itemsize, logits.dtype == torch.bfloat16


def _rows(logits: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Returns logits with contiguous rows; there may be gaps between rows, as in a slice of the vocabulary."""
    if logits.dim() != 2 or (dtype is not None and logits.dtype != dtype):
        raise ValueError(f"logits are [R, V] of {dtype or 'floats'}, not {tuple(logits.shape)} of {logits.dtype}")
    return logits if _in_rows(logits) else logits.contiguous()


def _in_rows(logits: Tensor) -> bool:
    rows, vocab = logits.shape
    return (vocab == 1 or logits.stride(1) == 1) and (rows <= 1 or logits.stride(0) >= vocab)


def _table(logits: Tensor) -> Any:
    rows, vocab = logits.shape
    return extension().Logits(logits.data_ptr(), logits.stride(0), rows, vocab)


def _edited(logits: Tensor) -> Any:
    """Logits that are written to where they stand."""
    if logits.dim() != 2 or logits.dtype != torch.float32 or not _in_rows(logits):
        raise ValueError(f"edits are made in rows of float32, not in {logits.dtype} with strides {logits.stride()}")
    return _table(logits)


def _column(x: Tensor, dtype: torch.dtype, count: int) -> Tensor:
    if x.dtype != dtype or x.numel() != count or not x.is_contiguous():
        raise ValueError(
            f"{count} contiguous numbers of {dtype} are wanted, not {tuple(x.shape)} of {x.dtype}, strides {x.stride()}"
        )
    return x


def _places(logits: Tensor, rows: Tensor, ids: Tensor) -> tuple[Any, int, int, int]:
    count = len(rows)
    _column(rows, torch.int32, count), _column(ids, torch.int32, count)
    return _edited(logits), rows.data_ptr(), ids.data_ptr(), count


def _checked(draw: Draw, rows: int) -> Draw:
    for column, dtype in zip(draw[:4], (torch.float32, torch.int32, torch.float32, torch.float32), strict=True):
        _column(column, dtype, rows)
    _column(draw.keys, torch.int32, 2 * rows), _column(draw.positions, torch.int32, rows)
    return draw


def _rows_where(mask: Tensor) -> list[slice]:
    return [slice(row, row + 1) for row in torch.nonzero(mask)[:, 0].tolist()]


def _draw_of(draw: Draw, row: slice) -> Draw:
    return Draw(*(column[row] for column in draw))
