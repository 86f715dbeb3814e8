"""Attention over the platform's own cache: mixes of prompts, chunks and decoding, and what it refuses."""

import itertools
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from quintet.conformance.cases.attention import MIXES, SPECS
from quintet.conformance.check import NotSupported, Trial, check, require
from quintet.conformance.close import dtype_name, require_close
from quintet.conformance.formats import FLOATS
from quintet.conformance.harness.attention import (
    AttentionInputs,
    AttentionSession,
    first_served,
    make_mixer,
    reference_attention,
)
from quintet.conformance.harness.batches import AttentionRequest, spec
from quintet.conformance.harness.request_mixes import INSTEAD, SIZES, Shape, attend, describe_spec, plain
from quintet.conformance.harness.subject import Subject
from quintet.interface.types import INT4, AttentionSpec, cache_dtype_name

Settings = dict[str, Any]

SHAPES: tuple[Shape, ...] = ((6, 3, 16, 16), (5, 1, 64, 8), (2, 2, 128, 32))
KINDS: dict[str, Settings] = {
    **SPECS,
    "alibi": {"alibi": True},
    "chunk": {"chunk": 37},
    "chunk of whole pages": {"chunk": 64},
    "sinks, chunk": {"sinks": True, "chunk": 5},
    "alibi, soft-cap, window": {"alibi": True, "softcap": 5.0, "window": 40},
}
FEW_KINDS = (
    "plain",
    "window",
    "chunk",
    "soft-cap, window",
    "sinks, window",
    "alibi, soft-cap, window",
)  # each compiles
CACHED = (torch.int8, INT4, *FLOATS)
PAGE_SIZES = (8, 16, 32, 64, 128)
HEAD_DIMS = (16, 64, 80, 96, 128, 256)
BEHIND: dict[str, Settings] = {  # windows that reach over some pages, within one, and over none
    "window": {"window": 20},
    "window of one": {"window": 1},
    "soft-cap, window": {"softcap": 20.0, "window": 33},
    "sinks, window": {"sinks": True, "window": 5},
    "alibi, window": {"alibi": True, "window": 40},
    "chunk": {"chunk": 21},
    "chunk of one page": {"chunk": 16},
}
ALONE = (None, 1, 16, 17, 64)  # windows of a request that decodes by itself: within a page, over blocks
FEW_ALONE = (None, 16, 64)
BLOCK = 64  # tokens: what a kernel may take at once; the first and last slots pass its border, and those of its pages
UNKEPT: dict[str, Settings] = {
    "both ways": {"causal": False},
    "both ways, window": {"causal": False, "window": 7},
    "both ways, alibi": {"causal": False, "alibi": True},
    "causal": {},
    "chunk": {"chunk": 12},
    "soft-cap": {"softcap": 3.0},
}
WHOLE = (9, 1, 30, 16)  # tokens of requests that are whole in a step
TEXTS = (300, 1, 129, 64)  # likewise, over the borders of what a kernel takes at once, where no size is fixed
LATENT = ((4, 1, 96, 64), (4, 1, 128, 64), (8, 1, 576, 512))  # heads, KV heads, head_dim, what V is of K (MLA)
CROWD = 40  # requests of a step
LONG, CHECKED = 2200, 300  # tokens of a long request; how many of its first and last ones are looked at


@check("attention.specification")
def mixes(subject: Subject) -> Iterator[Trial]:
    """Every kind of layer in every type, and in every shape, but not all three of all."""
    few = _is_compiled(subject)
    for i, dtype in enumerate(subject.facts.dtypes):
        for j, kind in enumerate(FEW_KINDS if few else KINDS):
            if few and i and kind != "plain":
                continue
            shapes = SHAPES[(i + j) % 3 :][:1] if few else _shapes(j, i, len(subject.facts.dtypes))
            feature = f"dtype/{dtype_name(dtype)}" if kind == "plain" else _feature(KINDS[kind])
            yield Trial(
                f"{kind} in {dtype_name(dtype)}", partial(_mixes, subject, KINDS[kind], dtype, shapes), (feature,)
            )


