"""The sizes that decode steps are padded to, so that few graphs serve all; the padding itself is the host's work.

The engine hands every step over as it is. A step of one token per request is filled up here, with requests of one
token on page 0, which is nobody's: to a kernel they are requests like any others. Rows of logits are left as they are.
"""

from bisect import bisect_left
from collections.abc import Sequence

import numpy as np

from quintet.config import EngineConfig
from quintet.types import Array, HostBatch

MOST = 512  # requests of a step that is padded: beyond, the host's share of a step is small
LEAST_PAGES = 64  # columns of a captured page table; then four times as many each: a longer request seldom asks anew


def decode_sizes(most: int) -> tuple[int, ...]:
    """1, 2, 4, every 8 to 64, 16 to 128, 32 to 256, then 64: from 32 on, a fifth is padding at most."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 128, 16), *range(128, 256, 32), *range(256, MOST + 1, 64)]
    most = min(most, MOST)
    return (*(size for size in sizes if size < most), most)


def capture_sizes(config: EngineConfig) -> tuple[int, ...]:
    """Of the decode steps to capture, in order: those that were asked for and can come, or our own."""
    if config.enforce_eager:
        return ()
    if config.capture_sizes:
        return tuple(size for size in config.capture_sizes if size <= config.max_num_seqs)
    return decode_sizes(min(config.max_num_seqs, config.max_capture_size or MOST))


def table_width(pages: int) -> int:
    """Columns of the captured page table that holds so many."""
    width = LEAST_PAGES
    while width < pages:
        width *= 4
    return width


def table_widths(pages: int) -> tuple[int, ...]:
    """All that requests of up to so many pages bring."""
    widths = [LEAST_PAGES]
    while widths[-1] < pages:
        widths.append(table_width(widths[-1] + 1))
    return tuple(widths)


def decodes(batch: HostBatch) -> bool:
    """Whether each request brings one token: none brings nothing, so the numbers say it."""
    return len(batch.token_ids) == len(batch.lengths) and len(batch.logit_rows) <= len(batch.lengths)


def padded(batch: HostBatch, sizes: Sequence[int]) -> HostBatch:
    """Of a decode step, the next of the sizes; any other step as it is."""
    count = len(batch.token_ids)
    if not sizes or not decodes(batch) or count > sizes[-1]:
        return batch
    missing = sizes[bisect_left(sizes, count)] - count
    if missing == 0:
        return batch
    last, rows = count + missing, np.arange(count, count + missing, dtype=np.int32)
    return batch._replace(
        token_ids=_more(batch.token_ids, missing, 0),
        positions=_more(batch.positions, missing, 0),
        slots=_more(batch.slots, missing, 0),
        owners=np.concatenate([batch.owners, rows]),
        starts=np.arange(last + 1, dtype=np.int32),
        lengths=_more(batch.lengths, missing, 1),
        page_table=np.concatenate([batch.page_table, np.zeros((missing, batch.page_table.shape[1]), np.int32)]),
    )


def _more(array: Array, count: int, value: int) -> Array:
    return np.concatenate([array, np.full(count, value, np.int32)])
