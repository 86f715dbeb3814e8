"""POST /v1/chat/completions over a fake engine: messages, answers, chunks, and what is refused."""

import threading
from typing import Any

import pytest

from quintet.chat import reasoning_effort as thinking
from quintet.chat.template import render_template
from tests.server.fakes import LOGPROB, FakeBackend
from tests.server.http.serving import chat, client, events

SAY = "Nice to meet you 👋🏽, wörld"


def backend(**settings: Any) -> FakeBackend:
    fake = FakeBackend(**settings)
    fake.reply = fake.encode(SAY)
    return fake


async def ask(fake: FakeBackend | None = None, settings: dict[str, Any] | None = None, **body: Any) -> Any:
    async with client(fake or backend(), **(settings or {})) as http:
        response = await http.post("/v1/chat/completions", json={**chat(), **body})
    assert response.status_code == 200, response.text
    return events(response.text) if body.get("stream") else response.json()


async def refused(body: dict[str, Any], **settings: Any) -> dict[str, Any]:
    async with client(backend(), **settings) as http:
        response = await http.post("/v1/chat/completions", json=body)
    assert response.status_code == 400, response.text
    error: dict[str, Any] = response.json()["error"]
    return error


async def test_an_answer_has_openais_shape() -> None:
    fake = backend()
    answer = await ask(fake)
    assert answer["object"] == "chat.completion" and answer["id"].startswith("chatcmpl-")
    assert answer["choices"] == [
        {
            "index": 0, "message": {"role": "assistant", "content": SAY, "refusal": None}, "logprobs": None,
            "finish_reason": "stop", "stop_reason": None,
        }
    ]  # fmt: skip
    assert answer["usage"]["completion_tokens"] == len(fake.reply) + 1  # and end-of-text
    assert answer["system_fingerprint"] == (await ask())["system_fingerprint"]


async def test_the_context_is_the_default_of_max_tokens() -> None:
    fake = FakeBackend(reply=[853] * 1000)
    answer = await ask(fake)
    assert answer["usage"]["total_tokens"] == fake.max_model_len and answer["choices"][0]["finish_reason"] == "length"
    assert (await ask(max_tokens=2))["usage"]["completion_tokens"] == 2
    assert (await ask(max_tokens=2, max_completion_tokens=3))["usage"]["completion_tokens"] == 3


async def test_each_step_that_gave_tokens_is_a_chunk_though_their_text_is_held_back() -> None:
    whole = (await ask(max_tokens=3))["choices"][0]["message"]["content"]
    chunks = await ask(max_tokens=3, stop=f"{whole} and more", stream=True)
    texts = [choice["delta"]["content"] for chunk in chunks for choice in chunk["choices"]]
    assert texts == ["", "", "", whole]  # the role, then a chunk for each token


@pytest.mark.parametrize("fields", [{}, {"n": 2}, {"max_completion_tokens": 4}, {"stop": "you"}])
async def test_a_stream_is_the_answer_in_pieces(fields: dict[str, Any]) -> None:
    body = {"logprobs": True, "top_logprobs": 2, "return_token_ids": True, **fields}
    whole = await ask(**body)
    chunks = await ask(**body, stream=True, stream_options={"include_usage": True})
    assert {chunk["id"] for chunk in chunks} == {chunks[0]["id"]}
    assert chunks[-1]["choices"] == [] and chunks[-1]["usage"] == whole["usage"]
    assert chunks[0]["prompt_token_ids"] == whole["prompt_token_ids"]
    for choice in whole["choices"]:
        mine = [each for chunk in chunks for each in chunk["choices"] if each["index"] == choice["index"]]
        assert mine[0]["delta"] == {"role": "assistant", "content": ""}
        assert all("role" not in each["delta"] for each in mine[1:])
        assert "".join(each["delta"]["content"] for each in mine) == choice["message"]["content"]
        assert [each["finish_reason"] for each in mine] == [None] * (len(mine) - 1) + [choice["finish_reason"]]
        assert mine[-1]["stop_reason"] == choice["stop_reason"]
        assert sum((each.get("token_ids", []) for each in mine), []) == choice["token_ids"]
        content = [each["logprobs"]["content"] for each in mine if each["logprobs"]]
        assert sum(content, []) == choice["logprobs"]["content"]


