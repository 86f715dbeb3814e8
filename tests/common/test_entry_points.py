"""What packages bring, read once, is what importlib finds; a folder that joins sys.path is looked into."""

from importlib import metadata
from pathlib import Path

import pytest

from quintet.common.plugins import entry_points


def test_a_group_is_what_importlib_finds() -> None:
    groups = {point.group for each in metadata.distributions() for point in each.entry_points}
    assert "console_scripts" in groups
    assert all(list(entry_points(group)) == list(metadata.entry_points(group=group)) for group in groups)


def test_a_folder_that_joins_the_path_is_looked_into(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not entry_points("quintet.nobodys")
    info = tmp_path / "brought-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: brought\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[quintet.nobodys]\none = brought:Thing\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert [(each.name, each.value) for each in entry_points("quintet.nobodys")] == [("one", "brought:Thing")]
