"""Runs an encoder's passes on all ranks, before the step that reads what they write."""

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from quintet.engine.executor.media_parts import run_encoder
from quintet.engine.row_store.media import EncodingFailed, noting_failure
from quintet.interface.types import FloatArray, IntArray
from quintet.media.audio.log_mel import FEATURES
from quintet.media.audio.waveform import SAMPLES, blocks_of
from quintet.media.encoder_text import TEXT, TOKENS
from quintet.media.items import MediaItem

if TYPE_CHECKING:
    from quintet.engine.executor.worker_group import WorkerGroup
    from quintet.engine.row_store.items import RowWrite


def write_encoded(ranks: "WorkerGroup", writes: "Sequence[RowWrite]") -> None:
    """Runs one pass for each item. An item is encoded alone: its rows have the same bits whatever else is asked.

    EncodingFailed names the first item that fails. No later pass runs: ranks meet in the passes' collectives, and one
    that has failed is in none.
    """
    failed: dict[bytes, str] = {}
    for write in writes:
        item: Any = write.item
        with noting_failure(item, item.media.kind, failed):
            ranks.map_workers(partial(run_encoder, given=_given(item.media), slots=write.places))
        if failed:
            raise EncodingFailed(failed)


def _given(media: MediaItem) -> FloatArray | IntArray:
    """Returns token ids [E], blocks of samples, or log-mel frames [2 * E + 2, mel bins] with zeros at both ends."""
    if media.kind == TEXT:
        return media.fields[TOKENS].array().copy()  # torch wants memory that may be written to
    if SAMPLES in media.fields:
        return blocks_of(media.fields[SAMPLES].array())
    features = media.fields[FEATURES].array()
    frames = np.zeros((features.shape[1] + 2, features.shape[0]), np.float32)
    frames[1:-1] = features.T
    return frames
