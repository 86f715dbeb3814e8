"""Places of a prompt's media among its tokens."""

from collections.abc import Iterator, Sequence

from quintet.media.items import MediaItem


def overlaps(media: MediaItem, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
    """Yields (position, tokens, first row) of the runs of a medium's tokens among start .. stop - 1."""
    row = 0
    for first, end in media.spans:
        low, high = max(first, start), min(end, stop)
        if low < high:
            yield low, high - low, row + low - first
        row += end - first


def identity(media: Sequence[MediaItem], start: int, stop: int) -> bytes:
    """Returns what tells the tokens start .. stop - 1 from the same token ids with other media: which rows of which
    media stand in their places. Empty where none do."""
    found = [
        each.digest + b"".join(number.to_bytes(4, "little") for number in (place - start, count, row))
        for each in media
        for place, count, row in overlaps(each, start, stop)
    ]
    return b"media" + b"".join(found) if found else b""
