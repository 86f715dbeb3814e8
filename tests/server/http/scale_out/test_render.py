"""render, /inference/v1/generate and derender one after the other give what the route itself gives."""

from typing import Any

import httpx
import pytest

from quintet.chat.output_parser import OutputParser
from quintet.chat.prepare import prepare
from quintet.server.http.scale_out import derender
from tests.server.fakes import MODEL, FakeBackend, bundled_tokenizer
from tests.server.http.serving import chat, client, events

GENERATE = "/inference/v1/generate"
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]


def tokens(ids: list[int], scores: Any = None, **more: Any) -> dict[str, Any]:
    """Returns an answer of the generate route."""
    logprobs = None if scores is None else {"content": scores}
    return {"request_id": "a", "choices": [{"token_ids": ids, "logprobs": logprobs}], **more}


SCORE = {"token_id": 1, "logprob": -1.0, "rank": 1}
BAD: list[tuple[dict[str, Any], str]] = [
    (tokens([1], prompt_token_ids=[-1]), "prompt_token_ids"),
    (tokens([1], prompt_token_ids=[2**40]), "prompt_token_ids"),
    (tokens([1], prompt_token_ids=[1] * 600), "prompt_token_ids"),
    ({"request_id": "a", "choices": [{"token_ids": [1]}, {"token_ids": [2]}]}, "choices"),
    (tokens([1], [{**SCORE, "token_id": 2}]), "logprobs"),
    (tokens([1], [{**SCORE, "top_logprobs": [{**SCORE, "token_id": -3}]}]), "logprobs"),
    (tokens([1], [{**SCORE, "top_logprobs": [{**SCORE, "token_id": 10**6}]}]), "logprobs"),
    (tokens([1], [{**SCORE, "top_logprobs": 5}]), "logprobs"),
    (tokens([1], [{**SCORE, "rank": "x"}]), "logprobs"),
    (tokens([1], [{**SCORE, "logprob": "nan"}]), "logprobs"),
    (tokens([1], prompt_token_ids=[1], prompt_logprobs=[{"1": 5}]), "prompt_logprobs"),
    (tokens([1], prompt_token_ids=[1], prompt_logprobs=[{"x": SCORE}]), "prompt_logprobs"),
    (tokens([1], prompt_token_ids=[1], prompt_logprobs=[{"1": SCORE, "-2": SCORE}]), "prompt_logprobs"),
    (tokens([1], prompt_token_ids=[1], prompt_logprobs=[{"2": SCORE}]), "prompt_logprobs"),
]


async def post(http: httpx.AsyncClient, path: str, body: Any) -> Any:
    answered = await http.post(path, json=body)
    assert answered.status_code == 200, answered.text
    return events(answered.text) if body.get("stream") and "derender" not in path and "render" not in path \
        else answered.json()  # fmt: skip


def without(answer: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in answer.items() if name not in ("id", "created", *names)}


@pytest.mark.parametrize(
    "more",
    [
        {}, {"logprobs": True, "top_logprobs": 2}, {"n": 2, "return_token_ids": True}, {"stop": ["a"]},
        {"temperature": 0.5, "top_k": 3, "seed": 4, "logit_bias": {"5": 1.0}},
    ],
)  # fmt: skip
async def test_a_chat_in_three_steps_is_the_chat(more: dict[str, Any]) -> None:
    backend, body = FakeBackend(), chat("Hello, how are you?", max_tokens=6, **more)
    async with client(backend, strict_requests=True) as http:
        rendered = await post(http, "/v1/chat/completions/render", body)
        assert not backend.submitted
        made = await post(http, GENERATE, rendered)
        whole = {"generate_response": made, "chat_request": body, "prompt_token_ids": rendered["token_ids"]}
        answer = await post(http, "/v1/chat/completions/derender", whole)
        direct = await post(http, "/v1/chat/completions", body)
    first, second = backend.submitted
    assert first.prompt.token_ids == second.prompt.token_ids == rendered["token_ids"]
    assert first.params.temperature == second.params.temperature and first.params.seed == second.params.seed
    assert first.params.logit_bias == second.params.logit_bias and first.params.top_k == second.params.top_k
    assert answer["id"] == rendered["request_id"] and rendered["model"] == MODEL
    assert without(answer) == without(direct)