@check("attention.specification")
def beyond_a_tile(subject: Subject) -> Iterator[Trial]:
    """Scores with exponentials that overflow; more requests in a step than a kernel may take at once."""
    for dtype in subject.facts.dtypes[: 1 if _is_compiled(subject) else None]:
        yield Trial(f"large scores in {dtype_name(dtype)}", partial(_mixes, subject, {"scale": 4.0}, dtype, SHAPES[:1]))
    yield Trial(f"{CROWD} requests in a step", partial(_crowd, subject))


@check("attention.specification")
def small_caches(subject: Subject) -> Iterator[Trial]:
    """A cache in each type of 8 or 4 bits that is not refused."""
    few = _is_compiled(subject)
    dtypes = subject.facts.dtypes[: 1 if few else None]
    for i, cached in enumerate(CACHED):
        for j, dtype in enumerate(dtypes):
            call = partial(_mixes, subject, {"kv_dtype": cached}, dtype, SHAPES[(i + j) % 2 :][:1])
            yield Trial(
                f"a cache of {cache_dtype_name(cached)} in {dtype_name(dtype)}",
                call,
                (f"kv/{cache_dtype_name(cached)}",),
            )
        for j, name in enumerate(() if few else ("sinks", "alibi")):
            dtype = dtypes[(i + j) % len(dtypes)]
            call = partial(_mixes, subject, {"kv_dtype": cached, name: True}, dtype, SHAPES[:1])
            yield Trial(f"a cache of {cache_dtype_name(cached)}, {name} in {dtype_name(dtype)}", call)


@check("attention.specification")
def page_sizes(subject: Subject) -> Iterator[Trial]:
    """Each alone, since a platform may serve only some."""
    for size in PAGE_SIZES[1::2] if _is_compiled(subject) else PAGE_SIZES:
        call = partial(_one, subject, [(8, 1, dim, size) for dim in INSTEAD])
        yield Trial(f"pages of {size} tokens", call, (f"page-size/{size}",))


@check("attention.specification")
def head_dims(subject: Subject) -> Iterator[Trial]:
    for dim in HEAD_DIMS[2::2] if _is_compiled(subject) else HEAD_DIMS:
        call = partial(_one, subject, [(4, 2, dim, size) for size in SIZES])
        yield Trial(f"heads of {dim} numbers", call, (f"attention/head-dim-{dim}",))


@check("attention.specification")
def long_context(subject: Subject) -> Iterator[Trial]:
    yield Trial(f"a request of {LONG} tokens", partial(_long, subject), ("attention/long-context",))


@check("attention.specification")
def decoding_alone(subject: Subject) -> Iterator[Trial]:
    """One request token by token: its end, and the beginning of its window, pass every place of a page and a block."""
    dtypes = subject.facts.dtypes
    for i, window in enumerate(FEW_ALONE if _is_compiled(subject) else ALONE):
        dtype = dtypes[i % len(dtypes)]
        what = "all positions" if window is None else f"a window of {window}"
        yield Trial(f"one token at a time, {what} in {dtype_name(dtype)}", partial(_alone, subject, window, dtype))


@check("attention.stale")
def stale_pages(subject: Subject) -> Iterator[Trial]:
    """Numbers that are none, in pages that are another request's now, and in a neighbour's."""
    dtypes = subject.facts.dtypes
    if _is_compiled(subject):
        yield Trial(f"plain in {dtype_name(dtypes[0])}", partial(_stale, subject, {}, dtypes[0]))
        return
    caches = {f"a cache of {cache_dtype_name(cached)}": {"kv_dtype": cached} for cached in CACHED}
    for kind, settings, dtype in _in_turn({**KINDS, **caches}, dtypes):
        yield Trial(f"{kind} in {dtype_name(dtype)}", partial(_stale, subject, settings, dtype))


@check("attention.window")
def behind_windows(subject: Subject) -> Iterator[Trial]:
    """Step by step over the borders of pages, while another request takes what is given back."""
    dtypes, few = subject.facts.dtypes, _is_compiled(subject)
    for kind, settings, dtype in list(_in_turn(BEHIND, dtypes))[: 1 if few else None]:
        yield Trial(f"{kind} in {dtype_name(dtype)}", partial(_behind, subject, settings, dtype), (_feature(settings),))
    for cached in CACHED:
        settings = {**BEHIND["window"], "kv_dtype": cached}
        yield Trial(f"window, a cache of {cache_dtype_name(cached)}", partial(_behind, subject, settings, dtypes[0]))


