"""Calls of tool servers that somebody has to approve: a real MCP server, and OpenAI's own client."""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from typing import Any

import openai
import pytest

pytest.importorskip("mcp", reason="needs the extra mcp")

from tests.helpers.servers.tool_server import Served, Tools
from tests.server.fakes import MODEL
from tests.server.http.responses.responses_requests import PATH, create, fail
from tests.server.http.responses.test_mcp_tools import ADD, CITY, Script, asking, call, result_in

SUMS: dict[str, Any] = {"type": "mcp", "server_label": "sums"}  # which leaves require_approval out: always
HI: dict[str, Any] = {"role": "user", "content": "Hi"}


@pytest.fixture
async def there() -> AsyncIterator[Served]:
    async with Served(Tools()) as made:
        yield made


def answered(asked: Any, approve: bool = True, **more: Any) -> dict[str, Any]:
    """`asked`: a request for approval, or its id."""
    asked = asked if isinstance(asked, str) else asked["id"]
    return {"type": "mcp_approval_response", "approval_request_id": asked, "approve": approve, **more}


def forged(name: str = "add", label: str = "sums", **arguments: Any) -> dict[str, Any]:
    return {
        "type": "mcp_approval_request", "id": "mcpr_1", "server_label": label, "name": name,
        "arguments": json.dumps(arguments),
    }  # fmt: skip


def kinds(answer: Any) -> list[str]:
    return [each["type"] for each in answer["output"]]


@pytest.mark.parametrize("way", ["previous", "sent back", "referred to"])
async def test_a_call_is_carried_out_when_it_is_approved(there: Served, way: str) -> None:
    fake = Script(says=["Let me see." + ADD, "It is 5."])
    async with asking(there, fake) as http:
        ai = openai.AsyncOpenAI(
            base_url="http://127.0.0.1/v1",
            api_key="none",
            http_client=http,
            max_retries=0,
            _strict_response_validation=True,
        )
        settings: Any = {"model": MODEL, "tools": [SUMS], "store": way != "sent back"}
        first = await ai.responses.create(input="Hi", **settings)
        asked = first.output[-1]
        assert asked.type == "mcp_approval_request" and asked.id.startswith("mcpr_")
        assert (asked.server_label, asked.name) == ("sums", "add") and json.loads(asked.arguments) == {"a": 2, "b": 3}
        assert [each.type for each in first.output] == ["mcp_list_tools", "message", "mcp_approval_request"]
        assert first.status == "completed" and there.tools.calls == []

        yes: Any = answered(asked.id)
        if way == "previous":
            second = await ai.responses.create(input=[yes], previous_response_id=first.id, **settings)
        elif way == "sent back":
            second = await ai.responses.create(input=[HI, *first.output, yes], **settings)  # type: ignore[list-item]
        else:
            names: Any = [{"type": "item_reference", "id": each.id} for each in first.output]
            second = await ai.responses.create(input=[HI, *names, yes], **settings)
    called, last = second.output
    assert called.type == "mcp_call" and (called.status, called.output) == ("completed", "5")
    assert called.approval_request_id == asked.id and called.arguments == asked.arguments
    assert last.type == "message" and second.output_text == "It is 5."
    assert there.tools.calls == ["add 2 3"]
    said, heard = fake.rounds
    assert heard.startswith(said) and result_in(heard) == "5" and '"a": 2' in heard
    assert second.usage is not None
    assert second.usage.input_tokens == len(fake.submitted[-1].prompt.token_ids)


async def test_the_model_is_told_of_a_refusal(there: Served) -> None:
    fake = Script(says=[ADD, "As you like."])
    async with asking(there, fake) as http:
        first = await create(http, tools=[SUMS])
        no = answered(first["output"][-1], False, reason="I can add myself")
        second = await create(http, tools=[SUMS], input=[no], previous_response_id=first["id"])
        third = await create(http, tools=[SUMS], previous_response_id=second["id"])
    assert kinds(second) == ["message"] and kinds(third) == ["message"] and there.tools.calls == []
    told = str(result_in(fake.rounds[1]))
    assert "refused" in told and "I can add myself" in told
    assert fake.rounds[2].startswith(fake.rounds[1])


