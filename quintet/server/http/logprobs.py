"""Log-probabilities in the shapes of OpenAI's two APIs. Values below -9999 (and minus infinity) are given as that."""

import codecs
from collections.abc import Sequence

from quintet.engine.tokenizer import Tokenizer
from quintet.outputs import Logprob, LogprobsAt
from quintet.server.http.protocol.chat import ChatLogprobs, TokenLogprob, TopLogprob
from quintet.server.http.protocol.completions import CompletionLogprobs

_LOWEST = -9999.0  # JSON has no minus infinity


class Writer:
    """Writes tokens out for one request. `by_id`: as "token_id:123", not as text."""

    def __init__(self, tokenizer: Tokenizer | None, most: int | None, by_id: bool, skip_special: bool) -> None:
        self._tokenizer, self._by_id = tokenizer, by_id or tokenizer is None
        self._most = -1 if most is None else most  # of the likeliest tokens; -1 is all
        self._hidden = tokenizer.special_ids if tokenizer is not None and skip_special else frozenset()

    def chat(self, ids: Sequence[int], logprobs: Sequence[LogprobsAt]) -> ChatLogprobs:
        return ChatLogprobs([self._chat_token(*each) for each in zip(ids, logprobs, strict=True)])

    def _chat_token(self, token_id: int, at: LogprobsAt) -> TokenLogprob:
        top = [TopLogprob(self.text(each), _bounded(at[each]), list(self._raw(each))) for each in self._likeliest(at)]
        return TokenLogprob(self.text(token_id), _bounded(at[token_id]), list(self._raw(token_id)), top)

    def completion(
        self, ids: Sequence[int], logprobs: Sequence[LogprobsAt | None], offsets: "Offsets"
    ) -> CompletionLogprobs:
        """`offsets` go on from one call to the next."""
        given = CompletionLogprobs([], [], [], [])
        for token_id, at in zip(ids, logprobs, strict=True):
            given.text_offset.append(offsets.place(b"" if token_id in self._hidden else self._raw(token_id)))
            given.tokens.append(self.text(token_id))
            given.token_logprobs.append(None if at is None else _bounded(at[token_id]))
            given.top_logprobs.append(None if at is None else self._top(token_id, at))
        return given

    def _top(self, token_id: int, at: LogprobsAt) -> dict[str, float]:
        """The likeliest, and the token itself."""
        return {self.text(each): _bounded(at[each]) for each in dict.fromkeys([*self._likeliest(at), token_id])}

    def _likeliest(self, at: LogprobsAt) -> list[int]:
        """Best first. The token that was drawn may come first in `at` and have any rank."""
        most = len(at) if self._most == -1 else self._most
        ranked = sorted((each.rank or 0, token_id) for token_id, each in at.items())
        return [token_id for rank, token_id in ranked if rank <= most]

    def text(self, token_id: int) -> str:
        """A token that is no whole character is written as its bytes, as OpenAI does: two such are told apart."""
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
    """Where each token begins in a text: characters that are complete before it."""

    def __init__(self, start: int = 0) -> None:
        self._at = start
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def place(self, raw: bytes) -> int:
        """Of the next token, which adds these bytes."""
        at = self._at
        self._at += len(self._decoder.decode(raw))
        return at


def plain(prompt_logprobs: Sequence[LogprobsAt | None]) -> list[dict[int, Logprob] | None]:
    """vLLM's prompt_logprobs: token id -> its log-probability, rank and text."""
    return [
        None if at is None else {token_id: _finite(each) for token_id, each in at.items()} for at in prompt_logprobs
    ]


def _finite(each: Logprob) -> Logprob:
    return each if each.logprob >= _LOWEST else Logprob(_LOWEST, each.rank, each.decoded_token)


def _bounded(each: Logprob) -> float:
    return max(each.logprob, _LOWEST)
