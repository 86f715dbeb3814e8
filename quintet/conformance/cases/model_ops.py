"""Arguments for each op of the model: a grid of shapes, types and formats."""

from collections.abc import Iterator

import torch

from quintet.conformance.cases.attention import ATTENTION_OPS
from quintet.conformance.cases.compressed import COMPRESSED
from quintet.conformance.cases.expert_placement import EXPERT_PLACEMENT
from quintet.conformance.cases.linear import PRODUCTS
from quintet.conformance.cases.lora import LORA, lora_experts
from quintet.conformance.cases.random_arguments import Case, Cases, randn
from quintet.conformance.cases.states import STATE_HELPERS, STATES
from quintet.conformance.cases.streams import STREAMS
from quintet.interface.types import HeadNorms
from quintet.interface.weights import Matrix
from quintet.ops.activation import KINDS, ClampedGate, with_limit
from quintet.ops.linear import KINDS as FORMS
from quintet.ops.registry import of_kind

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# ops that turn logits into tokens: the section `sampling` proves them, the section `ops` all others
SAMPLING = frozenset({"gumbel", "greedy", "scale_logits", "filter_logits", "sample", "top_logprobs", "widen"}) | {
    "penalize", "bias_tokens", "ban_tokens", "keep_tokens"
}  # fmt: skip
# not called by a platform that implements attention by other means
ATTENTION = ("write_kv", "rotary_write_kv", "paged_attention", "attention")
PAGES = ("gather_pages", "scatter_pages")  # called where torch looks into the cache, or a provider does
# of these a platform that packs the scheme takes what its place() made, and nothing else
PACKED = {of_kind("linear", kind): kind for kind in FORMS}
USES = {"linear": {1: "linear"}, "embedding": {1: "embedding"}}  # arguments that place() may repack, and for what
TYPES: dict[str, tuple[torch.dtype, ...]] = {  # of results; all others have the arguments'
    **dict.fromkeys(
        ("route", "route_grouped", "route_hashed", "route_limited", "route_softplus", "route_sparse"),
        (torch.float32, torch.int32),
    ),
    "choose_entries": (torch.int32,),
    **dict.fromkeys(("local_experts", "count_experts"), (torch.int32,)),
    **dict.fromkeys(
        ("known_ids", "place_tokens", "gather_pages", "scatter_pages", "adapter_rows", "choose_pools", "choose_tokens"),
        (torch.int32,),
    ),
    **dict.fromkeys(("choose_blocks", "choose_mean_blocks"), (torch.int32,)),
    **dict.fromkeys(
        ("delta_rule", "kimi_delta_rule", "pool_windows", "selective_scan", "state_space", "wkv7"), (torch.float32,) * 2
    ),
    "stream_gates": (torch.float32,),
}


def linear(dtype: torch.dtype) -> Iterator[Case]:
    for rows in (1, 2, 3, 8, 65):
        for inputs, outputs in ((1, 1), (48, 77), (77, 48), (256, 129), (1024, 40)):
            for biased in (False, True):
                x, w = randn(rows, inputs, dtype=dtype), randn(outputs, inputs, dtype=dtype, scale=inputs**-0.5)
                bias = randn(outputs, dtype=dtype) if biased else None
                yield f"{rows}x{inputs} by {outputs}, bias {biased}", (x, Matrix(w), bias, (outputs,))


def activations(dtype: torch.dtype) -> Iterator[Case]:
    for kind in KINDS:
        for rows, width in ((1, 2), (3, 74), (65, 130)):
            yield f"{kind} {rows}x{width}", (randn(rows, width, dtype=dtype, scale=4.0), kind)
        if kind != "relu2":  # has none, and its squares would overflow
            yield f"{kind} of numbers whose exponentials overflow", (randn(2, 74, dtype=dtype, scale=50.0), kind)


def gates(dtype: torch.dtype) -> Iterator[Case]:
    yield from activations(dtype)
    for kind in (with_limit("silu", 1.5), str(ClampedGate(1.702, 7.0, 1.0)), str(ClampedGate(1.0, 3.0, 0.0))):
        for rows, width in ((1, 2), (3, 74), (65, 130)):
            yield f"{kind} {rows}x{width}", (randn(rows, width, dtype=dtype, scale=4.0), kind)


def rms_norm(dtype: torch.dtype) -> Iterator[Case]:
    for shape in ((1, 48), (5, 77), (3, 6, 16)):
        for offset in (0.0, 1.0):
            x = randn(*shape, dtype=dtype)
            if len(x) > 1:
                x[-1] = 0  # a row of size 0, too
            yield f"{shape} + {offset}", (x, randn(shape[-1], dtype=dtype), 1e-5, offset)


