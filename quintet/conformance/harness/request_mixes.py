"""Requests through an attention session: in chunks, in mixes, each result held against softmax written out."""

import itertools

import torch

from quintet.conformance.check import require
from quintet.conformance.close import dtype_name, require_close
from quintet.conformance.harness.attention import AttentionSession, first_served, reference_attention
from quintet.conformance.harness.batches import AttentionRequest, spec
from quintet.conformance.harness.subject import Subject
from quintet.interface.types import AttentionSpec

Shape = tuple[int, int, int, int]  # heads, KV heads, head_dim, tokens of a page
INSTEAD = (64, 128)  # head_dims where a shape's own is not served
SIZES = (16, 32, 64, 128)  # pages' likewise
LARGE = 1e-4  # of the results' size: what scores of 100 and more, in float32, have lost before exp() takes them


def plain(subject: Subject, dtype: torch.dtype, shape: Shape) -> AttentionSpec:
    """A plain layer of this shape, or with another page size or head_dim if the platform refuses it."""
    heads, kv_heads, dim, size = shape
    others = itertools.chain([(dim, size)], itertools.product((dim, *INSTEAD), SIZES))
    return first_served(subject, (spec(heads, kv_heads, d, dtype=dtype, page_size=s) for d, s in others))


def attend(session: AttentionSession, requests: dict[int, AttentionRequest], what: str) -> None:
    """Fills the cache in chunks, then runs the mix; every result is looked at."""
    wants = {row: reference_attention(session, row) for row in requests}
    for tokens in (7, 33):  # chunks that end in the middle of pages
        _run(session, {row: min(r.cached, tokens) for row, r in requests.items()}, wants, f"{what}, first chunks")
    _run(session, {row: r.cached for row, r in requests.items()}, wants, f"{what}, what is cached")
    _run(session, {row: r.cached + r.new for row, r in requests.items()}, wants, what)


def _run(session: AttentionSession, until: dict[int, int], wants: dict[int, torch.Tensor], what: str) -> None:
    """Steps until each request has so many tokens in the cache."""
    most, requests = session.max_step
    while chunks := _chunks(session, until, most, requests):
        firsts = {row: session.cached(row) for row in chunks}
        for row, got in session.run(chunks).items():
            first = firsts[row]
            where = f"{describe_spec(session.spec)}, {what}, request {row} from token {first} on"
            require(got.dtype == session.spec.dtype, f"{where}: the results are {got.dtype}")
            require_close(
                where, got, wants[row][first : first + len(got)].float(), LARGE if session.spec.scale > 1 else 0
            )


def _chunks(session: AttentionSession, until: dict[int, int], most: int, requests: int) -> dict[int, int]:
    """The next step: so many tokens of so many requests at most."""
    chunks: dict[int, int] = {}
    for row, length in until.items():
        count = min(length - session.cached(row), most - sum(chunks.values()))
        if count > 0 and len(chunks) < requests:
            chunks[row] = count
    return chunks


def describe_spec(of: AttentionSpec) -> str:
    return f"{of.heads}/{of.kv_heads} heads of {of.head_dim} in {dtype_name(of.dtype)}, pages of {of.page_size}"
