"""Attention of whole prompts by cuDNN, through torch: of a step's only request, of which nothing is cached.

Captured steps have it too: which they are, the host knows. On an H100, with 32 heads over 8 KV heads of 128, it takes
84 us for 2,048 tokens where our kernel takes 115, and 971 for 8,192 where ours takes 1,557. K and V are copied out of
their pages first. cuDNN builds a plan for each shape, for which 0.4 s are reported with torch 2.11 (FunASR #3704, on a
B200), and torch keeps it for its thread: so few lengths are served, parts of the largest step, and a step is padded to
one of them if that costs little.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from quintet.interface.platform import Mixer
from quintet.interface.types import AttentionSpec, Batch, StepContext
from quintet.ops.attention import PagedAttention, page_shape
from quintet.ops.registry import Ops
from quintet.platforms.gpu import library_checks as trials
from quintet.platforms.gpu.ops.attention import step

MIN_TOKENS = 4096  # tokens: with the copies 2,048 take 125 us on an H100, our kernels 115; 8,192 take 1,074 and 1,572
SHARE = 16  # a step is padded by one token for so many at most
EIGHTHS = range(4, 9)  # of the largest step
MAX_DIM = 128  # of heads: cuDNN has more on some chips, which were not measured
SAMPLED = 24  # tokens of a trial that the specification computes


def refusals(spec: AttentionSpec) -> list[str]:
    """Everything about the layer for which it is left to the paged kernels."""
    reasons = {
        f"queries in {spec.dtype}": spec.dtype not in (torch.float16, torch.bfloat16),
        f"a cache in {spec.cache_name}": spec.cache_dtype != spec.dtype,
        f"heads of {spec.head_dim}": spec.head_dim > MAX_DIM or spec.head_dim % 8 != 0,
        "V as a part of K": bool(spec.shared),
        "a window": spec.window is not None,
        "chunks": spec.chunk is not None,
        "a soft-cap": spec.softcap is not None,
        "sinks": spec.sinks,
        "slopes (ALiBi)": spec.alibi is not None,
        "a layer that is not causal": not spec.causal or spec.source != "self",
    }
    return [what for what, there in reasons.items() if there]


def sizes(most: int) -> tuple[int, ...]:
    """Tokens that plans are built for, where a step has so many at most."""
    return tuple(size for each in EIGHTHS if (size := most * each // 8) >= MIN_TOKENS)


def size_for(tokens: int, sizes: Sequence[int]) -> int | None:
    """Returns the size that a whole prompt of so many tokens is padded to; None: the paged kernels serve it."""
    size = next((each for each in sizes if each >= tokens), None)
    if size is None or size - tokens > size // SHARE:
        return None
    return size


def mixer(spec: AttentionSpec, ops: Ops, sizes: Sequence[int]) -> Mixer:
    """Makes a mixer that writes K and V by the bound ops, and attends to the step's own."""

    def attend(q: Tensor, kv: Tensor, context: StepContext, spec: AttentionSpec, sinks: Tensor | None) -> Tensor:
        size = size_for(len(q), sizes)
        assert size is not None, "the plan says of which steps it is"
        return attended(q, kv, context, spec, size)

    return PagedAttention(spec, ops, attend=attend)


def attended(q: Tensor, kv: Tensor, context: StepContext, spec: AttentionSpec, size: int) -> Tensor:
    """The op paged_attention for a step of one request that brings all its tokens, padded to `size`; how many are its
    own, the device knows. What lies behind its end on pages may be NaN, and is zeros here: no weight of 0 would keep it
    out. Rows of padding hold some numbers."""
    tokens, page_size, count = len(q), spec.page_size, -(-size // spec.page_size)
    pages = context.group.block_table[0, :count]
    if len(pages) < count:
        pages = functional.pad(pages, (0, count - len(pages)))
    rows = kv.view(len(kv), 2 * spec.kv_heads, page_size * spec.head_dim).transpose(0, 1)
    kept = torch.index_select(rows, 1, pages).view(2, 1, spec.kv_heads, -1, spec.head_dim)[..., :size, :]
    behind = torch.arange(size, device=q.device) >= context.group.seq_lens[0]
    kept = kept.masked_fill(behind[:, None], 0.0)
    if tokens < size:
        q = functional.pad(q, (0, 0, 0, 0, 0, size - tokens))
    out = by_cudnn(q.transpose(0, 1)[None], kept[0], kept[1], spec.scale)
    return out[0].transpose(0, 1)[:tokens].contiguous()


def by_cudnn(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Causal attention of q [1, H, T, D] to k and v [1, Hkv, T, D]. The op itself: functional's choice of a backend
    (sdpa_kernel) is the process's, and ranks are threads."""
    out: Tensor = torch.ops.aten._scaled_dot_product_cudnn_attention(
        q, k, v, None, False, 0.0, True, False, scale=scale
    )[0]
    return out


def trial(spec: AttentionSpec, device: torch.device, size: int) -> str | None:
    """A prompt that is a little shorter, on pages in no order with NaN behind its end; some of its tokens against the
    specification. Says what was wrong."""
    try:
        tokens, pages = size - 5, -(-size // spec.page_size)
        kv = trials.test_numbers(device, pages + 1, *page_shape(spec)).to(spec.dtype)
        table = torch.arange(pages, 0, -1, dtype=torch.int32, device=device)
        context = step(0, tokens, spec.page_size, device, table)
        last = -tokens % spec.page_size
        if last:
            kv[1 + pages - -(-tokens // spec.page_size), :, :, -last:] = torch.nan
        q = trials.queries(spec, device, tokens)
        got = attended(q, kv, context, spec, size)
        some = torch.linspace(0, tokens - 1, min(SAMPLED, tokens), device=device).long()
        batch: Batch = context.batch._replace(
            positions=context.batch.positions[some], token_to_seq=context.batch.token_to_seq[some]
        )
        want = trials.specified(q[some], kv, context._replace(batch=batch), spec, None)
        return trials.differ_by_row(got[some], want, "cuDNN")
    except Exception as error:  # versions of torch and of cuDNN differ: whatever goes wrong is a reason not to serve
        lines = str(error).strip().splitlines()
        return f"cuDNN fails on a prompt: {type(error).__name__}: {lines[0] if lines else 'no message'}"


def nbytes(spec: AttentionSpec, size: int) -> int:
    """Returns the bytes that a prompt takes beside its result: K, V, padded queries and their result."""
    return 2 * size * (spec.heads + spec.kv_heads) * spec.head_dim * spec.dtype.itemsize
