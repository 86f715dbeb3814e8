"""Text of a request as the encoder of an encoder-decoder model takes it: token ids, within the encoder's bounds."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from quintet.media.items import MediaItem, WireArray
from quintet.media.lazy_numpy import np

TEXT = "text"  # kind of the item
TOKENS = "token_ids"  # a MediaItem's field with them, int32 [N]
DIGEST_BYTES = 16


@dataclass(frozen=True)
class TextInput:
    """Input of a model's encoder of text. Plain data: it crosses processes."""

    rows: int  # tokens that the encoder takes at most, each of which becomes a row
    vocab_size: int  # of the encoder, which may have a vocabulary of its own
    start_ids: tuple[int, ...]  # the decoder's prompt where a caller gives none; others begin with its first token

    def item(self, token_ids: Sequence[int], name: str) -> MediaItem:
        """Returns checked token ids as the encoder takes them. ValueError if they are too many; `name` is what it calls
        the prompt."""
        if len(token_ids) > self.rows:
            raise ValueError(
                f"{name} has {len(token_ids)} tokens, and the model's encoder takes {self.rows} at most; shorten it"
            )
        ids = np.array(token_ids, np.int32)
        digest = hashlib.blake2b(ids.tobytes(), digest_size=DIGEST_BYTES, person=b"quintet-source").digest()
        return MediaItem(TEXT, digest, {TOKENS: WireArray.of(ids)}, ((0, len(ids)),))

    def decoder_ids(self, given: Sequence[int] | None) -> list[int]:
        """Returns the decoder's prompt: that of the caller behind the model's start token, or the model's own."""
        if not given:
            return list(self.start_ids)
        return list(given) if given[0] == self.start_ids[0] else [self.start_ids[0], *given]
