"""POST /v1/responses over a fake engine: the answer, its events, the conversation, and what is refused."""

import json
from typing import Any

import pytest

from tests.server.fakes import LOGPROB, FakeBackend
from tests.server.http.responses.responses_requests import PATH, SAY, backend, create, create_once, fail
from tests.server.http.serving import client

LOGPROBS: dict[str, Any] = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
BEGIN = ["response.created", "response.in_progress", "response.output_item.added", "response.content_part.added"]
END = ["response.output_text.done", "response.content_part.done", "response.output_item.done"]


def text_of(response: dict[str, Any]) -> str:
    [message] = response["output"]
    [part] = message["content"]
    return str(part["text"])


async def test_an_answer_says_what_was_asked_and_what_it_cost() -> None:
    fake = backend(cached=3)
    answer = await create_once(
        fake, instructions="Be kind.", temperature=0.5, top_p=0.9, max_output_tokens=40, metadata={"a": "b"}, user="me"
    )
    assert text_of(answer) == SAY and answer["status"] == "completed" and answer["completed_at"] >= answer["created_at"]
    same = ("instructions", "temperature", "top_p", "max_output_tokens", "metadata", "user")
    assert [answer[name] for name in same] == ["Be kind.", 0.5, 0.9, 40, {"a": "b"}, "me"]
    prompt, output = len(fake.submitted[0].prompt.token_ids), len(fake.reply or ()) + 1  # and end-of-text
    assert answer["usage"] == {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": 3, "cache_write_tokens": 0},
        "output_tokens": output,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": prompt + output,
    }
    assert fake.submitted[0].prompt.text == "<s><|system|>Be kind.<|end|><|user|>Hi<|end|><|assistant|>"


@pytest.mark.parametrize("burst", [1, 3, 100])
@pytest.mark.parametrize("fields", [{}, LOGPROBS, {"max_output_tokens": 4}, {"stop": "you"}])
async def test_a_stream_is_the_answer_in_pieces(fields: dict[str, Any], burst: int) -> None:
    whole = await create_once(**fields)
    made = await create_once(backend(burst=burst), **fields, stream=True)
    last = "response.incomplete" if "max_output_tokens" in fields else "response.completed"
    deltas = [event for event in made if event["type"] == "response.output_text.delta"]
    assert [event["type"] for event in made] == [*BEGIN, *(each["type"] for each in deltas), *END, last]
    done, part, item = made[-4:-1]
    assert "".join(each["delta"] for each in deltas) == done["text"] == part["part"]["text"] == text_of(whole)
    assert {each["item_id"] for each in (*deltas, done, part)} == {item["item"]["id"]}
    scores = [score for each in deltas for score in each["logprobs"]]
    assert scores == done["logprobs"][: len(scores)] and len(scores) >= len(done["logprobs"]) - 1  # end-of-text
    end = made[-1]["response"]
    assert end["output"] == [item["item"]] and made[0]["response"]["output"] == []
    for answer in (whole, end):
        answer["output"][0]["id"] = answer["id"] = answer["created_at"] = answer["completed_at"] = None
    assert end == whole


async def test_an_answer_that_is_cut_says_so() -> None:
    answer = await create_once(max_output_tokens=4)
    assert answer["status"] == "incomplete" and answer["incomplete_details"] == {"reason": "max_output_tokens"}
    assert answer["output"][0]["status"] == "incomplete" and answer["completed_at"] is None


async def test_log_probabilities_come_where_they_are_included() -> None:
    answer = await create_once(**LOGPROBS)
    scores = answer["output"][0]["content"][0]["logprobs"]
    assert len(scores) == answer["usage"]["output_tokens"]
    assert scores[0]["logprob"] == LOGPROB and len(scores[0]["top_logprobs"]) == 2
    assert bytes(scores[0]["bytes"]).decode() == scores[0]["token"] == scores[0]["top_logprobs"][0]["token"]
    bare = await create_once(include=LOGPROBS["include"])
    assert bare["output"][0]["content"][0]["logprobs"][0]["top_logprobs"] == []
    assert (await create_once())["output"][0]["content"][0]["logprobs"] == []


async def test_the_parts_of_an_input_become_messages() -> None:
    fake = backend()
    await create_once(
        fake,
        input=[
            {"role": "developer", "content": "Be brief."},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "One?"}]},
            {
                "id": "msg_1", "type": "message", "role": "assistant", "status": "completed",
                "content": [{"type": "output_text", "text": "Two.", "annotations": [], "logprobs": []}],
            },
            {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
            {"role": "user", "content": "Three?"},
        ],
    )  # fmt: skip
    assert fake.submitted[0].prompt.text == (
        "<s><|system|>Be brief.<|end|><|user|>One?<|end|><|assistant|>Two.<|end|><|assistant|>No.<|end|>"
        "<|user|>Three?<|end|><|assistant|>"
    )


