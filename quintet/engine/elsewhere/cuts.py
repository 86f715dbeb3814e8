"""Which bytes of whose rows a process needs, where two engines share one model out differently.

A page of a layer is [planes, heads, tokens, numbers], and a rank has some of its heads: what one head has in one plane
lies in one piece. A process's row has its ranks' tensors one behind the other, as Copies lays them.
"""

import functools
import itertools
from collections.abc import Sequence
from typing import NamedTuple

from quintet.engine.elsewhere.wire import Part
from quintet.layers.build import split_heads
from quintet.ops.pages import WORD

ALIGNED = 16  # words: a tensor begins at 64 bytes of a row, where every number is aligned that caches are made of
Piece = tuple[int, int, int]  # tensor, plane, head


class Kept(NamedTuple):
    """One tensor of a page, with the heads of all ranks."""

    planes: int
    heads: int
    nbytes: int  # of one head in one plane


Grid = tuple[Kept, ...]


class Cut(NamedTuple):
    """What of a giver's row is wanted, in the order of its bytes, and where that goes in the taker's."""

    words: int  # of the giver's row
    wanted: tuple[tuple[int, int], ...]  # (first byte, bytes)
    places: tuple[tuple[int, int, int], ...]  # (first byte in the taker's row, in what is wanted, bytes)

    @property
    def nbytes(self) -> int:
        """Of what is wanted."""
        return sum(count for _, count in self.wanted)


class Share(NamedTuple):
    """One giver, to one taker."""

    giver: int  # which of its engine's processes of this stage
    cut: Cut | None  # None: its row is as the taker's
    readers: int  # processes of the taker's engine that say when they have read
    reader: int  # which of these this one is


def heads_of(heads: int, rank: int, size: int) -> range:
    """Those that a rank has, of so many: some, or one that others have as well."""
    return range(*split_heads(heads * size, heads, size)[1].ranges[rank])


@functools.lru_cache(64)
def lie(grid: Grid, part: Part) -> tuple[dict[Piece, tuple[int, ...]], int]:
    """Where each piece that a process has lies in its row, in bytes, as often as it is there; and the row's words."""
    found: dict[Piece, list[int]] = {}
    start, line = 0, WORD * ALIGNED
    for rank in range(part.first, part.first + part.count):
        for tensor, kept in enumerate(grid):
            heads = heads_of(kept.heads, rank, part.size)
            for at, (plane, head) in enumerate(itertools.product(range(kept.planes), heads)):
                found.setdefault((tensor, plane, head), []).append(start + at * kept.nbytes)
            start += -(-kept.planes * len(heads) * kept.nbytes // line) * line
    return {piece: tuple(places) for piece, places in found.items()}, start // WORD


@functools.lru_cache(64)
def shares(grid: Grid, givers: tuple[Part, ...], takers: tuple[Part, ...], taker: int) -> list[Share]:
    """Whom one of the takers asks for what. Where several givers have a head, takers take turns with them; one that
    nobody needs is told by one taker that it may forget."""
    if givers == takers:
        return [Share(taker, None, 1, 0)]
    kinds = {kept.heads for kept in grid}
    asked = [{heads: _asked(heads, givers, part, at) for heads in kinds} for at, part in enumerate(takers)]
    needed = [{giver for of_kind in each.values() for giver in of_kind.values()} for each in asked]
    pieces: dict[int, list[Piece]] = {}
    for piece in lie(grid, takers[taker])[0]:
        tensor, _, head = piece
        pieces.setdefault(asked[taker][grid[tensor].heads][head], []).append(piece)
    found = []
    for giver, part in enumerate(givers):
        readers = [at for at, each in enumerate(needed) if giver in each] or [giver % len(takers)]
        if taker in readers:
            cut = _cut(grid, part, takers[taker], pieces.get(giver, []))
            found.append(Share(giver, cut, len(readers), readers.index(taker)))
    return found


def _asked(heads: int, givers: Sequence[Part], taker: Part, at: int) -> dict[int, int]:
    """Which giver one taker asks for each of its heads, of so many in all."""
    having: dict[int, list[int]] = {}
    for giver, part in enumerate(givers):
        for head in _held(heads, part):
            having.setdefault(head, []).append(giver)
    return {head: having[head][at % len(having[head])] for head in _held(heads, taker)}


def _held(heads: int, part: Part) -> list[int]:
    """By a process's ranks."""
    ranks = range(part.first, part.first + part.count)
    return sorted({head for rank in ranks for head in heads_of(heads, rank, part.size)})


def _cut(grid: Grid, giver: Part, taker: Part, pieces: Sequence[Piece]) -> Cut:
    (there, words), (here, _) = lie(grid, giver), lie(grid, taker)
    wanted, places, come = list[tuple[int, int]](), list[tuple[int, int, int]](), 0
    for start, piece in sorted((there[piece][0], piece) for piece in pieces):
        nbytes = grid[piece[0]].nbytes
        if wanted and sum(wanted[-1]) == start:
            wanted[-1] = (wanted[-1][0], wanted[-1][1] + nbytes)
        else:
            wanted.append((start, nbytes))
        places += [(place, come, nbytes) for place in here[piece]]
        come += nbytes
    return Cut(words, tuple(wanted), tuple(_joined(places)))


def _joined(places: Sequence[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """The same, where neighbours go as one."""
    found: list[tuple[int, int, int]] = []
    for place, come, nbytes in places:
        if found and found[-1][0] + found[-1][2] == place and found[-1][1] + found[-1][2] == come:
            found[-1] = (*found[-1][:2], found[-1][2] + nbytes)
        else:
            found.append((place, come, nbytes))
    return found
