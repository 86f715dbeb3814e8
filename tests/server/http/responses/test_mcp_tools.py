"""Responses whose calls a tool server carries out: a real MCP server, and a model that says what is written here."""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

pytest.importorskip("mcp", reason="needs the extra mcp")

from tests.helpers.servers.tool_server import Served, Tools
from tests.server.fakes import FakeBackend
from tests.server.http.responses.responses_requests import PATH, create, fail
from tests.server.http.serving import client

SUMS: dict[str, Any] = {"type": "mcp", "server_label": "sums", "require_approval": "never"}
CITY: dict[str, Any] = {"type": "function", "name": "weather", "parameters": {"type": "object", "properties": {}}}


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


ADD = call("add", a=2, b=3)


def result_in(prompt: str) -> str | None:
    """The last one that the bundled model's prompt has."""
    before, mark, after = prompt.rpartition("<|tool|>")
    return after.partition("<|end|>")[0] if mark else None


@dataclass
class Script(FakeBackend):
    """Says one of these in each round, and then the last again."""

    says: Sequence[str] = ()
    max_model_len: int = 4096
    rounds: list[str] = field(default_factory=list)  # the prompts

    def submit(self, wanted: Any, params: Any, priority: int = 0, grammar: str = "") -> None:
        self.reply = self.encode(self.says[min(len(self.rounds), len(self.says) - 1)])
        self.rounds.append(wanted[0].prompt.text or "")
        super().submit(wanted, params, priority, grammar)


@pytest.fixture
async def there() -> AsyncIterator[Served]:
    async with Served(Tools()) as made:
        yield made


def asking(there: Served, fake: FakeBackend) -> httpx.AsyncClient:
    return client(fake, tool_server=(there.url,))


async def test_a_call_is_carried_out_and_the_model_goes_on(there: Served) -> None:
    fake = Script(says=["Let me see." + ADD, "It is 5."])
    async with asking(there, fake) as http:
        answer = await create(http, tools=[SUMS])
        again = await create(http, tools=[SUMS], previous_response_id=answer["id"])
    listed, words, called, last = answer["output"]
    assert listed["type"] == "mcp_list_tools" and listed["server_label"] == "sums"
    assert {each["name"] for each in listed["tools"]} >= {"add", "fail"}
    assert words["content"][0]["text"] == "Let me see."
    assert called["type"] == "mcp_call" and (called["name"], called["server_label"]) == ("add", "sums")
    assert (called["status"], called["output"], called["error"]) == ("completed", "5", None)
    assert json.loads(called["arguments"]) == {"a": 2, "b": 3}
    assert last["content"][0]["text"] == "It is 5." and answer["status"] == "completed"
    assert answer["tools"] == [SUMS]
    assert there.tools.calls == ["add 2 3"]
    prompts = [len(each.prompt.token_ids) for each in fake.submitted[:2]]
    assert prompts[1] > prompts[0] and answer["usage"]["input_tokens"] == sum(prompts)
    assert '"name": "add"' in fake.rounds[0] and result_in(fake.rounds[0]) is None
    assert result_in(fake.rounds[1]) == "5"
    assert fake.rounds[2].startswith(fake.rounds[1]) and [each["type"] for each in again["output"]] == ["message"]


async def test_a_stream_tells_of_each_step(there: Served) -> None:
    async with asking(there, Script(says=[ADD, "It is 5."])) as http:
        events = await create(http, tools=[SUMS], stream=True)
    kinds = [each["type"].removeprefix("response.") for each in events]
    own = [kind for kind in kinds if "delta" not in kind]
    assert own == [
        "created", "in_progress",
        "output_item.added", "mcp_list_tools.in_progress", "mcp_list_tools.completed", "output_item.done",
        "output_item.added", "mcp_call.in_progress", "mcp_call_arguments.done", "mcp_call.completed",
        "output_item.done", "output_item.added", "content_part.added", "output_text.done", "content_part.done",
        "output_item.done", "completed",
    ]  # fmt: skip
    pieces = [each["delta"] for each in events if each["type"] == "response.mcp_call_arguments.delta"]
    done = next(each for each in events if each["type"] == "response.mcp_call_arguments.done")
    assert "".join(pieces) == done["arguments"] and json.loads(done["arguments"]) == {"a": 2, "b": 3}
    ends = [each["item"] for each in events if each["type"] == "response.output_item.done"]
    assert ends == events[-1]["response"]["output"]
    assert ends[1]["output"] == "5"


