"""Token ids to text as they come: never a broken character, never the beginning of a stop string that completes."""

import codecs
import itertools
import re
from collections.abc import Sequence
from typing import Protocol

from quintet.sampling_params import SamplingParams
from quintet.tokenizers.stop_strings import compile_stops
from quintet.tokenizers.token_bytes import TokenBytes
from quintet.tokenizers.tokenizer import Tokenizer

_ESCAPED = re.compile("[\udc80-\udcff]")  # bytes that were no UTF-8, as surrogateescape marks them
_TAIL = 32  # tokens of the prompt that are read for context: those that end it within a character, and some to spare
_WINDOW = 8  # tokens that a decoder of unknown kind may hold back while its text ends within a character


def _last_shown(ids: Sequence[int], hidden: frozenset[int], most: int) -> list[int]:
    """Returns the last tokens that show, the last one first."""
    return list(itertools.islice((token_id for token_id in reversed(ids) if token_id not in hidden), most))


class TextDecoder(Protocol):
    """Turns ids into text piece by piece; what it holds back is bounded."""

    def step(self, token_id: int) -> str: ...
    def finish(self) -> str: ...


class ByteDecoder:
    """Decodes by the bytes of each token; holds back at most three, of a character that is not complete yet."""

    def __init__(self, pieces: TokenBytes, hidden: frozenset[int], prompt_ids: Sequence[int]) -> None:
        self._pieces = pieces
        self._hidden = hidden
        self._pending = b""
        self._errors = pieces.errors
        self._first = True  # no token that shows has come, in prompt or output
        self._space, self._strip = pieces.strip  # what the start of a text still loses
        self._prime(prompt_ids)

    def _prime(self, prompt_ids: Sequence[int]) -> None:
        """The output continues the prompt: its text does not start anew, and may complete the prompt's last character.

        Three bytes before the end decide which ones those are, for a character has four at most.
        """
        tail = b""
        for token_id in _last_shown(prompt_ids, self._hidden, _TAIL):
            if piece := self._pieces[token_id]:
                self._first, self._strip = False, 0
                tail = piece + tail
                if len(tail) > 3:
                    break
        _, used = codecs.utf_8_decode(tail, "replace", False)
        self._pending = tail[used:]

    def step(self, token_id: int) -> str:
        if token_id in self._hidden:
            return ""
        piece = self._pieces[token_id]
        if self._first:
            self._first = False
            piece = self._pieces.first(token_id)
        if self._pending:
            piece = self._pending + piece
        text, used = codecs.utf_8_decode(piece, self._errors, False)
        self._pending = piece[used:]
        return self._clean(text)

    def finish(self) -> str:
        text, _ = codecs.utf_8_decode(self._pending, self._errors, True)
        self._pending = b""
        return self._clean(text)

    def _clean(self, text: str) -> str:
        while self._strip and text:
            if text[0] != self._space:
                self._strip = 0
                break
            text, self._strip = text[1:], self._strip - 1
        return text if text.isascii() or self._errors == "replace" else _ESCAPED.sub("\ufffd", text)


class WindowDecoder:
    """Decodes a few tokens again and again with the tokenizer's own decode(), for decoders of unknown kind."""

    def __init__(self, tokenizer: Tokenizer, hidden: frozenset[int], prompt_ids: Sequence[int]) -> None:
        self._tokenizer, self._hidden = tokenizer, hidden
        self._ids = _last_shown(prompt_ids, hidden, _WINDOW)[::-1]
        self._shown = len(self._ids)  # ids[: shown] are context: their text is out
        self._context = self._decode(self._ids)

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, False) if ids else ""  # a Strip at the end panics at no text

    def step(self, token_id: int) -> str:
        if token_id in self._hidden:
            return ""
        self._ids.append(token_id)
        text = self._decode(self._ids)
        held = len(self._ids) - self._shown
        if held < _WINDOW and (text.endswith("\ufffd") or len(text) <= len(self._context)):
            return ""
        return self._advance(text)

    def finish(self) -> str:
        return self._advance(self._decode(self._ids))

    def _advance(self, text: str) -> str:
        new = text[len(self._context) :]
        del self._ids[: max(0, len(self._ids) - _WINDOW)]
        self._shown, self._context = len(self._ids), self._decode(self._ids)
        return new


