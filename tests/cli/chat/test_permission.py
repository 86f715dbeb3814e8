"""No call runs that the user has not allowed."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from quintet.cli.chat.permission import REFUSED, Toolbox


class Recorded:
    """A tool that remembers its calls."""

    description = "Does it"
    parameters: dict[str, Any] = {"type": "object"}

    def __init__(self, name: str, does: Callable[[], str] = lambda: "done") -> None:
        self.name, self._does, self.calls = name, does, list[dict[str, Any]]()

    def run(self, arguments: dict[str, Any]) -> str:
        self.calls.append(arguments)
        return self._does()


def message(*names: str) -> dict[str, Any]:
    calls = [{"id": f"id{at}", "function": {"name": name, "arguments": '{"a":\t1}'}} for at, name in enumerate(names)]
    return {"role": "assistant", "content": None, "tool_calls": calls}


def interrupt() -> str:
    raise KeyboardInterrupt


def answered(said: Iterator[str] | None, tools: list[Recorded], *names: str, allowed: Any = ()) -> Any:
    """-> (contents of the results, what was shown, whether it was stopped)"""
    shown: list[str] = []
    ask = None if said is None else lambda question: next(said)
    box = Toolbox({each.name: each for each in tools}, allowed, shown.append, ask)
    results, stopped = box.run_calls(message(*names))
    assert [each["tool_call_id"] for each in results] == [f"id{at}" for at in range(len(names))]
    return [each["content"] for each in results], shown, stopped


@pytest.mark.parametrize(
    ("typed", "runs"),
    [
        (["y", "n"], [True, False]),
        (["", "YES "], [False, True]),
        (["perhaps", "no", "y"], [False, True]),
        (["a"], [True, True]),
    ],
)
def test_each_call_is_asked_about(typed: list[str], runs: list[bool]) -> None:
    tool = Recorded("f")
    results, shown, stopped = answered(iter(typed), [tool], "f", "f")
    assert results == ["done" if each else REFUSED for each in runs] and not stopped
    assert tool.calls == [{"a": 1}] * sum(runs)
    assert shown[0] == 'call: f {"a":\\t1}'  # as it is, and harmless


def test_always_is_for_this_tool_alone() -> None:
    tools = [Recorded("f"), Recorded("g")]
    results, _, _ = answered(iter(["a", "n"]), tools, "f", "f", "g", "f")
    assert results == ["done", "done", REFUSED, "done"] and not tools[1].calls


def test_without_a_terminal_only_what_a_flag_allows_runs() -> None:
    tools = [Recorded("f"), Recorded("g")]
    results, shown, _ = answered(None, tools, "f", "g", allowed=["g"])
    assert results == [REFUSED, "done"] and not tools[0].calls
    assert "(cannot ask for permission without a terminal; --allow-tool f lets it run)" in shown


def test_a_tool_that_is_not_there_is_not_asked_about() -> None:
    results, _, _ = answered(iter([]), [Recorded("f")], "e")
    assert results == ["error: unknown tool 'e'; did you mean 'f'?"] or results[0].startswith("error: unknown tool 'e'")
    with pytest.raises(ValueError, match="--allow-tool: unknown tool 'e'"):
        answered(None, [Recorded("f")], allowed=["e"])


def test_ctrl_c_stops_this_call_and_those_after_it() -> None:
    tools = [Recorded("f", interrupt), Recorded("g")]
    results, _, stopped = answered(None, tools, "f", "g", allowed=["f", "g"])
    assert stopped and results == ["The user stopped this call.", REFUSED] and not tools[1].calls