async def test_a_failure_is_told_to_the_model_and_the_client(there: Served) -> None:
    fake = Script(says=[call("fail", why="no such thing"), "Alas."])
    async with asking(there, fake) as http:
        answer = await create(http, tools=[SUMS])
        events = await create(http, tools=[SUMS], stream=True)
    failed = answer["output"][1]
    assert (failed["status"], failed["output"]) == ("failed", None)
    assert failed["error"]["type"] == "mcp_tool_execution_error"
    assert "no such thing" in failed["error"]["content"][0]["text"]
    assert "no such thing" in str(result_in(fake.rounds[1]))
    assert events[-1]["type"] == "response.completed"


async def test_calls_of_one_turn_run_at_once(there: Served) -> None:
    """One of them waits for what the test does after the other has run."""
    fake = Script(says=[call("wait") + "\n" + ADD, "Done."])
    async with asking(there, fake) as http:
        asked = asyncio.create_task(create(http, tools=[SUMS]))
        await there.tools.begun.wait()
        while not there.tools.calls:
            await asyncio.sleep(0.01)
        there.tools.go_on.set()
        answer = await asked
    assert [each.get("output") for each in answer["output"][1:3]] == ["done", "5"]


async def test_what_the_client_carries_out_ends_the_response(there: Served) -> None:
    fake = Script(says=[ADD + "\n" + call("weather"), "Sunny, and 5."])
    async with asking(there, fake) as http:
        first = await create(http, tools=[SUMS, CITY])
        assert [each["type"] for each in first["output"]] == ["mcp_list_tools", "mcp_call", "function_call"]
        assert first["output"][1]["output"] == "5" and len(fake.rounds) == 1
        given = {"type": "function_call_output", "call_id": first["output"][2]["call_id"], "output": "sunny"}
        second = await create(http, tools=[SUMS, CITY], previous_response_id=first["id"], input=[given])
        assert second["output"][-1]["content"][0]["text"] == "Sunny, and 5."
        assert "sunny" in fake.rounds[1]
        whole = [{"role": "user", "content": "Hi"}, *first["output"], given]
        await create(http, tools=[SUMS, CITY], input=whole)
    assert fake.rounds[2] == fake.rounds[1]


@pytest.mark.parametrize(("most", "ran"), [(0, 0), (1, 1), (3, 3)])
async def test_no_more_calls_than_are_allowed(there: Served, most: int, ran: int) -> None:
    async with asking(there, Script(says=[ADD])) as http:
        answer = await create(http, tools=[SUMS], max_tool_calls=most)
    assert len(there.tools.calls) == ran
    assert answer["status"] == "completed" and "no more tools" in answer["output"][-1]["error"]["content"][0]["text"]
    assert [each["status"] for each in answer["output"][1:]] == ["completed"] * ran + ["failed"] * 2


async def test_max_output_tokens_are_those_of_all_rounds(there: Served) -> None:
    fake = Script(says=[ADD, "one two three four five six seven eight"])
    size = len(fake.encode(ADD)) + 1
    async with asking(there, fake) as http:
        cut = await create(http, tools=[SUMS], max_output_tokens=size + 4)
        fake.rounds.clear()
        none = await create(http, tools=[SUMS], max_output_tokens=size)
        fake.rounds.clear()
        broken = await create(http, tools=[SUMS], max_output_tokens=size - 3)
    assert cut["status"] == "incomplete" and cut["usage"]["output_tokens"] == size + 4
    assert fake.submitted[1].params.max_tokens == 4
    for answer in (cut, none, broken):
        assert answer["incomplete_details"] == {"reason": "max_output_tokens"}
    assert none["output"][-1]["output"] == "5"
    assert broken["output"][-1]["status"] == "incomplete" and len(there.tools.calls) == 2


async def test_tools_may_be_chosen(there: Served) -> None:
    fake = Script(says=["Hm."])
    async with asking(there, fake) as http:
        some = await create(http, tools=[{**SUMS, "allowed_tools": ["add"]}])
        await create(http, tools=[{**SUMS, "allowed_tools": {"tool_names": ["fail", "long"]}}])
        none = await create(http, tools=[{**SUMS, "allowed_tools": {"read_only": True}}])
    assert [each["name"] for each in some["output"][0]["tools"]] == ["add"]
    assert '"fail"' not in fake.rounds[0] and '"add"' not in fake.rounds[1]
    assert none["output"][0]["tools"] == []


async def test_a_tool_of_a_server_may_be_forced(there: Served) -> None:
    fake = Script(says=[ADD, "It is 5."])
    async with asking(there, fake) as http:
        answer = await create(http, tools=[SUMS], tool_choice={"type": "mcp", "server_label": "sums", "name": "add"})
    assert answer["output"][-1]["content"][0]["text"] == "It is 5."
    assert fake.submitted[0].grammar and not fake.submitted[1].grammar