@pytest.mark.parametrize("more", [{}, {"logprobs": 1}, {"n": 2}, {"echo": True, "logprobs": 0}])
async def test_completions_in_three_steps_are_the_completions(more: dict[str, Any]) -> None:
    backend, body = FakeBackend(), {"prompt": ["Hello there", "Once upon"], "max_tokens": 3, **more}
    async with client(backend, strict_requests=True) as http:
        rendered = await post(http, "/v1/completions/render", body)
        assert [each["request_id"][-2:] for each in rendered] == ["-0", "-1"]
        made = [await post(http, GENERATE, each) for each in rendered]
        whole = {
            "generate_responses": made, "completion_request": body,
            "prompt_token_ids": [each["token_ids"] for each in rendered],
        }  # fmt: skip
        answer = await post(http, "/v1/completions/derender", whole)
        direct = await post(http, "/v1/completions", body)
    assert without(answer) == without(direct)


async def test_a_stream_is_derendered_chunk_by_chunk() -> None:
    body = chat("Hello, how are you?", max_tokens=6)
    async with client(strict_requests=True) as http:
        direct = (await post(http, "/v1/chat/completions", body))["choices"][0]
        rendered = await post(http, "/v1/chat/completions/render", {**body, "stream": True})
        deltas, state = [], None
        for each in await post(http, GENERATE, rendered):
            given = {"stream": True, "generate_chunk": each, "chat_request": body, "stream_state": state}
            answer = await post(http, "/v1/chat/completions/derender", given)
            deltas += answer["chunk"]["choices"]
            state = answer["stream_state"]
    assert len(deltas) > 1 and deltas[0]["delta"]["role"] == "assistant" and "role" not in deltas[1]["delta"]
    assert "".join(each["delta"].get("content", "") for each in deltas) == direct["message"]["content"]
    assert deltas[-1]["finish_reason"] == direct["finish_reason"] and state["role_sent"]


CALLING = 'Well. <tool_call>{"name": "f", "arguments": {"a": [1, 2]}}</tool_call>'
CALLING += '<tool_call>{"name": "f", "arguments": {}}</tool_call>'


async def test_calls_are_derendered_whole_and_chunk_by_chunk() -> None:
    backend = FakeBackend(reply=bundled_tokenizer().encode(CALLING, add_special_tokens=False))
    body = chat("Hello?", max_tokens=200, tools=TOOLS)
    async with client(backend, tool_call_parser="hermes") as http:
        direct = (await post(http, "/v1/chat/completions", body))["choices"][0]
        rendered = await post(http, "/v1/chat/completions/render", body)
        made = {"generate_response": await post(http, GENERATE, rendered), "chat_request": body}
        whole = (await post(http, "/v1/chat/completions/derender", made))["choices"][0]
        calls: dict[int, tuple[str, str]] = {}
        text, ended, state = "", "", None
        for each in await post(http, GENERATE, {**rendered, "stream": True}):
            given = {"stream": True, "generate_chunk": each, "chat_request": body, "stream_state": state}
            answer = await post(http, "/v1/chat/completions/derender", given)
            state = answer["stream_state"]
            for choice in answer["chunk"]["choices"]:
                text, ended = text + choice["delta"].get("content", ""), choice["finish_reason"]
                for call in choice["delta"].get("tool_calls", ()):
                    name, arguments = calls.get(call["index"], ("", ""))
                    new = call["function"]
                    calls[call["index"]] = name + new.get("name", ""), arguments + new.get("arguments", "")
    wanted = [("f", '{"a": [1, 2]}'), ("f", "{}")]
    for message in (direct, whole):
        assert [tuple(each["function"].values()) for each in message["message"]["tool_calls"]] == wanted
    assert list(calls.values()) == wanted and direct["message"]["content"].strip() == text.strip() == "Well."
    assert whole["finish_reason"] == ended == "tool_calls"


