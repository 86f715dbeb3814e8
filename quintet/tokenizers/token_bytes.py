"""Bytes that each token adds to a text: a tokenizer's decoder is read once, so that decoding costs O(1) per token."""

import json
import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import tokenizers

_BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f]{2})>")


def _byte_level_alphabet() -> dict[str, int]:
    """The characters that byte-level BPE writes for bytes, as GPT-2 defined them."""
    kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
    moved = [byte for byte in range(256) if byte not in kept]
    return {chr(byte): byte for byte in kept} | {chr(256 + index): byte for index, byte in enumerate(moved)}


class TokenBytes:
    """Token id -> the bytes it adds, for the decoders that work token by token.

    Two kinds: byte-level, and text with byte fallback (Replace, ByteFallback, Fuse, Strip as in Llama 2, or Metaspace).
    Joined pieces decoded as UTF-8 equal the tokenizer's own decode(), but that a run of byte tokens which is
    invalid somewhere keeps its valid characters here, where tokenizers drops the whole run.
    """

    def __init__(self, backend: "tokenizers.Tokenizer", steps: list[dict[str, Any]]) -> None:
        self._backend = backend
        self._bytes: dict[int, bytes] = {}
        kinds = [step["type"] for step in steps]
        self._alphabet = _byte_level_alphabet() if "ByteLevel" in kinds else None
        self._fallback = "ByteFallback" in kinds
        self._replaced = [(step["pattern"]["String"], step["content"]) for step in steps if step["type"] == "Replace"]
        self._meta = next((step for step in steps if step["type"] == "Metaspace"), None)
        strip = next((step for step in steps if step["type"] == "Strip"), None)
        self.strip: tuple[str, int] = (strip["content"], strip["start"]) if strip else ("", 0)  # at the text's start
        # How invalid bytes are shown: U+FFFD once per ill-formed sequence, or once per byte token.
        self.errors = "surrogateescape" if self._fallback else "replace"

    @classmethod
    def read(cls, backend: "tokenizers.Tokenizer") -> "TokenBytes | None":
        """Reads a tokenizer's decoder; None if its kind is unknown: its own decode() must be used then."""
        if backend.decoder is None:
            return None
        try:
            decoder = json.loads(backend.decoder.__getstate__())  # to_str() would write the whole vocabulary
        except Exception:  # tokenizers' for a decoder that calls Python code
            return None
        steps = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
        return cls(backend, steps) if _is_known(steps) else None

    @property
    def is_byte_level(self) -> bool:
        return self._alphabet is not None

    def __getitem__(self, token_id: int) -> bytes:
        piece = self._bytes.get(token_id)
        if piece is None:
            piece = self._read(token_id)
            if piece:  # any number may be asked for; those that are no token are not kept
                self._bytes[token_id] = piece
        return piece

    def first(self, token_id: int) -> bytes:
        """The bytes it adds when it is a text's first token: Metaspace drops that token's spaces."""
        if self._meta is None or self._meta["prepend_scheme"] == "never":
            return self[token_id]
        return (self._backend.id_to_token(token_id) or "").replace(self._meta["replacement"], "").encode()

    def _read(self, token_id: int) -> bytes:
        token = self._backend.id_to_token(token_id)
        if token is None:  # the model's vocabulary is padded beyond the tokenizer's
            return b""
        for old, new in self._replaced:
            token = token.replace(old, new)
        if self._alphabet is not None:
            alphabet = self._alphabet
            known = all(character in alphabet for character in token)
            return bytes(alphabet[character] for character in token) if known else token.encode()
        if self._fallback and (match := _BYTE_TOKEN.fullmatch(token)):
            return bytes([int(match[1], 16)])
        return (token.replace(self._meta["replacement"], " ") if self._meta else token).encode()


def _is_known(steps: list[dict[str, Any]]) -> bool:
    kinds = [step["type"] for step in steps]
    if kinds in (["ByteLevel"], ["Metaspace"], ["Metaspace", "Fuse"]):
        return True
    known = "(Replace )*(ByteLevel |(ByteFallback )?Fuse (Strip )?)"
    if not re.fullmatch(known, "".join(kind + " " for kind in kinds)):
        return False
    plain = all("String" in step["pattern"] for step in steps if step["type"] == "Replace")
    return plain and all(step["stop"] == 0 for step in steps if step["type"] == "Strip")
