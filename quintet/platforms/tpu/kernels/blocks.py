"""The work list of a step's attention: which tokens are attended together, and which pages they are written to.

Planned on the host, in NumPy, for the cost of a few small array operations. Its sizes follow from the batch's numbers
of tokens T and requests R alone, so that a variant is compiled once.

Tokens lie in blocks of block_tokens(T, R), cut wherever the count says, so a block may hold tokens of several requests.
A *piece* is what one request has in one block: attention runs once per piece, over that request's context. A *run* is a
stretch of tokens that lands in one page: the cache is updated once per run. Padded tokens are in no piece and no run.
Page 0 holds nothing: tokens that go there are in no run.
"""

from typing import Any, NamedTuple

import numpy as np

from quintet.interface.types import HostBatch, HostGroup, IntArray

LEAST_BLOCK, LARGEST_BLOCK = 8, 64  # tokens; 8 rows fill a register of the TPU, 64 keep its memory free for context


class AttentionWork(NamedTuple):
    """The two arrays that are a group's plan. Unused columns are at the end."""

    # [6, W] int32: BLOCK, OWNER, FROM, TO, SHIFT, KEPT; FROM == TO in the unused, which repeat the last block
    pieces: Any
    runs: Any  # [4, U] int32: PAGE, LEAD, FROM, TO; FROM == TO in the unused, which are on page 0


BLOCK = 0  # which block of tokens
OWNER = 1  # the request's row
FROM, TO = 2, 3  # the part of the block (of the page, in a run) that the piece (the run) takes, in tokens
SHIFT = 4  # position in the request that the block's first token would have if it were the request's
KEPT = 5  # positions of the request that are there once the step has run: what is seen where attention is not causal
PAGE = 0
LEAD = 1  # the token that would lie at the page's start; may be negative


def block_tokens(tokens: int, requests: int) -> int:
    """Tokens per block of query, a power of two: few where all may decode, more where a prompt must be in the step."""
    size = LEAST_BLOCK
    while size < LARGEST_BLOCK and size * requests < LEAST_BLOCK * tokens:
        size *= 2
    return size


def num_pieces(tokens: int, requests: int) -> int:
    """W: every request adds at most one piece to those that full blocks make."""
    return min(tokens, requests + tokens // block_tokens(tokens, requests))


def num_runs(tokens: int, requests: int, page_size: int) -> int:
    """U: a request's tokens fill whole pages, and touch one more at either end."""
    return min(tokens, 2 * requests + tokens // page_size)


def plan_work(batch: HostBatch, group: HostGroup, page_size: int) -> AttentionWork:
    """Returns one group's work list. A request's tokens must be consecutive in position, and so in a page's slots."""
    tokens, requests = len(batch.positions), len(group.seq_lens)
    used = _pieces(batch, group, block_tokens(tokens, requests))
    pieces = _fill(used, num_pieces(tokens, requests))
    if used.size:
        pieces[[BLOCK, OWNER], used.shape[1] :] = used[[BLOCK, OWNER], -1:]  # so that nothing is fetched for them
    runs = _runs(group.slot_mapping[: batch.query_start_loc[-1]], page_size)
    return AttentionWork(pieces, _fill(runs, num_runs(tokens, requests, page_size)))


def _pieces(batch: HostBatch, group: HostGroup, size: int) -> IntArray:
    rows = np.flatnonzero(batch.query_start_loc[1:] > batch.query_start_loc[:-1])
    starts, ends = batch.query_start_loc[rows], batch.query_start_loc[rows + 1]
    first = starts // size
    counts = (ends - 1) // size - first + 1
    each = np.repeat(np.arange(len(rows)), counts)
    block = np.arange(len(each)) - (np.cumsum(counts) - counts - first)[each]
    base = block * size
    shift = (batch.positions[starts] - starts)[each] + base
    begin, end = np.maximum(starts[each] - base, 0), np.minimum(ends[each] - base, size)
    return np.stack([block, rows[each], begin, end, shift, group.seq_lens[rows][each]]).astype(np.int32)


def _runs(slots: IntArray, page_size: int) -> IntArray:
    pages = slots // page_size
    offsets = slots - pages * page_size
    breaks = np.empty(len(slots) + 1, bool)
    breaks[[0, -1]] = len(slots) > 0
    breaks[1:-1] = (offsets[1:] == 0) | (slots[1:] != slots[:-1] + 1)
    edges = np.flatnonzero(breaks)
    first = edges[:-1]
    begin = offsets[first]
    runs = np.stack([pages[first], first - begin, begin, begin + np.diff(edges)]).astype(np.int32)
    return runs[:, runs[PAGE] > 0]


def _fill(columns: IntArray, size: int) -> IntArray:
    assert columns.shape[1] <= size, f"{columns.shape[1]} pieces or runs in a batch that can have {size}"
    filled = np.zeros((columns.shape[0], size), np.int32)
    filled[:, : columns.shape[1]] = columns
    return filled