@pytest.mark.parametrize(
    ("tool", "param", "word"),
    [
        ({"server_url": "http://169.254.169.254/"}, "tools[0].server_url", "the operator alone names tool servers"),
        ({"headers": {"a": "b"}}, "tools[0].headers", "the operator alone"),
        ({"authorization": "secret"}, "tools[0].authorization", "the operator alone"),
        ({"connector_id": "connector_gmail"}, "tools[0].connector_id", "the operator alone"),
        ({"server_label": "others"}, "tools[0].server_label", "is no tool server here; there are: sums"),
        ({"server_label": None}, "tools[0].server_label", "must be text"),
        ({"require_approval": "sometimes"}, "tools[0].require_approval", "sometimes"),
        ({"require_approval": {"never": ["add"]}}, "tools[0].require_approval.never", "must be an object"),
        (
            {"require_approval": {"always": {"tool_names": ["ad"]}}},
            "tools[0].require_approval.always",
            "'ad', which the server does not have",
        ),
        ({"allowed_tools": ["subtract"]}, "tools[0].allowed_tools", "'subtract', which the server does not have"),
        ({"allowed_tools": "add"}, "tools[0].allowed_tools", "must be a list"),
    ],
)
async def test_what_a_request_may_not_say(there: Served, tool: Any, param: str, word: str) -> None:
    async with asking(there, Script(says=["Hm."])) as http:
        error = await fail(http, "POST", PATH, json={"input": "Hi", "tools": [{**SUMS, **tool}]})
    assert error["param"] == param and word in error["message"], error


async def test_a_server_is_asked_for_its_tools_once(there: Served) -> None:
    async with asking(there, Script(says=["Hi"])) as http:
        error = await fail(http, "POST", PATH, json={"input": "Hi", "tools": [SUMS, CITY, SUMS]})
    assert error["param"] == "tools[2].server_label" and "names 'sums' twice" in error["message"]


async def test_a_call_that_nobody_can_read_is_not_carried_out(there: Served) -> None:
    """Half of a letter is JSON, and no text."""
    async with asking(there, Script(says=[call("add", a="\ud83d", b=2), "Hi"])) as http:
        answer = await create(http, tools=[SUMS])
        assert [each["status"] for each in answer["output"][1:]] == ["incomplete"] and there.tools.calls == []
        again = await create(http, tools=[SUMS], previous_response_id=answer["id"])
    assert again["output"][-1]["content"][0]["text"] == "Hi"


async def test_two_tools_of_one_name_are_refused(there: Served) -> None:
    async with asking(there, Script(says=["Hm."])) as http:
        error = await fail(http, "POST", PATH, json={"input": "Hi", "tools": [SUMS, {**CITY, "name": "add"}]})
    assert "have the name 'add' twice" in error["message"]


async def test_without_tool_servers_there_are_none() -> None:
    async with client(Script(says=["Hm."])) as http:
        error = await fail(http, "POST", PATH, json={"input": "Hi", "tools": [SUMS]})
    assert error["param"] == "tools[0].server_label" and "--tool-server names some" in error["message"]


async def test_a_server_that_is_gone_is_said(there: Served) -> None:
    async with asking(there, Script(says=["Hm."])) as http:
        await create(http, tools=[SUMS])
        await there.__aexit__(None, None, None)
        error = await fail(http, "POST", PATH, 424, json={"input": "Hi", "tools": [SUMS]})
    assert error["code"] == "tool_server_unavailable" and "the tool server 'sums' does not" in error["message"]
    assert "127.0.0.1" not in error["message"]  # where it is, is nobody's business but the operator's


async def test_a_response_that_is_cancelled_ends_its_call(there: Served) -> None:
    fake = Script(says=[call("wait")])
    async with asking(there, fake) as http:
        begun = await create(http, tools=[SUMS], background=True)
        await there.tools.begun.wait()
        answer = (await http.post(f"{PATH}/{begun['id']}/cancel")).json()
        await there.tools.ended.wait()
    assert answer["status"] == "cancelled" and len(fake.rounds) == 1


async def test_a_client_that_hangs_up_ends_its_call(there: Served) -> None:
    fake = Script(says=[call("wait")])
    async with asking(there, fake) as http:
        asked = asyncio.create_task(http.post(PATH, json={"input": "Hi", "tools": [SUMS]}))
        await there.tools.begun.wait()
        asked.cancel()
        await there.tools.ended.wait()
    assert len(fake.rounds) == 1


async def test_the_input_is_counted_with_the_tools(there: Served) -> None:
    fake = Script(says=["Hm."])
    async with asking(there, fake) as http:
        counted = await http.post(f"{PATH}/input_tokens", json={"input": "Hi", "tools": [SUMS]})
        answer = await create(http, tools=[SUMS])
    assert counted.json()["input_tokens"] == answer["usage"]["input_tokens"]