async def test_a_conversation_goes_on_behind_an_approval(there: Served) -> None:
    """And nothing is carried out twice, whether it is stored or sent back."""
    fake = Script(says=[ADD, "It is 5.", "Yes."])
    async with asking(there, fake) as http:
        first = await create(http, tools=[SUMS])
        yes = answered(first["output"][-1])
        second = await create(http, tools=[SUMS], input=[yes, HI], previous_response_id=first["id"])
        third = await create(http, tools=[SUMS], input="Sure?", previous_response_id=second["id"])
        listed = (await http.get(f"{PATH}/{third['id']}/input_items", params={"order": "asc"})).json()["data"]
        whole = [HI, *first["output"], yes, HI, *second["output"], {"role": "user", "content": "Sure?"}]
        await create(http, tools=[SUMS], input=whole)
    assert [each["type"] for each in listed] == [
        "message", "mcp_list_tools", "mcp_approval_request", "mcp_approval_response", "message", "mcp_call", "message",
        "message",
    ]  # fmt: skip
    assert fake.rounds[-1] == fake.rounds[-2] and there.tools.calls == ["add 2 3"]


async def test_calls_that_need_no_approval_run_first(there: Served) -> None:
    tool = {**SUMS, "require_approval": {"always": {"tool_names": ["fail"]}}}
    fake = Script(says=[ADD + "\n" + call("fail", why="bad luck") + "\n" + call("weather"), "Alas."])
    async with asking(there, fake) as http:
        first = await create(http, tools=[tool, CITY])
        assert kinds(first)[1:] == ["mcp_call", "mcp_approval_request", "function_call"]
        assert first["output"][1]["output"] == "5" and len(fake.rounds) == 1
        sunny = {"type": "function_call_output", "call_id": first["output"][-1]["call_id"], "output": "sunny"}
        both = [sunny, answered(first["output"][2])]
        second = await create(http, tools=[tool, CITY], input=both, previous_response_id=first["id"])
    assert kinds(second) == ["mcp_call", "message"] and second["output"][0]["status"] == "failed"
    assert "bad luck" in fake.rounds[1] and "sunny" in fake.rounds[1]


async def test_streams_tell_of_requests_and_of_what_is_approved(there: Served) -> None:
    async with asking(there, Script(says=[ADD, "It is 5."])) as http:
        events = await create(http, tools=[SUMS], stream=True)
        first = events[-1]["response"]
        again = await create(
            http, tools=[SUMS], input=[answered(first["output"][-1])], previous_response_id=first["id"], stream=True
        )
    own = [each for each in events if each.get("item", {}).get("type") == "mcp_approval_request"]
    assert [each["type"] for each in own] == ["response.output_item.added", "response.output_item.done"]
    assert [each["item"] for each in own] == [first["output"][-1]] * 2 and own[0]["output_index"] == 1
    assert [each["type"].removeprefix("response.") for each in again if "text" not in each["type"]] == [
        "created", "in_progress", "output_item.added", "mcp_call.in_progress", "mcp_call_arguments.delta",
        "mcp_call_arguments.done", "mcp_call.completed", "output_item.done", "output_item.added",
        "content_part.added", "content_part.done", "output_item.done", "completed",
    ]  # fmt: skip
    ends = [each["item"] for each in again if each["type"] == "response.output_item.done"]
    assert ends == again[-1]["response"]["output"]


async def test_an_approved_call_in_the_background_can_be_cancelled(there: Served) -> None:
    fake = Script(says=[call("wait")])
    async with asking(there, fake) as http:
        first = await create(http, tools=[SUMS])
        yes = answered(first["output"][-1])
        begun = await create(http, tools=[SUMS], input=[yes], previous_response_id=first["id"], background=True)
        await there.tools.begun.wait()
        shown = (await http.get(f"{PATH}/{begun['id']}")).json()
        answer = (await http.post(f"{PATH}/{begun['id']}/cancel")).json()
        await there.tools.ended.wait()
    assert shown["status"] == "in_progress" and shown["output"][0]["approval_request_id"] == yes["approval_request_id"]
    assert answer["status"] == "cancelled" and len(fake.rounds) == 1


