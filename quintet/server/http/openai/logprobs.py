"""Log-probabilities in the shapes of OpenAI's two APIs. Values below -9999 (and minus infinity) are given as that.

They are most of an answer that has them: they are written as JSON a stretch at a time.
"""

import codecs
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeVar

import msgspec
from msgspec import UNSET

from quintet.outputs import Logprob, LogprobsAt
from quintet.sampling_params import RequestOutputKind, SamplingParams
from quintet.server.http.cooperative import CooperativeWork
from quintet.server.http.openai.chat_protocol import TokenLogprob, TopLogprob
from quintet.server.http.openai.completions_protocol import CompletionLogprobs
from quintet.server.http.sse import encode
from quintet.tokenizers.tokenizer import Tokenizer

_LOWEST = -9999.0  # JSON has no minus infinity
_TOKENS_PER_PIECE = 512  # log-probabilities that are written at once: about a millisecond

Positions = Sequence[LogprobsAt | None]
Written = TypeVar("Written")


def json_list(parts: Iterable[bytes]) -> Any:
    """A list in JSON, of parts that are its entries already; stands in an answer for the list of what it says."""
    return msgspec.Raw(b"[" + b",".join(part for part in parts if part) + b"]")


class ScoredTokens(NamedTuple):
    """Tokens in a row, and what their log-probabilities were."""

    ids: Sequence[int]
    logprobs: Positions
    offsets: "Offsets"
    sampled: bool = True  # or they are the prompt's


class LogprobsWriter:
    """Writes tokens out for one request. `by_id`: as "token_id:123", not as text."""

    def __init__(
        self, tokenizer: Tokenizer | None, turns: CooperativeWork, params: SamplingParams, by_id: bool = False
    ) -> None:
        self._tokenizer, self._turns, self._by_id = tokenizer, turns, by_id or tokenizer is None
        self._named = params.logprob_token_ids or ()
        self._streamed = params.output_kind is RequestOutputKind.DELTA
        self._most = -1 if params.logprobs is None else params.logprobs  # of the likeliest tokens; -1 is all
        special = frozenset[int]() if tokenizer is None else tokenizer.special_ids
        self._hidden = special.difference(params.keep_special_tokens) if params.skip_special_tokens else frozenset()

    async def chat(self, ids: Sequence[int], logprobs: Sequence[LogprobsAt], has_ids: bool = False) -> list[bytes]:
        """To be listed(): a TokenLogprob for each token. `has_ids`: with the ids of the tokens."""
        return await self._in_turns(functools.partial(self._chat, has_ids), (ids, logprobs))

    def _chat(self, has_ids: bool, ids: Sequence[int], logprobs: Sequence[LogprobsAt]) -> bytes:
        return _entries([self._chat_token(*each, has_ids) for each in zip(ids, logprobs, strict=True)])

    def _chat_token(self, token_id: int, at: LogprobsAt, has_ids: bool) -> TokenLogprob:
        top = [self._top_token(each, at, has_ids) for each in self._named or self._likeliest(at)]
        token = self._top_token(token_id, at, has_ids)
        return TokenLogprob(token.token, token.logprob, token.bytes, top, token.id)

    def _top_token(self, token_id: int, at: LogprobsAt, has_ids: bool) -> TopLogprob:
        name = token_id if has_ids else UNSET
        return TopLogprob(self.text(token_id), _bounded(at[token_id]), list(self._raw(token_id)), name)

    async def completion(self, *parts: ScoredTokens) -> CompletionLogprobs:
        """Writes several rows of tokens, one after the other."""
        written: list[tuple[bytes, ...]] = []
        for ids, logprobs, offsets, drawn in parts:
            named = self._named if drawn else ()
            written += await self._in_turns(functools.partial(self._completion, offsets, named), (ids, logprobs))
        return CompletionLogprobs(*(json_list(column) for column in zip(*written, strict=True)))

    def _completion(
        self, offsets: "Offsets", named: Sequence[int], ids: Sequence[int], logprobs: Positions
    ) -> tuple[bytes, ...]:
        given = CompletionLogprobs([], [], [], [])
        for token_id, at in zip(ids, logprobs, strict=True):
            given.text_offset.append(offsets.next_offset(b"" if token_id in self._hidden else self._raw(token_id)))
            given.tokens.append(self.text(token_id))
            given.token_logprobs.append(None if at is None else _bounded(at[token_id]))
            given.top_logprobs.append(None if at is None else self._top(token_id, at, named))
        return (
            _entries(given.text_offset), _entries(given.token_logprobs), _entries(given.tokens),
            _entries(given.top_logprobs),
        )  # fmt: skip

    async def prompt_logprobs(self, logprobs: Positions) -> Any:
        """vLLM's prompt_logprobs: a list of objects, token id -> its log-probability, rank and text."""
        return json_list(await self._in_turns(lambda each: _entries(_plain(each)), (logprobs,)))

    async def _in_turns(self, write: Callable[..., Written], columns: tuple[Sequence[Any], ...]) -> list[Written]:
        """Writes stretch by stretch, in turns; a stream's few new tokens are written at once."""
        last = columns[-1]
        step = max(1, _TOKENS_PER_PIECE // (1 + len(last[-1] or ()))) if last else 1
        if self._streamed and len(last) <= step:
            return [write(*columns)]
        starts = range(0, len(last), step) or (0,)
        return await self._turns.run_all(
            functools.partial(write, *(column[start : start + step] for column in columns)) for start in starts
        )

    def _top(self, token_id: int, at: LogprobsAt, named: Sequence[int]) -> dict[str, float]:
        """Those that were named, or the likeliest, and the token itself."""
        shown = dict.fromkeys([*(named or self._likeliest(at)), token_id])
        return {self.text(each): _bounded(at[each]) for each in shown}

    def _likeliest(self, at: LogprobsAt) -> list[int]:
        """Best first. The token that was drawn may come first in `at` and have any rank."""
        most = len(at) if self._most == -1 else self._most
        ranked = sorted((each.rank or 0, token_id) for token_id, each in at.items())
        return [token_id for rank, token_id in ranked if rank <= most]

    def text(self, token_id: int) -> str:
        """Returns a token as text, or its bytes if it is no whole character, as OpenAI does: two of them differ."""
        if self._by_id:
            return f"token_id:{token_id}"
        raw = self._raw(token_id)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

    def _raw(self, token_id: int) -> bytes:
        return b"" if self._tokenizer is None else self._tokenizer.token_bytes(token_id)


class Offsets:
    """Offsets of tokens in a text: the number of characters that are complete before each."""

    def __init__(self, start: int = 0) -> None:
        self._at = start
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def next_offset(self, raw: bytes) -> int:
        """Returns the offset of the next token, which adds these bytes."""
        at = self._at
        self._at += len(self._decoder.decode(raw))
        return at


def _entries(values: Sequence[Any]) -> bytes:
    """The JSON of a list, without its brackets."""
    return encode(values)[1:-1]


def _plain(prompt_logprobs: Positions) -> list[dict[int, Logprob] | None]:
    return [
        None if at is None else {token_id: _finite(each) for token_id, each in at.items()} for at in prompt_logprobs
    ]


def _finite(each: Logprob) -> Logprob:
    return each if each.logprob >= _LOWEST else Logprob(_LOWEST, each.rank, each.decoded_token)


def _bounded(each: Logprob) -> float:
    return max(each.logprob, _LOWEST)
