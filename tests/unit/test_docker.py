"""Images are described by files that nothing here can build: what can be checked without an engine is."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "docker").glob("Dockerfile.*"))
PINNED = re.compile(r'"([a-z]+)(?:\[[a-z]+\])?==([\w.]+)"')


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_every_path_that_is_copied_exists(file: Path) -> None:
    copied = [line.split()[1:-1] for line in file.read_text().splitlines() if line.startswith("COPY ")]
    paths = [path for paths in copied for path in paths if not paths[0].startswith("--from")]
    assert paths and all((ROOT / path).exists() for path in paths)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_it_ends_as_a_user_without_rights_that_runs_the_command(file: Path) -> None:
    lines = file.read_text().splitlines()
    assert any(line.startswith("USER ") and line != "USER root" for line in lines)
    assert 'ENTRYPOINT ["quintet"]' in lines


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_its_pins_are_those_that_the_tests_run_with(file: Path) -> None:
    constraints = (ROOT / "constraints-dev.txt").read_text()
    pins = PINNED.findall(file.read_text())
    assert pins and all(f"\n{name}=={version}\n" in constraints for name, version in pins)