async def test_logprobs_have_bytes_and_the_likeliest() -> None:
    answer = await ask(logprobs=True, top_logprobs=2)
    content = answer["choices"][0]["logprobs"]["content"]
    assert bytes(byte for each in content[:-1] for byte in each["bytes"]).decode() == SAY
    assert content[0]["logprob"] == LOGPROB and len(content[0]["top_logprobs"]) == 2
    assert content[0]["top_logprobs"][0]["token"] == content[0]["token"]
    assert (await ask(logprobs=True))["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == []


async def test_messages_are_rendered_by_the_models_template() -> None:
    fake = backend()
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": parts}]
    await ask(fake, messages=messages, add_generation_prompt=True)
    text = fake.submitted[0].prompt.text or ""
    assert "Be brief." in text and "one" in text and "two" in text
    await ask(fake, messages=[{"role": "assistant", "content": "Once upon"}], continue_final_message=True)
    assert (fake.submitted[1].prompt.text or "").endswith("Once upon")


async def test_a_template_is_taken_from_trusted_requests_alone() -> None:
    template = "{% for m in messages %}{{ m.content }}!{% endfor %}{{ mood }}"
    body = chat("Hello", chat_template=template)
    assert (await refused(body))["param"] == "chat_template"
    fake, trust = backend(), {"trust_request_chat_template": True}
    await ask(fake, trust, **body, chat_template_kwargs={"mood": "glad"})
    assert fake.submitted[0].prompt.text == "Hello!glad"
    error = await refused(chat("Hello", chat_template="{% for"), trust_request_chat_template=True)
    assert "chat template" in error["message"]
    await ask(fake, {"chat_template": "{{ messages[0].content }}?"}, **chat("Really"))
    assert fake.submitted[1].prompt.text == "Really?"


async def test_a_template_of_a_request_is_tried_beside_the_loop_and_only_if_it_is_trusted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tried: list[bool] = []  # whether in the loop's thread

    def render(source: str, variables: dict[str, Any]) -> str:
        tried.append(threading.current_thread() is threading.main_thread())
        return render_template(source, variables)

    monkeypatch.setattr(thinking, "render_template", render)
    body = chat("Hello", chat_template="{{ messages[0].content }}{{ enable_thinking }} tried beside the loop")
    assert (await refused(body))["param"] == "chat_template"
    assert tried == []
    await ask(None, {"trust_request_chat_template": True}, **body)
    assert tried and not any(tried)


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"messages": []}, "messages", "must be a list"),
        ({"messages": "Hi"}, "messages", "must be a list"),
        ({"messages": [{"role": "user"}]}, "messages", "no content"),
        ({"messages": [{"role": "usr", "content": "x"}]}, "messages", "user"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
         "messages[0].content[0]", "kind image"),
        ({"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]}, "messages[0].content[0]",
         "this model takes text"),
        ({"messages": [{"role": "user", "content": "word " * 600}]}, "messages", "512"),
        ({"tools": [{"type": "function"}]}, "tools[0].function", "must be an object"),
        ({"tool_choice": "required"}, "tool_choice", "no tools"),
        ({"response_format": {"type": "json_schema"}}, "response_format.schema", "must be a JSON schema"),
        ({"modalities": ["audio"]}, "modalities", "text alone"),
        ({"audio": {}}, "audio", "text alone"),
        ({"documents": [{"title": "a"}]}, "documents", "put them into the messages"),
        ({"documents": [5]}, "documents.0", "dict"),
        ({"logprob_token_ids": [5]}, "logprob_token_ids", "needs logprobs"),
        ({"request_id": "a b"}, "request_id", "letters, digits"),
        ({"vllm_xargs": {"a": 1}, "extra_args": {"a": 2}}, "vllm_xargs", "'a'"),
        ({"vllm_xargs": {"a": 2**70}}, "vllm_xargs", "64 bits"),
        ({"repetition_detection": {"max_pattern_size": 3}}, "repetition_detection", "min_count must be at least 2"),
        ({"functions": [{}]}, "functions", "called tools"),
        ({"reasoning_effort": "huge"}, "reasoning_effort", "xhigh"),
        ({"top_logprobs": 2}, "top_logprobs", "needs logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "at most 20"),
        ({"logprobs": 5}, "logprobs", "boolean"),
        ({"max_completion_tokens": 0}, "max_completion_tokens", "from 1"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "not streamed"),
        ({"chat_template_kwargs": {"colour": 1}}, "chat_template_kwargs", "'colour'"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message", "exclude"),
        ({"mesages": []}, "mesages", "did you mean 'messages'"),
    ],
)  # fmt: skip
async def test_what_is_not_served_is_refused_with_a_reason(fields: dict[str, Any], param: str, says: str) -> None:
    error = await refused({**chat(), **fields}, strict_requests=True)
    assert error["param"] == param and says in error["message"], error


async def test_harmless_fields_are_accepted() -> None:
    await ask(
        tools=[], tool_choice="none", modalities=["text"], audio=None, response_format={"type": "text"}, functions=None,
        store=False, parallel_tool_calls=True, prompt_cache_key="k", safety_identifier="s", service_tier="flex",
        reasoning_effort=None, documents=[], metadata={}, user="u",
    )  # fmt: skip
    await ask(best_of=1, reasoning_effort="none", vllm_xargs={}, detokenize=True, top_logprobs=0, verbosity="medium")
    assert await ask(tools=[{"type": "function", "function": {"name": "f"}}], tool_choice="none")


async def test_a_chat_needs_a_tokenizer_and_a_completion_does_not() -> None:
    async with client(FakeBackend(tokenizer=None)) as http:
        response = await http.post("/v1/chat/completions", json=chat())
    assert response.status_code == 400 and "/v1/completions" in response.json()["error"]["message"]
