"""Grammars are tried in processes of their own: what hangs or dies there is said, and costs nobody else anything."""

import contextlib
import json
import os
import resource
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from quintet.structured_output import compile_cache as remembered
from quintet.structured_output.compile_cache import CompileCache, CompileTimeout
from quintet.structured_output.compile_check import TOO_MUCH, CompileChecker
from tests.helpers.servers.serving import until, words_of

llguidance = pytest.importorskip(
    "llguidance", reason="structured_outputs are an extra: pip install 'quintet-llm[structured]'"
)

FOREVER: dict[str, Any] = {"allOf": [{"type": "string", "pattern": f"(.*a){{{count}}}"} for count in range(2, 30)]}
BEFORE: set[int] = set()


def grammar(schema: Any) -> str:
    return str(llguidance.LLMatcher.grammar_from_json_schema(json.dumps(schema)))


@pytest.fixture
def trials() -> Any:
    made = CompileChecker()
    BEFORE.update(each.pid for each in processes())  # other tests' engines have some as well
    yield made
    made.close()


def processes() -> list[psutil.Process]:
    """That try grammars, and were not there before the test."""
    found = [each for each in psutil.Process().children() if any("compile_worker" in word for word in words_of(each))]
    return [each for each in found if each.pid not in BEFORE]


PLACES = [
    ({"properties": {"a/b": {"items": {"anyOf": [{"type": "string"}, {"not": {"type": "integer"}}]}}}},
     "#/properties/a~1b/items/anyOf/1", "not"),
    ({"$defs": {"n": {"type": "number", "multipleOf": 1e-300}}, "properties": {"a": {"$ref": "#/$defs/n"}}},
     "#/$defs/n", "multipleOf"),
    ({"properties": {"a": {"$ref": "https://example.com/x"}}}, "#/properties/a", "$ref"),
    ({"oneOf": [{"type": "string", "pattern": "a.*"}, {"type": "string", "pattern": ".*b"}]}, "#", "oneOf"),
    ({"allOf": [{}, {"type": "array", "prefixItems": [{}, {"type": "integer", "minimum": 3, "maximum": 1}],
                     "minItems": 2}]},
     "#/allOf/1/prefixItems/1", "minimum"),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "path", "keyword"), PLACES)
def test_the_keyword_that_is_to_blame_is_named_with_its_place(
    trials: CompileChecker, schema: Any, path: str, keyword: str
) -> None:
    assert trials.compile_error(grammar(schema)).endswith(f"(at {path}, keyword {keyword!r})")


def test_what_compiles_has_nothing_against_it(trials: CompileChecker) -> None:
    assert [trials.compile_error(grammar({"enum": [number]})) for number in range(3)] == ["", "", ""]
    assert len(processes()) == 1  # one process for all


@pytest.mark.slow
def test_one_that_compiles_for_ever_ends_and_the_next_is_tried(trials: CompileChecker) -> None:
    with ThreadPoolExecutor(1) as thread:
        hostile = thread.submit(trials.compile_error, grammar(FOREVER))
        assert trials.compile_error(grammar({"type": "string"})) == ""
        assert hostile.result() == TOO_MUCH
    assert trials.compile_error(grammar({"type": "string"})) == ""


def test_a_process_that_is_killed_is_replaced(trials: CompileChecker) -> None:
    assert trials.compile_error(grammar({"type": "string"})) == ""
    [process] = processes()
    process.kill()
    assert until(lambda: process.status() == psutil.STATUS_ZOMBIE)
    assert trials.compile_error(grammar({"type": "string"})) == TOO_MUCH  # what was in its hands when it died
    assert trials.compile_error(grammar({"type": "string"})) == ""


def test_a_trial_needs_no_low_number_for_its_pipe(trials: CompileChecker) -> None:
    """select() stops at 1024; a server has more connections than that."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit[1], limit[1]))
    with contextlib.ExitStack() as opened:
        for _ in range(1100):
            opened.callback(os.close, os.open(os.devnull, os.O_RDONLY))
        assert trials.compile_error(grammar({"type": "string"})) == ""
    resource.setrlimit(resource.RLIMIT_NOFILE, limit)
    assert trials.compile_error(grammar({"type": "integer"})) == ""


def test_one_that_is_killed_leaves_no_core(
    trials: CompileChecker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert trials.compile_error(grammar({"type": "string"})) == ""
    [process] = processes()
    assert process.rlimit(psutil.RLIMIT_CORE) == (0, 0)


def test_none_is_left_when_trials_are_closed(trials: CompileChecker) -> None:
    assert trials.compile_error(grammar({"type": "string"})) == ""
    trials.close()
    assert processes() == []


# --------------------------------------------------------------------------------------------------- what is remembered


def test_a_thing_is_made_once_for_all_who_ask() -> None:
    made: list[str] = []
    asked = CompileCache(lambda text: made.append(text) or len(made), seconds=60)
    assert [asked(text).result() for text in ("a", "b", "a")] == [1, 2, 1] or made == ["b", "a"]
    assert sorted(made) == ["a", "b"]


def test_failures_are_remembered_and_lateness_is_not() -> None:
    gate, tries = threading.Event(), []

    def make(text: str) -> str:
        tries.append(text)
        assert gate.wait(60)
        raise ValueError(text)

    asked = CompileCache(make, seconds=60)
    busy = [asked(str(each)) for each in range(remembered.THREADS)]
    assert until(lambda: len(tries) == remembered.THREADS)
    asked.seconds = -1  # what waits now has waited too long
    late = asked("late")
    gate.set()
    assert isinstance(late.exception(60), CompileTimeout) and "late" not in tries
    assert [str(each.exception(60)) for each in busy] == ["0", "1"]
    assert asked("0") is busy[0] and asked("late") is not late


def test_the_oldest_go_when_there_are_many_or_they_are_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remembered, "ENTRIES", 3)
    monkeypatch.setattr(remembered, "MAX_BYTES", 10)
    monkeypatch.setattr(remembered, "ENTRY_BYTES", 0)
    monkeypatch.setattr(remembered, "BYTES_PER_CHARACTER", 1)
    asked = CompileCache(str.upper, seconds=60)
    first = asked("a")
    assert asked("a") is first
    for text in "bcd":
        assert asked(text).result() == text.upper()
    again = asked("a")
    assert again is not first and again.result() == "A"
    assert asked("x" * 9).result() == "X" * 9  # and all but one of the others went
    assert asked("a") is again and asked("d").result() == "D"
