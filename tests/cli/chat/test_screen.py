"""What a conversation shows: words on standard output, thoughts beside it, and nothing that steers a terminal."""

import sys

import pytest

from quintet.cli.chat.screen import Screen
from quintet.parsers import CallBegin, Content, Reasoning

EVENTS = [Reasoning("Hm\x1b[2J"), CallBegin(0, "f"), Content("a\x1b]0;x\x07\tb\n"), Content("👩‍🚀 \x9bc")]


def shown(quiet: bool) -> None:
    screen = Screen(quiet)
    screen.show(EVENTS)
    screen.end()


def test_a_terminal_is_not_steered(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for stream in (sys.stdout, sys.stderr):
        monkeypatch.setattr(stream, "isatty", lambda: True)
    shown(quiet=False)
    said = capsys.readouterr()
    assert said.out == "a\\x1b]0;x\\x07\tb\n👩‍🚀 \\x9bc\n"
    assert said.err == "\x1b[2mHm\\x1b[2J\x1b[0m\n"


def test_a_pipe_gets_what_was_said(capsys: pytest.CaptureFixture[str]) -> None:
    shown(quiet=True)
    assert capsys.readouterr() == ("".join(each.text for each in EVENTS if isinstance(each, Content)) + "\n", "")
