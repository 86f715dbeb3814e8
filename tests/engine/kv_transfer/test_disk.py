"""A folder of pages, and what a run with another number of ranks left in it."""

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import pytest

from quintet.engine.kv_transfer.offload.disk import HEADER, DiskTier, other_folders

WORDS = 8
PAGE = HEADER.size + 4 * WORDS  # bytes of a file


def disk(folder: Path, pages: int, others: Sequence[Path] = ()) -> DiskTier:
    return DiskTier(folder, pages * PAGE, WORDS, "lru", others)


def key(rank: int, at: int) -> bytes:
    return bytes([rank, at] * 8)


def left(folder: Path, rank: int, count: int) -> None:
    """What an engine's rank left when it ended."""
    made = disk(folder, count)
    for at in range(count):
        made.write(key(rank, at), np.full(WORDS, at, np.int32))
    made.close()


def pages(folders: Iterable[Path]) -> int:
    return sum(len(list(each.glob("??/*.page"))) for each in folders)


def test_pages_of_more_ranks_count_and_go_first(tmp_path: Path) -> None:
    folders = [tmp_path / f"rank-{rank}" for rank in range(4)]
    for rank, folder in enumerate(folders):
        left(folder, rank, 3)
    others = other_folders(tmp_path, 2)
    assert others == folders[2:]
    made = disk(folders[0], 7, others)
    assert len(made) == 3 and pages(others) == 4, "the oldest went at the start"
    for at in range(3, 6):
        made.write(key(0, at), np.full(WORDS, at, np.int32))
    made.close()
    assert pages(folders[:1]) == 6 and pages(others) == 1 and pages(folders[1:2]) == 3
    again = disk(folders[0], 7, others)
    assert [key(0, at) in again for at in range(6)] == [True] * 6
    again.close()


def test_ranks_count_what_one_process_left_and_it_what_they_left(tmp_path: Path) -> None:
    left(tmp_path, 9, 3)
    rank = tmp_path / "rank-0"
    assert other_folders(tmp_path, 1) == [tmp_path] and other_folders(tmp_path, 0) == []
    made = disk(rank, 4, other_folders(tmp_path, 1))
    with pytest.raises(ValueError, match="is another engine's while that runs"):
        disk(tmp_path, 4)
    for at in range(4):
        made.write(key(0, at), np.zeros(WORDS, np.int32))
    made.close()
    assert pages([tmp_path]) == 0 and pages([rank]) == 4
    alone = disk(tmp_path, 2, other_folders(tmp_path, 0))
    alone.close()
    assert pages([rank]) == 2


def test_what_somebody_holds_or_named_otherwise_is_let_be(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Of several ranks one counts a folder; and nothing that is no rank's is looked at."""
    caplog.set_level("INFO")
    for name in ("rank-2", "rank-x", "rank-00000", "mine"):
        left(tmp_path / name, 2, 3)
    (tmp_path / "rank-3").symlink_to(tmp_path / "mine")
    others = other_folders(tmp_path, 2)
    assert others == [tmp_path / "rank-2"]
    first = disk(tmp_path / "rank-0", 3, others)
    second = disk(tmp_path / "rank-1", 1, others)
    assert pages(others) == 3 and "what lies there is not counted: kv_offloading_folder: " in caplog.text
    first.close()
    second.close()
    disk(tmp_path / "rank-1", 1, others).close()
    assert pages(others) == 1 and pages([tmp_path / "mine"]) == 3
    assert other_folders(tmp_path / "nowhere", 2) == []