def add_rms_norm(dtype: torch.dtype) -> Iterator[Case]:
    for what, (x, weight, eps, offset) in rms_norm(dtype):
        yield what, (x, randn(*x.shape, dtype=dtype, scale=3.0), weight, eps, offset)


def layer_norm(dtype: torch.dtype) -> Iterator[Case]:
    for rows, width in ((1, 48), (5, 77)):
        x, weight, bias = (randn(*s, dtype=dtype) for s in ((rows, width), (width,), (width,)))
        x[rows - 1 :] *= rows == 1  # the last of five is zeros
        yield f"{rows}x{width}", (x, weight, bias, 1e-5)
        yield f"{rows}x{width}, no bias", (x, weight, None, 1e-5)


def rotary(dtype: torch.dtype) -> Iterator[Case]:
    for heads, kv_heads, dim, turned in ((6, 3, 16, 16), (5, 1, 24, 12)):
        q, k = randn(9, heads, dim, dtype=dtype), randn(9, kv_heads, dim, dtype=dtype)
        angles = torch.arange(4000)[:, None] * torch.linspace(0.1, 1, turned // 2)
        table = torch.cat([angles.cos(), angles.sin()], -1)
        positions = torch.tensor([0, 1, 2, 3999, 5, 5, 257, 30, 2049], dtype=torch.int32)
        yield f"{turned} of {dim}", (q, k, table, positions)


def embedding(dtype: torch.dtype) -> Iterator[Case]:
    ids, table = torch.tensor([0, 7, 9, 3, 7], dtype=torch.int32), randn(10, 12, dtype=dtype)
    yield "whole", (ids, table, 0, False)
    for first in (0, 4, 8, 20):
        yield f"from {first}", (ids, table[:4], first, True)


def add_row(dtype: torch.dtype) -> Iterator[Case]:
    for tokens, width in ((1, 1), (5, 48), (33, 1030)):
        yield f"{tokens} tokens of {width}", (randn(tokens, width, dtype=dtype), randn(width, dtype=dtype))


def scale_heads(dtype: torch.dtype) -> Iterator[Case]:
    for tokens, heads, groups in ((1, 1, 1), (5, 8, 2), (33, 6, 6), (3, 12, 1)):
        factors = randn(groups, 1, dtype=torch.float32).abs() + 0.1
        yield f"{tokens} tokens, {heads} heads, {groups} factors", (randn(tokens, heads, 24, dtype=dtype), factors)


def scale_by_length(dtype: torch.dtype) -> Iterator[Case]:
    for tokens, heads in ((1, 1), (5, 8), (33, 6)):
        positions = torch.arange(tokens, dtype=torch.int32) * 1000
        learned = randn(heads, dtype=torch.float32), randn(heads, dtype=torch.float32) + 1
        yield f"{tokens} tokens, {heads} heads", (randn(tokens, heads, 24, dtype=dtype), positions, *learned)


def take_rows(dtype: torch.dtype) -> Iterator[Case]:
    rows = torch.tensor([0, 7, 9, 3, 7], dtype=torch.int32)
    yield "some, one twice", (randn(10, 12, dtype=dtype), rows)
    yield "none", (randn(10, 12, dtype=dtype), rows[:0])


def place_rows(dtype: torch.dtype) -> Iterator[Case]:
    places = torch.tensor([-1, 2, 0, -1, 2], dtype=torch.int32)
    for given in (torch.float32, dtype):
        yield f"from {given}", (randn(5, 12, dtype=dtype), randn(3, 12, dtype=given), places)


def choose_rows(dtype: torch.dtype) -> Iterator[Case]:
    for places in ([-1, 2, 0, -1, 70], [-1] * 5, [0] * 5):
        yield f"{places}", (*randn(2, 5, 12, dtype=dtype), torch.tensor(places, dtype=torch.int32))


def beside(dtype: torch.dtype) -> Iterator[Case]:
    for tokens, first, second in ((1, 64, 16), (5, 12, 1), (33, 48, 77)):
        x, y = randn(tokens, first, dtype=dtype), randn(tokens, second, dtype=dtype, scale=2.0)
        yield f"{tokens} tokens, {first} and {second}", (x, y)


def norm_rotary(dtype: torch.dtype) -> Iterator[Case]:
    for what, (q, k, table, positions) in rotary(dtype):
        for offset in (0.0, 1.0):
            weights = randn(q.shape[-1], dtype=dtype), randn(q.shape[-1] + 1, dtype=dtype)[1:].contiguous()
            yield f"{what} + {offset}", (q, k, HeadNorms(*weights, 1e-5, offset), table, positions)


def add(dtype: torch.dtype) -> Iterator[Case]:
    for rows, width in ((1, 1), (3, 74), (65, 130)):
        yield f"{rows}x{width}", (randn(rows, width, dtype=dtype), randn(rows, width, dtype=dtype, scale=3.0))


def scale(dtype: torch.dtype) -> Iterator[Case]:
    for what, (x, _) in add(dtype):
        yield what, (x, 12.3)


def softcap(dtype: torch.dtype) -> Iterator[Case]:
    for what, (x, _) in add(dtype):
        yield what, (x * 20, 30.0)


def route(dtype: torch.dtype) -> Iterator[Case]:
    for tokens, num, k in ((1, 4, 1), (9, 8, 2), (9, 8, 3), (33, 60, 4)):
        logits = randn(tokens, num, dtype=dtype, scale=3.0)
        logits[:, num // 2] = logits[:, 1]  # equal ones
        for renormalize in (False, True):
            yield f"{tokens} tokens, {k} of {num}, renormalised {renormalize}", (logits, k, renormalize)


def route_grouped(dtype: torch.dtype) -> Iterator[Case]:
    for tokens, num, k, groups, kept in ((1, 8, 1, 1, 1), (9, 16, 4, 4, 2), (33, 64, 4, 8, 3), (5, 16, 2, 4, 4)):
        logits, bias = randn(tokens, num, dtype=dtype), randn(num, dtype=torch.float32, scale=0.1)
        what = f"{tokens} tokens, {k} of {num} in {kept} of {groups} groups"
        yield what, (logits, bias, k, groups, kept, k > 2)


def route_limited(dtype: torch.dtype) -> Iterator[Case]:
    for what, (logits, bias, k, groups, kept, renormalize) in route_grouped(dtype):
        yield what, (logits * 2, bias * 0.1, k, groups, kept, renormalize)


def route_sparse(dtype: torch.dtype) -> Iterator[Case]:
    """Some are near the largest, some are equal, and some are all below 0."""
    for tokens, num, k in ((1, 4, 2), (9, 16, 2), (33, 5, 3), (7, 2, 2)):
        logits = randn(tokens, num, dtype=dtype, scale=3.0)
        logits[:, num // 2] = logits[:, 0] * 1.001
        logits[::2] -= 12
        for margin in (0.0, 0.02, 0.7):
            yield f"{tokens} tokens, {k} of {num}, within {margin}", (logits, k, margin)


def by_heads(dtype: torch.dtype) -> Iterator[Case]:
    for tokens, heads, inputs, outputs in ((1, 3, 16, 40), (9, 2, 40, 16), (33, 5, 24, 70), (70, 1, 128, 64)):
        wide = randn(tokens, heads, inputs + 8, dtype=dtype)
        x, weight = wide[..., :inputs], randn(heads, outputs, inputs, dtype=dtype, scale=inputs**-0.5)
        what = f"{tokens} tokens, {heads} heads, {inputs} by {outputs}"
        yield what, (x, weight, outputs, False)
        yield f"{what}, turned", (x, weight.mT.contiguous(), outputs, True)


def grouped_linear(dtype: torch.dtype) -> Iterator[Case]:
    for counts, spare in (((3,), 0), ((0, 4, 0, 1), 3), ((5, 5, 5), 0), ((0, 0), 2), ((1, 0, 30, 2, 0, 7), 1)):
        for inputs, outputs in ((48, 77), (256, 40)):
            x = randn(sum(counts) + spare, inputs, dtype=dtype)
            x[sum(counts) :] = torch.nan  # no token's rows
            weight = randn(len(counts), outputs, inputs, dtype=dtype, scale=inputs**-0.5)
            yield f"{counts} of {len(x)}, {inputs} by {outputs}", (x, weight, torch.tensor(counts, dtype=torch.int32))


def experts(dtype: torch.dtype) -> Iterator[Case]:
    for tokens, num, hidden, inner, k in ((1, 4, 16, 24, 1), (7, 6, 40, 17, 2), (33, 3, 24, 32, 3), (4, 9, 8, 8, 4)):
        x, seed = randn(tokens, hidden, dtype=dtype), torch.Generator().manual_seed(tokens)
        gate_up = randn(num, 2 * inner, hidden, dtype=dtype, scale=hidden**-0.5)
        down = randn(num, hidden, inner, dtype=dtype, scale=inner**-0.5)
        ids = torch.rand(tokens, num, generator=seed).argsort(-1)[:, :k].to(torch.int32)
        weights = torch.rand(tokens, k, generator=seed).softmax(-1)
        for what, chosen in (("", ids), (", one for all", ids * 0), (", some on another rank", ids * 2 - 2)):
            yield f"{tokens} tokens, {k} of {num}{what}", (x, gate_up, down, weights, chosen, "silu")
        yield f"{tokens} tokens, {k} of {num}, all on another rank", (x, gate_up, down, weights, ids * 0 - 1, "silu")
        for kind in ("gelu", with_limit("silu", 0.5)):
            yield f"{tokens} tokens, {k} of {num}, {kind}", (x, gate_up, down, weights, ids, kind)


def ungated_experts(dtype: torch.dtype) -> Iterator[Case]:
    for what, (x, gate_up, down, weights, ids, _) in experts(dtype):
        yield what, (x, gate_up[:, gate_up.shape[1] // 2 :].contiguous(), down, weights, ids, "relu2")


def biased_experts(dtype: torch.dtype) -> Iterator[Case]:
    """Some of the gate's numbers are past the limit."""
    for what, (x, gate_up, down, weights, ids, kind) in experts(dtype):
        if kind == "silu":
            biases = randn(*gate_up.shape[:2], dtype=dtype), randn(*down.shape[:2], dtype=dtype)
            yield what, (x, (Matrix(gate_up), Matrix(down)), biases, weights, ids, (1.702, 0.9))


def place_tokens(dtype: torch.dtype) -> Iterator[Case]:
    """Yields the same arguments for any dtype: a step's tokens are int32."""
    sampled = torch.tensor([7, -1, 90, 3], dtype=torch.int32)  # the second could not be drawn
    for what, rows in (
        ("all known", [-1, -1, -1]),
        ("all sampled", [3, 2, 1, 0]),
        ("some, one twice", [-1, 2, -1, 0, 2, 1]),
        ("one", [1]),
        ("more tokens than were sampled", [*range(4), *[-1] * 60]),
    ):
        for first in (sampled, sampled[:1]):
            held = torch.tensor([min(row, len(first) - 1) for row in rows], dtype=torch.int32)
            token_ids = torch.where(held < 0, torch.arange(len(rows), dtype=torch.int32) + 100, -1)
            yield f"{what}, of {len(first)}", (token_ids, first, held)


def gather_pages(dtype: torch.dtype) -> Iterator[Case]:
    """Yields the same arguments for any dtype: pages are bytes."""
    for width, pages in ((1, [3]), (6, [0, 5, 2]), (34, [4, 1, 4])):
        held = torch.arange(6 * width, dtype=torch.int32).reshape(6, 1, width) * 40503
        yield f"{len(pages)} of 6, {width} numbers each", (held, torch.tensor(pages, dtype=torch.int32))


def scatter_pages(dtype: torch.dtype) -> Iterator[Case]:
    """Yields arguments that write the pages of gather_pages, with other content, into other pages."""
    for what, (held, pages) in gather_pages(dtype):
        others = torch.arange(len(pages), dtype=torch.int32) + 1
        yield what, (held, others, held[pages.long()].reshape(len(pages), -1) - 1)


def xielu(dtype: torch.dtype) -> Iterator[Case]:
    for rows, width in ((1, 2), (3, 74), (65, 130)):
        learned = randn(2, dtype=torch.float32)
        yield f"{rows}x{width}", (randn(rows, width, dtype=dtype, scale=4.0), learned)
    yield "a learned number that softplus leaves", (randn(2, 74, dtype=dtype, scale=8.0), torch.tensor([25.0, -9.0]))


CASES: dict[str, Cases] = {
    **ATTENTION_OPS,
    **COMPRESSED,
    **PRODUCTS,
    **STATES,
    **STATE_HELPERS,
    **EXPERT_PLACEMENT,
    **LORA,
    **STREAMS,
    "activate": activations,
    "add": add,
    "add_row": add_row,
    "add_rms_norm": add_rms_norm,
    "beside": beside,
    "biased_experts": biased_experts,
    "by_heads": by_heads,
    "embedding": embedding,
    "experts": experts,
    "lora_experts": lambda dtype: lora_experts(experts, dtype),
    "gated": gates,
    "gather_pages": gather_pages,
    "grouped_linear": grouped_linear,
    "layer_norm": layer_norm,
    "linear": linear,
    "norm_rotary": norm_rotary,
    "pair_rotary": rotary,
    "place_rows": place_rows,
    "choose_rows": choose_rows,
    "place_tokens": place_tokens,
    "rms_norm": rms_norm,
    "rotary": rotary,
    "route": route,
    "route_grouped": route_grouped,
    "route_limited": route_limited,
    "route_sparse": route_sparse,
    "scale": scale,
    "scale_by_length": scale_by_length,
    "scale_heads": scale_heads,
    "scatter_pages": scatter_pages,
    "softcap": softcap,
    "take_rows": take_rows,
    "ungated_experts": ungated_experts,
    "xielu": xielu,
}
