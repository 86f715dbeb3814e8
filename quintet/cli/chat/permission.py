"""Permission to run tool calls: the user grants it call by call, or in advance."""

from collections.abc import Callable, Collection, Mapping
from typing import Any

from quintet.cli.chat.tool import ToolInvocation, UserTool, printable, run_tool, tool_definition
from quintet.common.suggestions import unknown_name_error

_SHOWN = 300  # characters of a result
_QUESTION = "run it? [y]es, [n]o, [a]lways this tool: "
REFUSED = "The user did not allow this call."


class Toolbox:
    """The tools of a conversation, and which of them may run unasked."""

    def __init__(
        self,
        tools: Mapping[str, UserTool],
        allowed: Collection[str],
        say: Callable[[str], None],
        ask: Callable[[str], str] | None,
    ) -> None:
        """`ask` shows a question and returns what was typed; None: there is no user, and only tools in `allowed` run.

        ValueError if a tool that is allowed is not there.
        """
        for name in allowed:
            if name not in tools:
                raise ValueError(f"--allow-tool: {unknown_name_error('tool', name, tools)}")
        self._tools, self._allowed = tools, set(allowed)
        self._say, self._ask = say, ask

    @property
    def specs(self) -> list[dict[str, Any]]:
        """Tool definitions as the model gets them."""
        return [tool_definition(each) for each in self._tools.values()]

    def run_calls(self, message: Mapping[str, Any]) -> tuple[list[dict[str, Any]], bool]:
        """The results of a message's calls, one for each, and whether Ctrl-C stopped them."""
        results, stopped = [], False
        for call in message.get("tool_calls", ()):
            function = call["function"]
            try:
                result = REFUSED if stopped else self._result(ToolInvocation(function["name"], function["arguments"]))
            except KeyboardInterrupt:
                result, stopped = "The user stopped this call.", True
            results.append({"role": "tool", "tool_call_id": call["id"], "content": result})
        return results, stopped

    def _result(self, call: ToolInvocation) -> str:
        self._say(f"call: {call.one_line}")
        if call.name in self._tools and not self._is_allowed(call.name):
            self._say("not run")
            return REFUSED
        result = run_tool(self._tools, call)
        cut = " ..." if len(result) > _SHOWN else ""
        self._say(f"result: {printable(result[:_SHOWN])}{cut}")
        return result

    def _is_allowed(self, name: str) -> bool:
        if name in self._allowed:
            return True
        if self._ask is None:
            self._say(f"(cannot ask for permission without a terminal; --allow-tool {name} lets it run)")
            return False
        while True:
            answer = self._ask(_QUESTION).strip().lower()
            if answer in ("a", "always"):
                self._allowed.add(name)
            if answer in ("a", "always", "y", "yes", "n", "no", ""):
                return answer[:1] in ("a", "y")