class IncrementalText:
    """A decoder without the spaces that it writes between two added tokens."""

    def __init__(self, decoder: TextDecoder, tokenizer: Tokenizer) -> None:
        self._decoder, self._added = decoder, {token_id: text for text, token_id in tokenizer.added.items()}
        self._last_added = False

    def step(self, token_id: int) -> str:
        text, name = self._decoder.step(token_id), self._added.get(token_id)
        if name is not None and self._last_added and not name.startswith(" "):
            text = text.lstrip(" ")
        self._last_added = name is not None
        return text

    def finish(self) -> str:
        return self._decoder.finish()


class Detokenizer:
    """The text of one completion. The parts that add() and finish() return, joined, are `text`.

    Of stop strings the one that ends first wins; of several that end together, the longest. One that the first
    `min_tokens` tokens complete does not count.
    """

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams, prompt_ids: Sequence[int] = ()) -> None:
        kept = params.keep_special_tokens
        hidden = tokenizer.special_ids.difference(kept) if params.skip_special_tokens else frozenset()
        if tokenizer.pieces is not None:
            self._decoder: TextDecoder = ByteDecoder(tokenizer.pieces, hidden, prompt_ids)
        else:
            self._decoder = WindowDecoder(tokenizer, hidden, prompt_ids)
        if not (params.skip_special_tokens or params.spaces_between_special_tokens):
            self._decoder = IncrementalText(self._decoder, tokenizer)
        self._stops = compile_stops(tuple(params.stop)) if params.stop else None
        self._include = params.include_stop_str_in_output
        self._min_tokens = params.min_tokens
        self._state = 0  # of the stop strings' automaton
        self._held = ""  # the end of the text that may belong to a stop string
        self._parts: list[str] = []
        self.num_tokens = 0  # taken; those after a stop string are not
        self.stop: str | None = None  # the stop string that was found

    @property
    def text(self) -> str:
        """Everything returned so far."""
        if len(self._parts) > 1:
            self._parts = ["".join(self._parts)]
        return self._parts[0] if self._parts else ""

    def add(self, ids: Sequence[int], hide_last: bool = False) -> str:
        """The text that these tokens let out. `hide_last`: the last one is a stop token, which shows no text."""
        new = ""
        for index, token_id in enumerate(ids, 1):
            if self.stop is not None:
                break
            self.num_tokens += 1
            if hide_last and index == len(ids):
                break
            new += self._search(self._decoder.step(token_id))
        self._parts.append(new)
        return new

    def finish(self) -> str:
        """The rest: what was held back. Call it once, when no more tokens come."""
        new = "" if self.stop is not None else self._search(self._decoder.finish())
        if self.stop is None:
            new, self._held = new + self._held, ""
        self._parts.append(new)
        return new

    def _search(self, text: str) -> str:
        """Text that may be let out once `text` has come; sets `stop`."""
        stops = self._stops
        if stops is None or not text:
            return text
        end = 0
        while end < len(text):
            self._state, end = stops.scan(self._state, text, end)
            stop = stops.found[self._state]
            if stop is not None and self.num_tokens > self._min_tokens:
                self.stop = stop
                return self._cut(self._held + text[:end], stop)
        text = self._held + text
        keep = len(text) if self._include else len(text) - stops.depth[self._state]
        self._held = text[keep:]
        return text[:keep]

    def _cut(self, text: str, stop: str) -> str:
        self._held = ""
        return text if self._include else text[: len(text) - len(stop)]