async def test_a_conversation_goes_on_without_its_instructions() -> None:
    fake = backend()
    async with client(fake) as http:
        first = await create(http, input="One?", instructions="Be kind.", stream=False)
        events = await create(http, input="Two?", previous_response_id=first["id"], stream=True)
        second = events[-1]["response"]
        third = await create(http, input="Three?", previous_response_id=second["id"], instructions="Be brief.")
    assert second["previous_response_id"] == first["id"] and third["instructions"] == "Be brief."
    turn = f"<|end|><|assistant|>{SAY}<|end|>"
    assert fake.submitted[1].prompt.text == f"<s><|user|>One?{turn}<|user|>Two?<|end|><|assistant|>"
    assert fake.submitted[2].prompt.text == (
        f"<s><|system|>Be brief.<|end|><|user|>One?{turn}<|user|>Two?{turn}<|user|>Three?<|end|><|assistant|>"
    )


async def test_a_failure_before_the_first_token_is_a_status() -> None:
    async with client(backend(fail_at=0)) as http:
        for stream in (False, True):
            error = await fail(http, "POST", PATH, 500, json={"input": "Hi", "stream": stream})
            assert "the fake failed" in error["message"]


async def test_a_failure_on_the_way_ends_the_stream_and_is_stored() -> None:
    async with client(backend(fail_at=2)) as http:
        made = await create(http, stream=True)
        failed = made[-1]["response"]
        assert made[-1]["type"] == "response.failed" and failed["status"] == "failed"
        assert failed["error"]["code"] == "server_error" and "the fake failed" in failed["error"]["message"]
        assert failed["output"][0]["status"] == "incomplete"
        assert (await http.get(f"{PATH}/{failed['id']}")).json() == failed
        error = await fail(http, "POST", PATH, json={"input": "Hi", "previous_response_id": failed["id"]})
        assert "failed" in error["message"] and error["param"] == "previous_response_id"


LONG = [
    {"role": "system", "content": "Be kind."},
    *(
        {"role": role, "content": f"{number} {role} " + "word " * 30}
        for number in range(6)
        for role in ("user", "assistant")
    ),
    {"role": "user", "content": "And now?"},
]


async def test_truncation_drops_the_oldest_messages_and_keeps_the_system() -> None:
    fake = backend()
    async with client(fake) as http:
        error = await fail(http, "POST", PATH, json={"input": LONG})
        assert error["code"] == "context_length_exceeded" and "truncation" in error["message"]
        await create(http, input=LONG, truncation="auto", instructions="In rhymes.", max_output_tokens=100)
        prompt = fake.submitted[0].prompt
        assert len(prompt.token_ids) <= fake.max_model_len - 100
        assert prompt.text is not None
        assert prompt.text.startswith("<s><|system|>In rhymes.<|end|><|system|>Be kind.<|end|><|user|>")
        assert "0 user" not in prompt.text and prompt.text.endswith("<|user|>And now?<|end|><|assistant|>")
        kept = next(number for number in range(6) if f"{number} user" in prompt.text)
        more = [LONG[0], *LONG[1 + 2 * (kept - 1) :]]  # one turn more would not have fitted
        bare = await fail_or_size(http, fake, more)
        assert bare > fake.max_model_len - 100
        error = await fail(http, "POST", PATH, json={"input": "word " * 2000, "truncation": "auto"})
        assert error["code"] == "context_length_exceeded"


async def fail_or_size(http: Any, fake: FakeBackend, given: list[Any]) -> int:
    """Tokens of the prompt that an input comes to."""
    answer = await http.post(PATH, json={"input": given, "instructions": "In rhymes.", "max_output_tokens": 1})
    return fake.max_model_len if answer.status_code == 400 else len(fake.submitted[-1].prompt.token_ids)


_AT = "input[0].content[0]"


def _holding(role: str, **part: Any) -> dict[str, Any]:
    """Returns a body whose input has one part."""
    return {"input": [{"role": role, "content": [part]}]}


