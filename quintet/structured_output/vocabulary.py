"""The tokenizer as llguidance takes it: the bytes of each token, and an encoder of forced text, checked by them."""

import functools
import json
from collections.abc import Sequence
from typing import Any

from quintet.tokenizers.tokenizer import Tokenizer

LEADS = ("", "\n", "a")  # texts before the one that is encoded: the tokenizer may put a space in front of them


class ByteVocabulary:
    """Tokenizer for llguidance.LLTokenizer(), with the attributes of its TokenizerWrapper.

    Special tokens match no text, only their id in a grammar (`<[7]>`). Other added tokens match their text.
    """

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_ids: Sequence[int]) -> None:
        """`vocab_size` is the model's. ValueError if the tokens have no bytes of their own."""
        if tokenizer.pieces is None:
            raise ValueError(
                f"they need the bytes of each token, which this model's tokenizer does not have: {_decoder(tokenizer)}"
            )
        self._tokenizer = tokenizer
        self.eos_token_id = eos_ids[0]
        special = {*tokenizer.special_ids, *eos_ids}
        self.special_token_ids = sorted(each for each in special if each < vocab_size)
        size = min(vocab_size, tokenizer.vocab_size)
        self.tokens = [tokenizer.pieces[token_id] for token_id in range(size)] + [b""] * (vocab_size - size)
        for token_id in self.special_token_ids:
            self.tokens[token_id] = (tokenizer.backend.id_to_token(token_id) or f"<{token_id}>").encode()
        self._special = frozenset(self.special_token_ids)

    def __call__(self, text: str) -> list[int]:
        """Returns ids of tokens whose bytes are the text's: the tokenizer's own if it keeps the text as it is, else the
        longest that fit. Where none fits the end-of-text token stands, which the grammar then refuses."""
        data = text.encode()
        for lead in LEADS:
            try:
                ids = self._tokenizer.encode(lead + text, add_special_tokens=False)
            except ValueError:
                break
            if (start := self._suffix(ids, data)) is not None:
                return ids[start:]
        return self._longest(data)

    def _suffix(self, ids: list[int], data: bytes) -> int | None:
        """Returns from where on the tokens' bytes are `data`; None if they are not, or one is special."""
        start, rest = len(ids), len(data)
        while rest > 0 and start > 0:
            start -= 1
            if ids[start] in self._special or ids[start] >= len(self.tokens):
                return None
            rest -= len(self.tokens[ids[start]])
        return start if rest == 0 and b"".join(self.tokens[each] for each in ids[start:]) == data else None

    def _longest(self, data: bytes) -> list[int]:
        ids, at = list[int](), 0
        while at < len(data):
            sizes = range(min(self._max_bytes, len(data) - at), 0, -1)
            size = next((size for size in sizes if data[at : at + size] in self._ids), 0)
            if not size:
                return [*ids, self.eos_token_id]
            ids.append(self._ids[data[at : at + size]])
            at += size
        return ids

    @functools.cached_property
    def _ids(self) -> dict[bytes, int]:
        tokens = enumerate(self.tokens)
        return {piece: token_id for token_id, piece in tokens if piece and token_id not in self._special}

    @functools.cached_property
    def _max_bytes(self) -> int:
        return max(map(len, self._ids), default=0)


def _decoder(tokenizer: Tokenizer) -> str:
    """Names the decoder of a tokenizer."""
    decoder = json.loads(tokenizer.backend.to_str())["decoder"]
    if decoder is None:
        return "it has no decoder"
    kinds: list[Any] = [each["type"] for each in decoder.get("decoders", [decoder])]
    return f"its decoder ({', '.join(kinds)}) is of a kind that joins them"