@check("attention.plain")
def nothing_kept(subject: Subject) -> Iterator[Trial]:
    """Attention of requests that are whole in the step: an encoder's layer, or a prompt's."""
    dtypes, few = subject.facts.dtypes, _is_compiled(subject)
    for kind, dtype in itertools.product(list(UNKEPT)[: 2 if few else None], dtypes[:1] if few else dtypes):
        settings = {**UNKEPT[kind], "source": "none"}
        for what, lengths in (("", WHOLE), (", long texts", TEXTS))[: 1 if few else None]:
            call = partial(_wholly, subject, settings, dtype, lengths)
            yield Trial(f"{kind}{what} in {dtype_name(dtype)}", call, ("attention/keeps-nothing",))
    yield Trial("both ways, over pages", partial(_wholly, subject, UNKEPT["both ways"], dtypes[0]))


@check("attention.shared")
def values_in_keys(subject: Subject) -> Iterator[Trial]:
    for dtype in subject.facts.dtypes[: 1 if _is_compiled(subject) else None]:
        yield Trial(f"V in K, in {dtype_name(dtype)}", partial(_latent, subject, dtype), ("attention/shared-values",))


@check("attention.refusal")
def served_or_refused(subject: Subject) -> Iterator[Trial]:
    """A layer is built, or refused with reasons; what is built is tried by the other checks."""
    dtypes = [torch.float32, torch.bfloat16, torch.float16]
    for dtype, dim in itertools.product(dtypes, (8, *HEAD_DIMS)):
        yield Trial(f"heads of {dim} numbers in {dtype_name(dtype)}", partial(_refused_well, subject, dim, dtype))


def _is_compiled(subject: Subject) -> bool:
    """True if each layer may cost some seconds."""
    return subject.facts.ops_only or subject.facts.static_shapes


def _shapes(kind: int, dtype: int, dtypes: int) -> list[Shape]:
    """For one of so many kinds in one of so many types: over all types, a kind meets every shape."""
    turns = range(dtype, max(dtypes, len(SHAPES)), dtypes)
    return [SHAPES[place] for place in sorted({(kind + turn) % len(SHAPES) for turn in turns})]


def _in_turn(
    kinds: Mapping[str, Settings], dtypes: Sequence[torch.dtype]
) -> Iterator[tuple[str, Settings, torch.dtype]]:
    """Every kind in one type, and every type with the first kind: what masks, and what rounds, do so apart."""
    for i, (kind, settings) in enumerate(kinds.items()):
        for dtype in dtypes if i == 0 else (dtypes[i % len(dtypes)],):
            yield kind, settings, dtype


def _feature(settings: Settings) -> str:
    """The rarest thing that a layer has: for want of it the layer is refused."""
    return next(f"attention/{name}" for name in ("alibi", "sinks", "softcap", "chunk", "window") if settings.get(name))


def _mixes(subject: Subject, settings: Settings, dtype: torch.dtype, shapes: Sequence[Shape]) -> None:
    """All mixes, by each of the shapes, or what is served in its place."""
    for shape in shapes:
        of = plain(subject, dtype, shape)
        of = spec(of.heads, of.kv_heads, of.head_dim, dtype=dtype, page_size=of.page_size, **settings)
        requests = [request for mix in MIXES.values() for request in mix]
        session = AttentionSession(subject, of, [r.cached + r.new for r in requests])
        first = 0
        for name, mix in MIXES.items():
            attend(session, dict(enumerate(mix, first)), name)
            first += len(mix)


def _crowd(subject: Subject) -> None:
    """Runs requests of some tokens each, in two steps or more, and then one token each."""
    of = plain(subject, subject.facts.dtypes[0], SHAPES[0])
    requests = {row: AttentionRequest(3 + row % 9, 1) for row in range(CROWD)}
    attend(
        AttentionSession(subject, of, [r.cached + 1 for r in requests.values()], requests=CROWD), requests, "a crowd"
    )