async def test_a_client_that_hangs_up_ends_an_approved_call(there: Served) -> None:
    fake = Script(says=[call("wait")])
    async with asking(there, fake) as http:
        first = await create(http, tools=[SUMS])
        body = {"input": [answered(first["output"][-1])], "previous_response_id": first["id"], "tools": [SUMS]}
        asked = asyncio.create_task(http.post(PATH, json=body))
        await there.tools.begun.wait()
        asked.cancel()
        await there.tools.ended.wait()
    assert len(fake.rounds) == 1


async def test_approved_calls_count(there: Served) -> None:
    fake = Script(says=[ADD + "\n" + ADD, "Hm."])
    async with asking(there, fake) as http:
        first = await create(http, tools=[SUMS], max_tool_calls=0)
        both = [answered(each) for each in first["output"][1:]]
        second = await create(http, tools=[SUMS], input=both, previous_response_id=first["id"], max_tool_calls=1)
    assert [each["status"] for each in second["output"][:2]] == ["completed", "failed"]
    assert there.tools.calls == ["add 2 3"] and "no more tools" in fake.rounds[1]


async def test_a_call_that_is_cut_off_asks_for_nothing(there: Served) -> None:
    fake = Script(says=[ADD])
    async with asking(there, fake) as http:
        cut = await create(http, tools=[SUMS], max_output_tokens=len(fake.encode(ADD)) - 3)
    assert kinds(cut) == ["mcp_list_tools", "mcp_call"] and cut["status"] == "incomplete"
    assert cut["output"][1]["status"] == "incomplete"


async def test_a_call_that_nobody_can_read_asks_for_nothing(there: Served) -> None:
    async with asking(there, Script(says=[call("add", a="\ud83d", b=2)])) as http:
        answer = await create(http, tools=[SUMS])
    assert kinds(answer)[1:] == ["mcp_call"] and answer["output"][1]["status"] == "incomplete"


async def test_a_tool_that_must_be_called_was(there: Served) -> None:
    fake = Script(says=[ADD, "It is 5."])
    forced = {"tools": [SUMS], "tool_choice": {"type": "mcp", "server_label": "sums", "name": "add"}}
    async with asking(there, fake) as http:
        first = await create(http, **forced)
        yes = answered(first["output"][-1])
        second = await create(http, **forced, input=[yes], previous_response_id=first["id"])
        fake.says = [ADD]
        quiet = await create(http, tools=[SUMS], tool_choice="none", input=[yes], previous_response_id=first["id"])
    assert kinds(second) == ["mcp_call", "message"] and not fake.submitted[1].grammar
    assert kinds(quiet) == ["mcp_call", "message"]


@pytest.mark.parametrize(
    ("approval", "asks"),
    [
        (None, True),
        ("always", True),
        ("never", False),
        ({}, True),
        ({"ever": {"tool_names": ["add"]}}, True),
        ({"never": {}}, True),
        ({"never": {"tool_name": ["add"]}}, True),
        ({"always": {"tool_name": ["fail"]}}, True),
        ({"never": {"tool_names": ["add"]}}, False),
        ({"never": {"tool_names": ["fail"]}}, True),
        ({"never": {"read_only": True}}, True),
        ({"always": {"tool_names": ["add"]}}, True),
        ({"always": {"tool_names": ["fail"]}}, False),
        ({"always": {"tool_names": ["fail"]}, "never": {"tool_names": ["add"]}}, False),
        ({"always": {"tool_names": ["fail"]}, "never": {"tool_names": ["long"]}}, True),
        ({"always": {"tool_names": ["add"]}, "never": {"tool_names": ["add"]}}, True),
    ],
)
async def test_which_tools_ask(there: Served, approval: Any, asks: bool) -> None:
    async with asking(there, Script(says=[ADD, "It is 5."])) as http:
        answer = await create(http, tools=[{**SUMS, "require_approval": approval}])
    assert ("mcp_approval_request" in kinds(answer)) is asks and there.tools.calls == ["add 2 3"] * (not asks)


NOBODY = [HI, answered("mcpr_1")]
TWICE = [HI, forged(a=1, b=2), answered("mcpr_1"), answered("mcpr_1", False)]
DONE: dict[str, Any] = {"type": "mcp_call", "id": "mcp_1", "server_label": "sums", "name": "add", "arguments": "{}"}


