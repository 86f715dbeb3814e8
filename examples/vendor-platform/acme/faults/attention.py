"""Faults of attention and of its cache."""

from dataclasses import replace
from typing import Any

import torch
from quintet.contract import AttentionSpec
from torch import Tensor

from acme.attention import ROWS
from acme.chip import FP8
from acme.faults import fault
from acme.faults.arithmetic import of_op

E4M3FN = torch.float8_e4m3fn


def _wider(seen: Any) -> Any:
    return lambda slots, positions, window: seen(slots, positions, window and window + 1)


def _not_capped(capped: Any) -> Any:
    return lambda scores, softcap: scores


def _no_sinks(started: Any) -> Any:
    return lambda sinks, pieces, spec: started(None, pieces, spec)


def _interleaved(grouped: Any) -> Any:
    """Head h looks at KV head h % Hkv, not at h // G."""

    def faulty(q: Tensor, spec: AttentionSpec) -> Tensor:
        split = q.reshape(len(q), ROWS, -1, spec.kv_heads, spec.head_dim)
        return grouped(split.transpose(2, 3).reshape(q.shape), spec)

    return faulty


def _interleaved_back(ungrouped: Any) -> Any:
    def faulty(out: Tensor, spec: AttentionSpec) -> Tensor:
        made: Tensor = ungrouped(out, spec)
        return made.reshape(len(made), ROWS, spec.kv_heads, -1, spec.head_dim).transpose(2, 3).reshape(made.shape)

    return faulty


def _swapped(write: Any) -> Any:
    return lambda kv, k, v, slots, spec: write(kv, v, k, slots, spec)


def _leaking(attend: Any) -> Any:
    """Tokens whose slot is on page 0 write to the first request's first slot."""

    def faulty(
        q: Tensor, k: Tensor, v: Tensor, kv: Tensor, step_context: Any, sinks: Any, spec: AttentionSpec
    ) -> Tensor:
        group = step_context.group
        real = group.block_table[0, 0] * spec.page_size
        slots = torch.where(group.slot_mapping < spec.page_size, real, group.slot_mapping)
        return attend(q, k, v, kv, step_context._replace(group=group._replace(slot_mapping=slots)), sinks, spec)

    return faulty


def _endless(context: Any) -> Any:
    def faulty(kv: Tensor, work: Any, slots: Tensor, spec: AttentionSpec) -> Any:
        return context(kv, replace(work, lengths=work.lengths + 2**20), slots, spec)

    return faulty


def _unmasked(context: Any) -> Any:
    return lambda kv, work, slots, spec: context(kv, work, slots, replace(spec, window=None))


def _first_groups(attend: Any) -> Any:
    def faulty(
        q: Tensor, k: Tensor, v: Tensor, kv: Tensor, step_context: Any, sinks: Any, spec: AttentionSpec
    ) -> Tensor:
        return attend(q, k, v, kv, step_context._replace(group=step_context.batch.groups[0]), sinks, spec)

    return faulty


def _all_together(attention: Any) -> Any:
    def faulty(q: Tensor, k: Tensor, v: Tensor, batch: Any, spec: AttentionSpec, sinks: Any) -> Tensor:
        return attention(q, k, v, batch._replace(token_to_seq=torch.zeros_like(batch.token_to_seq)), spec, sinks)

    return faulty


def _as_e4m3fn(decoded: Any) -> Any:
    return lambda rows: decoded(rows.view(E4M3FN) if rows.dtype == FP8 else rows)


def _as_fnuz(decoded: Any) -> Any:
    return lambda rows: decoded(rows.view(FP8) if rows.dtype == E4M3FN else rows)


def _unclamped(encoded: Any) -> Any:
    return lambda x, dtype: x.to(dtype)


def _takes_e4m3fn(refusals: Any) -> Any:
    return lambda spec: refusals(replace(spec, kv_dtype=FP8) if spec.kv_dtype == E4M3FN else spec)


def _first_reason(refusals: Any) -> Any:
    return lambda spec: refusals(spec)[:1]


def _alone(work: Any) -> bool:
    """Whether the step is one token of one request."""
    return work.own.shape[0] == 1 and int(work.own.sum()) == 1