def _one(subject: Subject, shapes: Sequence[Shape]) -> None:
    """The ragged mix, by the first shape that is served."""
    dtype, mix = subject.facts.dtypes[0], MIXES["ragged mix"]
    of = first_served(subject, (spec(*shape[:3], dtype=dtype, page_size=shape[3]) for shape in shapes))
    attend(AttentionSession(subject, of, [r.cached + r.new for r in mix]), dict(enumerate(mix)), "ragged mix")


def _long(subject: Subject) -> None:
    """A long request beside a short one: the first of its tokens, and the last."""
    of = plain(subject, subject.facts.dtypes[0], (2, 1, 64, 16))
    session = AttentionSession(subject, of, [LONG, 20])
    looked = {0: range(CHECKED), LONG - CHECKED: range(LONG - CHECKED, LONG)}
    wants = {first: reference_attention(session, 0, each) for first, each in looked.items()}
    got = torch.cat([session.run(chunks)[0] for chunks in _long_chunks(session.max_step[0])])
    for first, want in wants.items():
        what = f"{describe_spec(of)}, a request of {LONG} tokens from token {first} on"
        require_close(what, got[first : first + CHECKED], want.float())


def _long_chunks(most: int) -> Iterator[dict[int, int]]:
    """As many tokens as fit beside one of the short request; the last token alone, as in decoding."""
    left, short_left = LONG - 1, 20
    while left:
        count = min(left, most - 1)
        yield {0: count, 1: 1} if short_left else {0: count}
        left, short_left = left - count, max(0, short_left - 1)
    yield {0: 1}


def _alone(subject: Subject, window: int | None, dtype: torch.dtype) -> None:
    """Until the first slot that is seen, or the last one, has passed a block and a page of the next."""
    of = plain(subject, dtype, SHAPES[0])
    of = spec(of.heads, of.kv_heads, of.head_dim, dtype=dtype, page_size=of.page_size, window=window)
    beginning = 1 if window is None else max(1, window - 2)  # as many tokens come at once
    session = AttentionSession(subject, of, [beginning + 2 + BLOCK + of.page_size])
    wants, most = reference_attention(session, 0), session.max_step[0]
    while (first := session.cached(0)) < session.lengths[0]:
        got = session.run({0: min(most, beginning - first) if first < beginning else 1})[0]
        what = f"{describe_spec(of)}, a window of {window}, one request alone, from token {first} on"
        require_close(what, got, wants[first : first + len(got)].float())
        session.trim(0)


def _stale(subject: Subject, settings: Settings, dtype: torch.dtype) -> None:
    """Request 0 leaves its pages to request 1, and request 2 stands beside it; neither holds a number."""
    of = plain(subject, dtype, SHAPES[0])
    of = spec(of.heads, of.kv_heads, of.head_dim, dtype=dtype, page_size=of.page_size, **settings)
    lengths = [60, 41, 30]
    numbers = AttentionInputs.random(of, sum(lengths))
    for row, value in ((0, torch.nan), (2, torch.inf)):
        own = slice(1 + sum(lengths[:row]), 1 + sum(lengths[: row + 1]))
        for each in (numbers.q, numbers.k, numbers.v):
            each[own] = value
    session = AttentionSession(subject, of, lengths, numbers)
    session.run({2: 20})
    session.run({0: 44})
    session.run({0: 16})
    session.forget(0)
    wants = reference_attention(session, 1)
    for chunks in ({1: 18, 2: 9}, {1: 22}, {2: 1, 1: 1}):
        first = session.cached(1)
        got = session.run(chunks)[1]
        what = f"{describe_spec(of)}, in pages that held NaN, beside infinities, from token {first} on"
        require_close(what, got, wants[first : first + len(got)].float())


