"""The edits of logits that requests ask for by their params, as lists of places (row, token) for the ops.

Each class looks at the rows when they change and returns whether any asks for it; only then is it called, once a step.
Where shapes are fixed, a list goes to the device CHUNK at a time, the last of them repeated to fill the shape.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from quintet.engine.request import Request
from quintet.interface.platform import Device
from quintet.interface.types import IntArray
from quintet.ops.registry import Ops
from quintet.structured_output.grammar import MaskFiller, Matcher

CHUNK = 1024  # of one call where shapes are fixed: as many as a batch of usual requests needs
TokenPlaces = tuple[Tensor, ...]  # columns [M] of a list: rows, ids and what else the op takes for each


class LogitEdit(ABC):
    """One kind of edit for a whole batch."""

    def __init__(self, ops: Ops, device: Device, vocab_size: int, static: bool) -> None:
        self.ops, self.device, self.vocab_size, self._static = ops, device, vocab_size, static

    @abstractmethod
    def set_requests(self, requests: Sequence[Request], rows: int) -> bool:
        """Sets the requests of the first of the `rows` of logits; True if any of them asks for this edit."""

    @abstractmethod
    def __call__(self, logits: Tensor, positions: Sequence[int]) -> Tensor:
        """logits [R, V] float32, which it may overwrite -> the edited ones. Each request's row draws the token at its
        position [R]; one that guesses has several rows, and what stands before a position are drafts, too."""

    def upload(self, *columns: np.ndarray[Any, Any]) -> list[TokenPlaces]:
        """A list of M places, given as columns [M], on the device: whole, or in pieces of one fixed size."""
        if not self._static:
            return [self.device.to_device(columns)]
        starts = range(0, len(columns[0]), CHUNK)
        return [self.device.to_device([_chunk_of(column, start) for column in columns]) for start in starts]


class GrammarMask(LogitEdit):
    """structured_outputs: what the output may go on with."""

    def __init__(self, ops: Ops, device: Device, vocab_size: int, static: bool) -> None:
        super().__init__(ops, device, vocab_size, static)
        self._fill_masks = MaskFiller()

    def set_requests(self, requests: Sequence[Request], rows: int) -> bool:
        self._matchers = [(row, r, r.grammar) for row, r in enumerate(requests) if r.grammar is not None]
        self._size = rows, -(-self.vocab_size // 32)
        return bool(self._matchers)

    def fill(self, positions: Sequence[int]) -> IntArray:
        """The bits that keep_tokens takes: of the next token of each row. Host work, while the device computes."""
        bits = np.full(self._size, -1, np.int32)
        choices: list[tuple[Matcher, int]] = []  # those with more than one next token, and their rows
        for row, request, grammar in self._matchers:
            grammar.advance(request)
            if grammar.fill(bits[row], request.token_ids[request.num_known : positions[row]]) is not None:
                choices.append((grammar, row))
        self._fill_masks(choices, bits)
        return bits

    def __call__(self, logits: Tensor, positions: Sequence[int]) -> Tensor:
        return self.ops.keep_tokens(logits, self.device.to_device([self.fill(positions)])[0])


class AllowedTokens(LogitEdit):
    """allowed_token_ids: nothing else can be drawn."""

    def set_requests(self, requests: Sequence[Request], rows: int) -> bool:
        lists = [(row, r.params.allowed_token_ids) for row, r in enumerate(requests) if r.params.allowed_token_ids]
        if lists:
            words = -(-self.vocab_size // 32)
            bits = np.full((rows, words), -1, np.int32)
            for row, ids in lists:
                kept = np.zeros(32 * words, bool)
                kept[ids] = True
                bits[row] = np.packbits(kept, bitorder="little").view(np.int32)
            (self._bits,) = self.device.to_device([bits])
        return bool(lists)

    def __call__(self, logits: Tensor, positions: Sequence[int]) -> Tensor:
        return self.ops.keep_tokens(logits, self._bits)


class TraceReplay(LogitEdit):
    """trace_decode_token_ids: the token at each position of the output is given."""

    def set_requests(self, requests: Sequence[Request], rows: int) -> bool:
        self._rows = [(row, r) for row, r in enumerate(requests) if r.params.trace_decode_token_ids]
        self._size = rows, -(-self.vocab_size // 32)
        return bool(self._rows)

    def __call__(self, logits: Tensor, positions: Sequence[int]) -> Tensor:
        bits = np.full(self._size, -1, np.int32)
        for row, request in self._rows:
            trace = request.params.trace_decode_token_ids or []
            at = positions[row] - request.num_prompt
            if at < len(trace):  # a draft may stand after the last of them
                keep_only(bits[row], trace[at])
        return self.ops.keep_tokens(logits, self.device.to_device([bits])[0])


class BadWords(LogitEdit):
    """bad_words: the last token of a word is banned where the output ends with the tokens before it."""

    def set_requests(self, requests: Sequence[Request], rows: int) -> bool:
        self._rows = [(row, r) for row, r in enumerate(requests) if any(r.core_request.bad_words_ids)]
        return bool(self._rows)

    def __call__(self, logits: Tensor, positions: Sequence[int]) -> Tensor:
        lists = [
            (row, [word[-1] for word in r.core_request.bad_words_ids if _completes_word(r, word, positions[row])])
            for row, r in self._rows
        ]
        if not any(ids for _, ids in lists):
            return logits
        for places in self.upload(*_flatten_places(lists)):
            logits = self.ops.ban_tokens(logits, *places)
        return logits


def keep_only(bits: IntArray, token_id: int) -> None:
    """Sets the bits [V / 32] of one row so that keep_tokens leaves one token."""
    bits[:] = 0
    bits[token_id // 32] = np.uint32(1 << token_id % 32).view(np.int32)


class MinTokens(LogitEdit):
    """min_tokens: no token that would end the request before it has that many."""

    def set_requests(self, requests: Sequence[Request], rows: int) -> bool:
        asked = [(row, r) for row, r in enumerate(requests) if r.params.min_tokens and r.core_request.stop_ids]
        self._rows = [(row, r) for row, r in asked if r.num_known - r.num_prompt < r.params.min_tokens]
        self._short: list[int] | None = None  # the rows that are short of it, of which a list is on the device
        return bool(self._rows)

    def __call__(self, logits: Tensor, positions: Sequence[int]) -> Tensor:
        short = [row for row, r in self._rows if positions[row] - r.num_prompt < r.params.min_tokens]
        if short != self._short:
            self._short, stops = short, {row: sorted(r.core_request.stop_ids) for row, r in self._rows}
            self._places = self.upload(*_flatten_places((row, stops[row]) for row in short)) if short else []
        for places in self._places:
            logits = self.ops.ban_tokens(logits, *places)
        return logits


class LogitBias(LogitEdit):
    """logit_bias: added to the logits of some tokens."""

    def set_requests(self, requests: Sequence[Request], rows: int) -> bool:
        biases = [(row, r.params.logit_bias) for row, r in enumerate(requests) if r.params.logit_bias]
        if biases:
            values = np.fromiter((value for _, bias in biases for value in bias.values()), np.float32)
            self._places = self.upload(*_flatten_places((row, list(bias)) for row, bias in biases), values)
        return bool(biases)

    def __call__(self, logits: Tensor, positions: Sequence[int]) -> Tensor:
        for places in self._places:
            logits = self.ops.bias_tokens(logits, *places)
        return logits


class Penalties(LogitEdit):
    """Repetition, frequency and presence penalties. The tokens of each request are counted as it grows."""

    def __init__(self, ops: Ops, device: Device, vocab_size: int, static: bool) -> None:
        super().__init__(ops, device, vocab_size, static)
        self._seen: dict[Request, _TokenCounts] = {}

    def set_requests(self, requests: Sequence[Request], rows: int) -> bool:
        self._rows = [(row, r) for row, r in enumerate(requests) if _penalized(r)]
        self._seen = {r: self._seen.get(r) or _TokenCounts(r) for _, r in self._rows}
        if self._rows:
            penalties = np.tile(np.array([1, 0, 0], np.float32), (rows, 1))
            for row, r in self._rows:
                p = r.params
                penalties[row] = p.repetition_penalty, p.frequency_penalty, p.presence_penalty
            self._penalties = self.device.to_device([penalties])[0]
        return bool(self._rows)

    def __call__(self, logits: Tensor, positions: Sequence[int]) -> Tensor:
        histories = [self._seen[r].before_position(positions[row]) for row, r in self._rows]
        ids, counts = (np.concatenate(columns) for columns in zip(*histories, strict=True))
        rows = np.repeat(np.array([row for row, _ in self._rows], np.int32), [len(ids) for ids, _ in histories])
        for places in self.upload(rows, ids, counts):
            logits = self.ops.penalize(logits, *places, self._penalties)
        return logits


class _TokenCounts:
    """The distinct tokens of one request, and how often each is in the output."""

    def __init__(self, request: Request) -> None:
        self.request = request
        counted = request.params.repetition_penalty != 1 and not request.core_request.embeds
        prompt = request.token_ids[: request.num_prompt] if counted else []
        self.ids = np.unique(np.array(prompt, np.int32))  # room is doubled as needed
        self.counts = np.zeros(len(self.ids), np.int32)
        self.size = len(self.ids)
        self.num_read = request.num_prompt  # of request.token_ids
        self.index_of = dict(zip(self.ids.tolist(), range(self.size), strict=True))

    def before_position(self, position: int) -> tuple[IntArray, IntArray]:
        """Tokens and counts of what stands before the position. What is known is counted once and for all; drafts are
        counted anew each time, for they may go."""
        token_ids, known = self.request.token_ids, self.request.num_known
        for i in range(self.num_read, known):
            place = self._place(token_ids[i])  # first: it may replace counts by a larger one
            self.counts[place] += 1
        self.num_read = known
        ids, counts = self.ids[: self.size], self.counts[: self.size]
        return (ids, counts) if position <= known else self._with_drafts(token_ids[known:position], ids, counts)

    def _with_drafts(self, drafts: Sequence[int], ids: IntArray, counts: IntArray) -> tuple[IntArray, IntArray]:
        new = [token_id for token_id in dict.fromkeys(drafts) if token_id not in self.index_of]
        places = {token_id: self.size + i for i, token_id in enumerate(new)}
        ids, counts = np.append(ids, np.array(new, np.int32)), np.append(counts, np.zeros(len(new), np.int32))
        for token_id in drafts:
            counts[places[token_id] if token_id in places else self.index_of[token_id]] += 1
        return ids, counts

    def _place(self, token_id: int) -> int:
        place = self.index_of.setdefault(token_id, self.size)
        if place == self.size:
            if place == len(self.ids):
                self.ids = np.concatenate([self.ids, np.zeros(place + 64, np.int32)])
                self.counts = np.concatenate([self.counts, np.zeros(place + 64, np.int32)])
            self.ids[place] = token_id
            self.size += 1
        return place


def _penalized(request: Request) -> bool:
    p = request.params
    return p.repetition_penalty != 1 or p.frequency_penalty != 0 or p.presence_penalty != 0


def _completes_word(request: Request, word: tuple[int, ...], position: int) -> bool:
    """True if the output (not the prompt) before the position ends with all but the last of these tokens."""
    start = position - (len(word) - 1)
    if start >= position:
        return start == position
    return start >= request.num_prompt and tuple(request.token_ids[start:position]) == word[:-1]


def banned_tokens(request: Request) -> set[int]:
    """Tokens that bad_words and min_tokens forbid for the next one, after all that are known."""
    position = request.num_known
    ids = {word[-1] for word in request.core_request.bad_words_ids if _completes_word(request, word, position)}
    short = position - request.num_prompt < request.params.min_tokens
    return ids | request.core_request.stop_ids if short else ids


def _flatten_places(lists: Iterable[tuple[int, Sequence[int]]]) -> tuple[IntArray, IntArray]:
    """(row, token ids) of several rows -> rows [M] and ids [M], int32."""
    lists = list(lists)
    rows = np.repeat(np.array([row for row, _ in lists], np.int32), [len(ids) for _, ids in lists])
    return rows, np.concatenate([np.array(ids, np.int32) for _, ids in lists])


def _chunk_of(column: np.ndarray[Any, Any], start: int) -> np.ndarray[Any, Any]:
    """CHUNK of a column from `start` on; past its end, the last one again."""
    piece = column[start : start + CHUNK]
    return np.pad(piece, (0, CHUNK - len(piece)), "edge")
