"""--lora-path of `quintet generate`, `chat` and `run`: prompts are answered with an adapter."""

import io
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from quintet.cli import main as cli
from tests.helpers.lora_adapters import bundled_adapter

ENGINE = ("--max-tokens", "8", "--temperature", "0", "--device", "cpu", "--quiet", "--kv-cache-memory-bytes", "64M")
PROMPT = "Once upon a time"
COMMANDS = {
    "generate": ("generate", "bundled", PROMPT),
    "chat": ("chat", "bundled"),
    "run": ("run", "bundled", PROMPT),
}


def answer(
    words: Sequence[str], more: Sequence[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> str:
    """What the command prints; `chat` reads the prompt twice from its input."""
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(f"{PROMPT}\n{PROMPT}\n".encode())))
    assert cli.main([*words, *ENGINE, *more]) == 0
    return capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_the_adapter_changes_the_answer(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(bundled_adapter(tmp_path / "a", 0))
    base, *adapted = (
        answer(COMMANDS[command], ("--enable-lora", *more), monkeypatch, capsys)
        for more in ((), ("--lora-path", path), ("--lora-path", path))
    )
    assert base != adapted[0] == adapted[1]


@pytest.mark.parametrize("command", COMMANDS)
def test_it_needs_adapters_to_be_on(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*COMMANDS[command], *ENGINE, "--lora-path", "a"]) != 0
    assert "--lora-path needs --enable-lora" in capsys.readouterr().err


def test_a_wrong_adapter_ends_chat_before_the_first_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [*COMMANDS["chat"], *ENGINE, "--enable-lora", "--lora-path", str(tmp_path / "gone")]
    assert cli.main(words) == 1
    error = capsys.readouterr().err
    assert "check the adapter's path" in error and "Traceback" not in error


def test_with_a_server_the_adapter_is_a_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["chat", "--url", "http://127.0.0.1:1", "--lora-path", "a"]) == 1
    assert "give the adapter's name there as --model" in capsys.readouterr().err