def _behind(subject: Subject, settings: Settings, dtype: torch.dtype) -> None:
    """Request 0 is looked at. No number of request 1 is one, and it gets the pages that request 0 gives back; page 0
    holds none either."""
    of = plain(subject, dtype, SHAPES[0])
    size = of.page_size
    of = spec(of.heads, of.kv_heads, of.head_dim, dtype=dtype, page_size=size, **settings)
    reach = of.window or of.chunk
    lengths = [3 * size + (reach or 0) + 3, 2 * size]
    numbers = AttentionInputs.random(of, sum(lengths))
    for each in (numbers.q, numbers.k, numbers.v):
        each[1 + lengths[0] :] = torch.nan
    session = AttentionSession(subject, of, lengths, numbers)
    session.fill_null_page_with_nan()
    wants, most = reference_attention(session, 0), session.max_step[0] - 1
    while (first := session.cached(0)) < lengths[0]:
        chunk = 1 if first > size // 2 else size // 2  # chunks that end within a page, then token by token
        beside = min(1, lengths[1] - session.cached(1))
        got = session.run({0: min(chunk, most, lengths[0] - first), **({1: 1} if beside else {})})[0]
        behind = f"a {'window' if of.window else 'chunk'} of {reach}, page 0 holds NaN"
        what = f"{describe_spec(of)}, {behind}, from token {first} on"
        require_close(what, got, wants[first : first + len(got)].float())
        session.trim(0)


def _wholly(subject: Subject, settings: Settings, dtype: torch.dtype, lengths: Sequence[int] = WHOLE) -> None:
    """Requests alone and beside others. What stands in padding is no number."""
    of = spec(6, 3, plain(subject, dtype, SHAPES[0]).head_dim, dtype=dtype, **settings)
    of = first_served(subject, (replace(of, page_size=size) for size in SIZES))
    session = AttentionSession(subject, of, lengths)
    require(
        of.source != "none" or not session.mixer.layouts, f"a layer that keeps nothing keeps {session.mixer.layouts}"
    )
    for rows in ((0,), (1, 2), (0, 3, 1)):
        for row, got in session.run({row: lengths[row] for row in rows}).items():
            what = f"{describe_spec(of)}, request {row} of {[lengths[each] for each in rows]} tokens"
            require_close(what, got, reference_attention(session, row).float())
            session.forget(row)


def _latent(subject: Subject, dtype: torch.dtype) -> None:
    """The mix of attention.specification, over pages that hold keys alone."""
    of = first_served(
        subject,
        (
            spec(heads, kv_heads, dim, dtype=dtype, page_size=size, shared=shared)
            for (heads, kv_heads, dim, shared), size in itertools.product(LATENT, SIZES)
        ),
    )
    mix = MIXES["ragged mix"]
    attend(AttentionSession(subject, of, [r.cached + r.new for r in mix]), dict(enumerate(mix)), "ragged mix")


def _refused_well(subject: Subject, dim: int, dtype: torch.dtype) -> None:
    """Each kind of layer is built, or refused in words; two refused kinds together name the reasons of both."""
    sizes = {"dtype": dtype, "page_size": 16}
    features: dict[str, Settings] = {
        "window": {"window": 9}, "softcap": {"softcap": 3.0}, "sinks": {"sinks": True}, "alibi": {"alibi": True}
    }  # fmt: skip
    features |= {cache_dtype_name(cached): {"kv_dtype": cached} for cached in CACHED}
    bare = _reasons(subject, spec(4, 2, dim, **sizes))
    refused = {}
    for name, settings in features.items():
        reasons = _reasons(subject, spec(4, 2, dim, **sizes, **settings))
        if reasons is not None and bare is None:
            refused[name] = reasons
    for (one, first), (other, second) in itertools.combinations(refused.items(), 2):
        if "kv_dtype" in features[one] and "kv_dtype" in features[other]:
            continue
        both = _reasons(subject, spec(4, 2, dim, **sizes, **features[one], **features[other])) or ""
        missing = [each for each in _device_memory((first, second)) if each not in both]
        require(not missing, f"a layer with {one} and {other} is refused with {both!r}; {missing} is not in it")


def _reasons(subject: Subject, of: AttentionSpec) -> str | None:
    """Why it is refused; None if it is served."""
    try:
        made = make_mixer(subject, of)
    except NotSupported as reasons:
        require(bool(str(reasons).strip()), f"{of} is refused without a reason")
        return str(reasons)
    require(all(layout.nbytes > 0 for layout in made.layouts), f"a page of {of} is of no bytes: {made.layouts}")
    require(len(made.layouts) > 0, f"{of} keeps nothing")
    return None


def _device_memory(messages: Iterable[str]) -> list[str]:
    """Each message without what all begin with."""
    messages = list(messages)
    begin = len(os.path.commonprefix(messages))
    return [message[begin:] for message in messages]