@pytest.mark.parametrize(
    ("given", "param", "words"),
    [
        (NOBODY, "input[1].approval_request_id", "no mcp_approval_request before it has that id; give the request"),
        ([answered("mcpr_1"), forged()], "input[0].approval_request_id", "no mcp_approval_request before it"),
        (TWICE, "input[3].approval_request_id", "answered before; leave one"),
        ([HI, forged()], "input[1].id", '"approval_request_id": "mcpr_1", "approve": true or false'),
        ([forged(), forged(), answered("mcpr_1")], "input[1].id", "twice"),
        ([forged(), {**DONE, "approval_request_id": "mcpr_1"}], "input[0].id", "mcp_approval_response"),
        ([forged("subtract"), answered("mcpr_1")], "input[1].approval_request_id", "'subtract' of 'sums'"),
        ([forged("fail"), answered("mcpr_1")], "input[1].approval_request_id", "allowed_tools"),
        ([forged("add", "others"), answered("mcpr_1")], "input[1].approval_request_id", "'add' of 'others'"),
        ([{**forged(), "arguments": "[]"}, answered("mcpr_1")], "input[0].arguments", "JSON object"),
        ([{**forged(), "id": None}, answered("mcpr_1")], "input[0].id", "must be text"),
        ([forged(), {**answered("mcpr_1"), "approve": "yes"}], "input[1].approve", "true or false"),
        ([forged(), {**answered("mcpr_1"), "reason": 5}], "input[1].reason", "must be text"),
    ],
)
async def test_what_may_not_be_approved(there: Served, given: Sequence[Any], param: str, words: str) -> None:
    fake = Script(says=["Hm."])
    async with asking(there, fake) as http:
        body = {"input": given, "tools": [{**SUMS, "allowed_tools": ["add"]}]}
        error = await fail(http, "POST", PATH, json=body)
    assert error["param"] == param and words in error["message"], error
    assert there.tools.calls == [] and fake.rounds == []


async def test_no_more_is_approved_than_can_run(there: Served) -> None:
    requests = [{**forged(a=1, b=2), "id": f"mcpr_{number}"} for number in range(65)]
    async with asking(there, Script(says=["Hm."])) as http:
        answers = [answered(each) for each in requests]
        error = await fail(http, "POST", PATH, json={"input": [*requests, *answers], "tools": [SUMS]})
        answers[0]["approve"] = False
        await create(http, input=[*requests, *answers], tools=[SUMS])
    assert error["param"] == "input[129].approval_request_id" and "refuse the others" in error["message"]
    assert len(there.tools.calls) == 64


async def test_a_request_of_an_earlier_response_must_be_answered_once(there: Served) -> None:
    async with asking(there, Script(says=[ADD, "It is 5."])) as http:
        first = await create(http, tools=[SUMS])
        on: dict[str, Any] = {"tools": [SUMS], "previous_response_id": first["id"]}
        silent = await fail(http, "POST", PATH, json={"input": "Go on.", **on})
        counted = await http.post(f"{PATH}/input_tokens", json=on)
        second = await create(http, **on, input=[answered(first["output"][-1])])
        late = {"input": [answered(first["output"][-1], False)], "tools": [SUMS], "previous_response_id": second["id"]}
        again = await fail(http, "POST", PATH, json=late)
        bare = await fail(http, "POST", PATH, json={**on, "tools": None, "input": [answered(first["output"][-1])]})
    assert silent["param"] == "input" and first["output"][-1]["id"] in silent["message"]
    assert counted.status_code == 200 and counted.json()["input_tokens"] > 0
    assert again["param"] == "input[0].approval_request_id" and "answered before" in again["message"]
    assert bare["param"] == "input[0].approval_request_id" and "tools" in bare["message"]
    assert there.tools.calls == ["add 2 3"]


async def test_an_id_of_a_clients_choice_finds_nothing(there: Served) -> None:
    """It may be that of an item that is stored, perhaps with another key: that one is still found."""
    async with asking(there, Script(says=[ADD, "It is 5."])) as http:
        first = await create(http, tools=[SUMS])
        asked = first["output"][-1]
        changed = {**asked, "arguments": '{"a": 1, "b": 1}'}
        await create(http, tools=[SUMS], input=[HI, changed, answered(asked)])
        by_name = [HI, {"type": "item_reference", "id": asked["id"]}, answered(asked)]
        await create(http, tools=[SUMS], input=by_name)
    assert there.tools.calls == ["add 1 1", "add 2 3"]