async def test_earlier_chunks_are_read_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many there were, and whether or not some had no tokens."""
    fed: list[str] = []
    real = OutputParser.feed

    def feed(parser: OutputParser, text: str, *more: Any) -> Any:
        fed.append(text)
        return real(parser, text, *more)

    monkeypatch.setattr(OutputParser, "feed", feed)
    body, state = chat("Hi", tools=TOOLS), {"output_token_ids": [70] * 300, "output_chunk_lens": [1] * 300}
    async with client(tool_call_parser="hermes") as http:
        given = {"stream": True, "generate_chunk": tokens([]), "chat_request": body, "stream_state": state}
        answer = await post(http, "/v1/chat/completions/derender", given)
    assert len(fed) == 2 and fed[0] == bundled_tokenizer().decode([70] * 300)
    assert answer["stream_state"] == {**state, "role_sent": True}


async def test_a_long_conversation_is_rendered_in_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []

    async def noted(chat: Any, model: Any) -> Any:
        sizes.append(chat.size)
        return await prepare(chat, model)

    monkeypatch.setattr(derender, "prepare", noted)
    async with client() as http:
        await post(http, "/v1/chat/completions/derender", {"generate_response": tokens([70]), "chat_request": chat()})
    assert sizes[0] > 50


async def test_a_stream_of_a_completion_has_its_offsets() -> None:
    body = {"prompt": "Hello there", "max_tokens": 4, "logprobs": 0}
    async with client() as http:
        direct = (await post(http, "/v1/completions", body))["choices"][0]
        [rendered] = await post(http, "/v1/completions/render", {**body, "stream": True})
        found, state = [], None
        for each in await post(http, GENERATE, rendered):
            given = {
                "stream": True, "generate_chunk": each, "completion_request": body, "stream_state": state,
                "prompt_token_ids": rendered["token_ids"],
            }  # fmt: skip
            answer = await post(http, "/v1/completions/derender", given)
            found += answer["chunk"]["choices"]
            state = answer["stream_state"]
    assert "".join(each["text"] for each in found) == direct["text"] and len(found) > 1
    offsets = [at for each in found for at in each["logprobs"]["text_offset"]]
    assert offsets == direct["logprobs"]["text_offset"]


async def test_messages_and_responses_are_rendered_as_chats() -> None:
    async with client() as http:
        ids = (await post(http, "/v1/chat/completions/render", chat("Hi", max_tokens=5)))["token_ids"]
        message = await post(http, "/v1/messages/render", {**chat("Hi"), "model": MODEL, "max_tokens": 5})
        response = await post(http, "/v1/responses/render", {"input": "Hi", "model": MODEL, "max_output_tokens": 5})
    assert message["token_ids"] == ids == response["token_ids"]
    assert message["sampling_params"]["max_tokens"] == 5 == response["sampling_params"]["max_tokens"]
    assert message["request_id"].startswith("msg_") and response["request_id"].startswith("resp_")


async def test_without_max_tokens_it_is_what_the_context_leaves() -> None:
    async with client() as http:
        rendered = await post(http, "/v1/chat/completions/render", chat("Hi", response_format={"type": "json_object"}))
    assert rendered["sampling_params"]["max_tokens"] == FakeBackend().max_model_len - len(rendered["token_ids"])
    assert rendered["sampling_params"]["structured_outputs"]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/chat/completions/render", chat(use_beam_search=True), "use_beam_search"),
        ("/v1/chat/completions/render", chat(temperature=-1), "temperature"),
        ("/v1/responses/render", {"input": "x", "previous_response_id": "resp_1"}, "previous_response_id"),
        ("/v1/chat/completions/derender", {}, "generate_response"),
        ("/v1/chat/completions/derender", {"stream": True}, "generate_chunk"),
        ("/v1/completions/derender", {}, "generate_responses"),
        ("/v1/completions/derender", {"generate_responses": [{"request_id": "a", "choices": [{"token_ids": [10**6]}]}]},
         "token_ids"),
        ("/v1/completions/derender", {"generate_responses": [{"request_id": "a", "choices": []}],
                                      "prompt_token_ids": [[1], [2]]}, "prompt_token_ids"),
        ("/v1/completions/derender", {"generate_responses": [{"request_id": "a", "choices": []}],
                                      "completion_request": {"prompt": "x", "echo": True}}, "prompt_token_ids"),
        ("/v1/completions/derender", {"stream": True, "generate_chunk": {"request_id": "a", "choices": [{}]},
                                      "stream_state": {"output_token_ids": [1]}}, "stream_state"),
        ("/v1/completions/derender", {"generate_responses": [{"request_id": "a", "choices": [
            {"token_ids": [1], "logprobs": {"content": [{}]}}]}]}, "logprobs"),
        ("/v1/completions/derender", {"generate_responses": [{"request_id": "a", "choices": []}] * 300},
         "generate_responses"),
        *(("/v1/chat/completions/derender", {"generate_response": answer, "chat_request": chat(n=2)}, param)
          for answer, param in BAD),
        *(("/v1/completions/derender", {"generate_responses": [answer]}, param) for answer, param in BAD),
        ("/v1/chat/completions/derender", {"generate_response": tokens([1]), "prompt_token_ids": [-1]},
         "prompt_token_ids"),
        *(("/v1/chat/completions/derender", {"stream": True, "generate_chunk": tokens([1]),
           "chat_request": chat(), "stream_state": {
            "output_token_ids": ids, "output_chunk_lens": lengths}}, "stream_state")
          for ids, lengths in (([], [0] * 9), ([1], [0, 1]), ([1], [2, -1]))),
    ],
)  # fmt: skip
async def test_what_cannot_be_rendered_is_refused(path: str, body: dict[str, Any], param: str) -> None:
    async with client() as http:
        answered = await http.post(path, json=body)
    assert answered.status_code == 400, answered.text
    assert answered.json()["error"]["param"] == param, answered.text