BAD: list[tuple[dict[str, Any], str, str]] = [
    ({"inputs": "Hi"}, "inputs", "'input'"),
    ({"input": None}, "input", "null"),
    ({"input": []}, "input", "empty list"),
    ({"input": {"role": "user"}}, "input", "an object"),
    ({"input": [{"role": "user", "content": "Hi"}] * 10_001}, "input", "10000 entries"),
    ({"input": ["Hi"]}, "input[0]", "text"),
    ({"input": [{"role": "usr", "content": "Hi"}]}, "input[0].role", "'user'"),
    ({"input": [{"role": "user"}]}, "input[0].content", "null"),
    ({"input": [{"role": "user", "content": "Hi", "contents": 1}]}, "input[0]", "'content'"),
    ({"input": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]}, "input[0].content[0].type", "text'"),
    (_holding("user", type="input_image"), f"{_AT}.image_url", "must be text"),
    (_holding("user", type="input_image", file_id="f"), f"{_AT}.file_id", "none are kept"),
    (_holding("user", type="input_image", image_url="x"), "input", "text alone"),
    (_holding("assistant", type="input_image"), _AT, "belongs to the role user"),
    (_holding("user", type="input_file"), _AT, "files are not read"),
    ({"input": [{"role": "user", "content": [{"type": "output_text", "text": "a"}]}]}, "input[0].content[0]", "role"),
    ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input[0].content[0].text", "null"),
    ({"input": [{"type": "computer_call"}]}, "input[0]", "no tools"),
    ({"input": [{"type": 5}]}, "input[0].type", "a number"),
    ({"input": "\ud800"}, "", "JSON"),
    ({"tool_choice": "required"}, "tool_choice", "no tools"),
    ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format.schema", "must be a JSON schema"),
    ({"text": {"format": {"type": "json_schema", "name": "a", "schema": {"not": {}}}}}, "text.format", "'not'"),
    ({"text": {"format": {"type": "txt"}}}, "text.format.type", "'text'"),
    ({"text": {"verbosity": "low"}}, "text.verbosity", "how long"),
    ({"text": "plain"}, "text", "an object"),
    ({"reasoning": {"effort": "highest"}}, "reasoning.effort", "'high'"),
    ({"conversation": "conv_1"}, "conversation", "previous_response_id"),
    ({"prompt": {"id": "p"}}, "prompt", "templates"),
    ({"n": 2}, "n", "one answer"),
    ({"max_tokens": 5}, "max_tokens", "max_output_tokens"),
    ({"max_output_tokens": 0}, "max_output_tokens", "from 1"),
    ({"max_output_tokens": "5"}, "max_output_tokens", "integer"),
    ({"temperature": -1}, "temperature", "number"),
    ({"top_p": 0}, "top_p", "number"),
    ({"top_logprobs": 3}, "top_logprobs", "include"),
    ({**LOGPROBS, "top_logprobs": 21}, "top_logprobs", "at most 20"),
    ({"include": ["message.output_text.logprob"]}, "include[0]", "'message.output_text.logprobs'"),
    ({"truncation": "automatic"}, "truncation", "auto"),
    ({"metadata": {"a": 5}}, "metadata.a", "string"),
    ({"metadata": {str(number): "" for number in range(17)}}, "metadata", "16"),
    ({"background": True, "store": False}, "background", "store"),
    ({"previous_response_id": "resp_none"}, "previous_response_id", "not here"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "'include_obfuscation'"),
    ({"stream": 1}, "stream", "boolean"),
]  # fmt: skip


@pytest.mark.parametrize(("body", "param", "word"), BAD)
async def test_what_is_wrong_or_not_served_is_refused_by_name(body: dict[str, Any], param: str, word: str) -> None:
    fake = backend()
    raw = json.dumps({"input": "Hi", **body})
    async with client(fake, strict_requests=True) as http:
        error = await fail(http, "POST", PATH, content=raw, headers={"content-type": "application/json"})
    assert (error["param"] or "") == param and word in error["message"], error
    assert error["type"] == "invalid_request_error" and not fake.submitted


HARMLESS: list[dict[str, Any]] = [
    {"tools": [], "tool_choice": "auto", "parallel_tool_calls": False, "max_tool_calls": 3},
    {"text": {"format": {"type": "text"}, "verbosity": "medium"}},
    {"reasoning": {"effort": None, "summary": "auto"}},
    {"include": ["reasoning.encrypted_content"], "top_logprobs": 0},
    {"service_tier": "auto", "safety_identifier": "a", "prompt_cache_key": "b", "prompt_cache_retention": "24h"},
    {"conversation": None, "prompt": None, "moderation": None, "stream_options": None},
    {"stream_options": {"include_obfuscation": False}, "stream": True},
    {"top_k": 5, "min_p": 0.1, "seed": 7, "cache_salt": "tenant", "priority": 1},
]


@pytest.mark.parametrize("body", HARMLESS)
async def test_what_asks_for_nothing_is_taken(body: dict[str, Any]) -> None:
    assert await create_once(**body)


async def test_vllms_fields_reach_the_engine() -> None:
    fake = backend()
    await create_once(fake, top_k=5, seed=7, cache_salt="tenant", stop=["x"])
    [asked] = fake.submitted
    assert (asked.params.top_k, asked.params.seed, asked.params.stop) == (5, 7, ["x"])
    assert asked.prompt.cache_salt == "tenant"


async def test_many_unknown_names_are_refused_quickly_and_shortly() -> None:
    async with client(backend(), strict_requests=True) as http:
        item = {"role": "user", "content": "Hi", **{f"x{number}": 1 for number in range(50_000)}}
        error = await fail(http, "POST", PATH, json={"input": [item]})
    assert len(error["message"]) < 1000 and "49997 more" in error["message"]
