"""Byte ranges of other processes' rows that a process needs, where two engines shard one model differently.

A page of a layer is [planes, heads, tokens, numbers], and a rank has some of its heads: one head of one plane is
contiguous. A process's row has the tensors of its ranks one behind the other, as Copies arranges them.
"""

import functools
import itertools
from collections.abc import Sequence
from typing import NamedTuple

from quintet.engine.kv_transfer.p2p.protocol import PagePart
from quintet.layers.build import split_heads
from quintet.ops.pages import WORD

ALIGN_WORDS = 16  # words: a tensor starts at a multiple of 64 bytes of a row, which aligns every dtype of a cache
HeadPlane = tuple[int, int, int]  # tensor, plane, head


class SliceSpec(NamedTuple):
    """One tensor of a page, with the heads of all ranks."""

    planes: int
    heads: int
    nbytes: int  # of one head in one plane


PageGrid = tuple[SliceSpec, ...]


class HeadSlice(NamedTuple):
    """Byte ranges of a producer's row that are wanted, in the order of its bytes, and where they go in the consumer's
    row."""

    words: int  # of the producer's row
    source_ranges: tuple[tuple[int, int], ...]  # (first byte, bytes)
    copies: tuple[tuple[int, int, int], ...]  # (first byte in the consumer's row, in the wanted bytes, bytes)

    @property
    def nbytes(self) -> int:
        """Returns the number of wanted bytes."""
        return sum(count for _, count in self.source_ranges)


class ProducerShare(NamedTuple):
    """One producer, as one consumer sees it."""

    producer: int  # its number among its engine's processes of this stage
    head_slice: HeadSlice | None  # None: its row is like the consumer's
    readers: int  # processes of the consumer's engine that report when they have read
    reader: int  # number of this one among them


@functools.lru_cache(4096)
def heads_of(heads: int, rank: int, size: int) -> range:
    """Returns the heads of a rank, of `heads` in all: some, or one that other ranks have as well."""
    return range(*split_heads(heads * size, heads, size)[1].ranges[rank])


@functools.lru_cache(16)
def row_offsets(grid: PageGrid, part: PagePart) -> tuple[dict[HeadPlane, tuple[int, ...]], int]:
    """Returns the byte offsets of each piece in a process's row, one per copy of the piece; and the words of the
    row."""
    found: dict[HeadPlane, list[int]] = {}
    start, line = 0, WORD * ALIGN_WORDS
    for rank in range(part.first, part.first + part.count):
        for tensor, kept in enumerate(grid):
            heads = heads_of(kept.heads, rank, part.size)
            for at, (plane, head) in enumerate(itertools.product(range(kept.planes), heads)):
                found.setdefault((tensor, plane, head), []).append(start + at * kept.nbytes)
            start += -(-kept.planes * len(heads) * kept.nbytes // line) * line
    return {piece: tuple(places) for piece, places in found.items()}, start // WORD


@functools.lru_cache(16)
def producer_shares(
    grid: PageGrid, givers: tuple[PagePart, ...], takers: tuple[PagePart, ...], taker: int
) -> list[ProducerShare]:
    """Returns the producers that one consumer asks, and for which bytes. Where several producers have a head, consumers
    take turns with them; if no consumer needs a producer, one of them reports to it that it may free its pages."""
    if givers == takers:
        return [ProducerShare(taker, None, 1, 0)]
    kinds = {kept.heads for kept in grid}
    asked = [{heads: _producers_of_heads(heads, givers, part, at) for heads in kinds} for at, part in enumerate(takers)]
    needed = [{giver for of_kind in each.values() for giver in of_kind.values()} for each in asked]
    pieces: dict[int, list[HeadPlane]] = {}
    for piece in row_offsets(grid, takers[taker])[0]:
        tensor, _, head = piece
        pieces.setdefault(asked[taker][grid[tensor].heads][head], []).append(piece)
    found = []
    for giver, part in enumerate(givers):
        readers = [at for at, each in enumerate(needed) if giver in each] or [giver % len(takers)]
        if taker in readers:
            cut = _head_slice(grid, part, takers[taker], pieces.get(giver, []))
            found.append(ProducerShare(giver, cut, len(readers), readers.index(taker)))
    return found


def _producers_of_heads(heads: int, givers: Sequence[PagePart], taker: PagePart, at: int) -> dict[int, int]:
    """Returns the producer that one consumer asks for each of its heads, of `heads` in all."""
    having: dict[int, list[int]] = {}
    for giver, part in enumerate(givers):
        for head in _heads_of_part(heads, part):
            having.setdefault(head, []).append(giver)
    return {head: having[head][at % len(having[head])] for head in _heads_of_part(heads, taker)}


def _heads_of_part(heads: int, part: PagePart) -> list[int]:
    """Returns the heads that a process's ranks have."""
    ranks = range(part.first, part.first + part.count)
    return sorted({head for rank in ranks for head in heads_of(heads, rank, part.size)})


def _head_slice(grid: PageGrid, giver: PagePart, taker: PagePart, pieces: Sequence[HeadPlane]) -> HeadSlice:
    (there, words), (here, _) = row_offsets(grid, giver), row_offsets(grid, taker)
    wanted, places, come = list[tuple[int, int]](), list[tuple[int, int, int]](), 0
    for start, piece in sorted((there[piece][0], piece) for piece in pieces):
        nbytes = grid[piece[0]].nbytes
        if wanted and sum(wanted[-1]) == start:
            wanted[-1] = (wanted[-1][0], wanted[-1][1] + nbytes)
        else:
            wanted.append((start, nbytes))
        places += [(place, come, nbytes) for place in here[piece]]
        come += nbytes
    return HeadSlice(words, tuple(wanted), tuple(_merge_ranges(places)))


def _merge_ranges(places: Sequence[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """Returns the same places, with adjacent ones joined."""
    found: list[tuple[int, int, int]] = []
    for place, come, nbytes in places:
        if found and found[-1][0] + found[-1][2] == place and found[-1][1] + found[-1][2] == come:
            found[-1] = (*found[-1][:2], found[-1][2] + nbytes)
        else:
            found.append((place, come, nbytes))
    return found