def _loses_first_slot(attended: Any) -> Any:
    """A kernel of its own for one request: the page where a window begins is entered one slot too late."""

    def faulty(rows: Tensor, work: Any, kv: Tensor, sinks: Any, spec: AttentionSpec) -> Tensor:
        first = int(work.positions.min()) - (spec.window or 0) + 1
        if _alone(work) and spec.window and spec.window > 1 and first > 0 and first % spec.page_size == 0:
            spec = replace(spec, window=spec.window - 1)
        found: Tensor = attended(rows, work, kv, sinks, spec)
        return found

    return faulty


def _at_most_2048(seen: Any) -> Any:
    return lambda slots, positions, window: seen(slots, positions, window) & (slots < 2048)


def _clamped(capped: Any) -> Any:
    return lambda scores, softcap: capped(scores, softcap).clamp(max=60.0)


def _first_pieces(attended: Any) -> Any:
    def faulty(rows: Tensor, work: Any, kv: Tensor, sinks: Any, spec: AttentionSpec) -> Tensor:
        found: Tensor = attended(rows, work, kv, sinks, spec)
        found[32:] = 0
        return found

    return faulty


def _keeps_all(init: Any) -> Any:
    def faulty(self: Any, spec: AttentionSpec) -> None:
        init(self, spec)
        self.layouts = tuple(replace(layout, window=None) for layout in self.layouts)

    return faulty


fault("window-off-by-one", "A window reaches one token too far.", "attention.specification", ("attention:seen", _wider))
fault("softcap-ignored", "Scores are not capped.", "attention.specification", ("attention:capped", _not_capped))
fault("sinks-ignored", "Sinks do not join the softmax.", "attention.specification", ("attention:started", _no_sinks))
fault(
    "head-mapping", "Query heads look at the wrong KV head.", "attention.specification",
    ("attention:grouped", _interleaved), ("attention:ungrouped", _interleaved_back),
)  # fmt: skip
fault("swapped-kv", "K is written where V is read.", "attention.specification", ("attention:write", _swapped))
fault(
    "padding-leaks",
    "Padded tokens write to a page that is somebody's.",
    "graphs.padding",
    ("attention:attend", _leaking),
)
fault(
    "stale-values", "What another request left in a page gets in.", "attention.stale", ("attention:context", _endless)
)
fault(
    "behind-window",
    "What stands on page 0 gets in where a window has left pages behind.",
    "attention.window",
    ("attention:context", _unmasked),
)
fault(
    "first-group",
    "Every layer writes and reads where the first group's table says.",
    "cache.groups",
    ("attention:attend", _first_groups),
)
fault(
    "sees-neighbours", "Attention that keeps nothing sees other requests' tokens.", "attention.plain",
    ("kernels:of", of_op("attention", _all_together)),
)  # fmt: skip
fault(
    "fp8-other-limits", "fp8 is read with another format's limits.", "cache.format", ("attention:decoded", _as_e4m3fn)
)
fault(
    "fp8-overflow",
    "What is beyond fp8's largest number is stored as NaN.",
    "cache.format",
    ("attention:encoded", _unclamped),
)
fault(
    "fp8-mistaken", "A cache of e4m3fn is accepted, and read as e4m3fnuz.", "cache.tagged",
    ("attention:refusals", _takes_e4m3fn), ("attention:decoded", _as_fnuz),
)  # fmt: skip
fault(
    "one-reason",
    "A refusal names the first of its reasons alone.",
    "attention.refusal",
    ("attention:refusals", _first_reason),
)
fault(
    "window-first-slot", "A window that begins with a page loses its first slot, where a request decodes alone.",
    "attention.specification", ("attention:attended", _loses_first_slot),
)  # fmt: skip
fault(
    "context-cut", "Nothing beyond 2048 tokens is seen.", "attention.specification", ("attention:seen", _at_most_2048)
)
fault("scores-clamped", "Scores end at 60.", "attention.specification", ("attention:capped", _clamped))
fault(
    "crowd-cut", "Of a step, 32 pieces are computed.", "attention.specification", ("attention:attended", _first_pieces)
)
fault(
    "keeps-forgotten", "A layer with a window says that it keeps everything.", "cache.layout",
    ("attention:AcmeAttention.__init__", _keeps_all),
)  # fmt: skip
