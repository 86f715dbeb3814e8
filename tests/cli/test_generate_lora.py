"""`quintet generate --enable-lora --lora-path`: a prompt is answered with an adapter."""

from pathlib import Path

import pytest

from quintet.cli import main as cli
from tests.helpers.lora_adapters import bundled_adapter

WORDS = (
    "generate",
    "bundled",
    "Once upon a time",
    "--max-tokens",
    "8",
    "--temperature",
    "0",
    "--device",
    "cpu",
    "--quiet",
)


@pytest.mark.slow
def test_the_adapter_changes_the_answer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(bundled_adapter(tmp_path / "a", 0))
    found = []
    for more in (("--enable-lora",), ("--enable-lora", "--lora-path", path), ("--enable-lora", "--lora-path", path)):
        assert cli.main([*WORDS, "--kv-cache-memory-bytes", "64M", *more]) == 0
        found.append(capsys.readouterr().out)
    assert found[0] != found[1] == found[2]


def test_it_needs_adapters_to_be_on(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*WORDS, "--lora-path", "a"]) != 0
    assert "--lora-path needs --enable-lora" in capsys.readouterr().err
