"""/api/chat: messages, streams, calls, thoughts, formats and options, over the fake engine."""

import json
from typing import Any

import pytest

from quintet.sampling_params import SamplingParams
from tests.helpers.tools import WEATHER
from tests.server.fakes import MODEL, FakeBackend
from tests.server.http.ollama.ollama_requests import SAY, backend, chat, error_of, lines
from tests.server.http.serving import client

CALL = '<think>Weather.</think><tool_call>{"name": "get_weather", "arguments": {"city": "Oslo"}}</tool_call>'
DURATIONS = ("total_duration", "load_duration", "prompt_eval_duration", "eval_duration")


async def test_a_whole_answer_has_counts_and_durations() -> None:
    answer = (await chat(stream=False)).json()
    assert answer["message"] == {"role": "assistant", "content": SAY} and answer["model"] == MODEL
    assert answer["done"] is True and answer["done_reason"] == "stop"
    assert answer["eval_count"] == len(backend().reply or ()) + 1 and answer["prompt_eval_count"] > 2
    assert all(isinstance(answer[name], int) and answer[name] >= 0 for name in DURATIONS)
    assert answer["total_duration"] > answer["prompt_eval_duration"] + answer["eval_duration"]
    assert answer["created_at"].endswith("Z")


async def test_answers_are_streamed_unless_a_request_turns_it_off() -> None:
    *parts, end = lines(await chat())
    assert "".join(part["message"]["content"] for part in parts) == SAY
    assert not any(part["done"] for part in parts) and not any("done_reason" in part for part in parts)
    assert end["done"] and end["done_reason"] == "stop" and end["message"]["content"] == ""
    assert end["eval_count"] == len(backend().reply or ()) + 1


async def test_num_predict_ends_with_length_and_below_one_is_no_limit() -> None:
    assert lines(await chat(options={"num_predict": 2}))[-1]["done_reason"] == "length"
    for most in (-1, -2, 0):
        fake = backend()
        assert lines(await chat(fake, options={"num_predict": most}))[-1]["done_reason"] == "stop"
        assert _params(fake).max_tokens is None


async def test_a_failure_within_a_stream_is_its_last_line() -> None:
    answer = await chat(backend(fail_at=2))
    assert json.loads(answer.text.splitlines()[-1]) == {"error": "the request failed: the fake failed"}


@pytest.mark.parametrize("name", [MODEL, f"{MODEL}:latest"])
async def test_a_name_is_known_with_and_without_latest(name: str) -> None:
    assert (await chat(model=name, stream=False)).json()["model"] == name


async def test_another_model_is_not_found() -> None:
    status, message = error_of(await chat(model="qwen3:0.6b"))
    assert status == 404 and "'qwen3:0.6b' is not here; this server has fake/model" in message


async def test_a_curl_example_needs_no_content_type() -> None:
    body = json.dumps({"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "stream": False})
    async with client(backend()) as http:
        answer = await http.post(
            "/api/chat", content=body, headers={"content-type": "application/x-www-form-urlencoded"}
        )
        page = await http.post("/api/chat", content=body, headers={"origin": "http://evil.example"})
    assert answer.status_code == 200, answer.text
    assert error_of(page)[0] == 403  # a page of another site needs no preflight to send this


async def test_no_messages_are_answered_as_loaded() -> None:
    fake = backend()
    answer = await chat(fake, messages=[])
    assert answer.json()["done_reason"] == "load" and answer.json()["done"] and not fake.submitted


def _params(fake: FakeBackend) -> SamplingParams:
    params = fake.submitted[-1].params
    assert isinstance(params, SamplingParams)
    return params


async def test_options_become_sampling_parameters() -> None:
    fake = backend()
    options = {
        "temperature": 0.5, "top_k": 40, "top_p": 0.9, "min_p": 0.05, "seed": 42.0, "repeat_penalty": 1.1,
        "presence_penalty": 0.1, "frequency_penalty": 0.2, "stop": ["User:"], "num_predict": 7, "num_ctx": 4096,
        "num_gpu": 99, "num_thread": 8, "mirostat": 0, "typical_p": 1.0, "repeat_last_n": 64, "num_keep": 5,
    }  # fmt: skip
    assert (await chat(fake, options=options)).status_code == 200
    params = _params(fake)
    assert (params.temperature, params.top_k, params.top_p, params.min_p) == (0.5, 40, 0.9, 0.05)
    assert (params.seed, params.max_tokens, params.stop) == (42, 7, ["User:"])
    assert (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) == (1.1, 0.1, 0.2)


async def test_repeat_last_n_of_0_turns_penalties_off() -> None:
    fake = backend()
    assert (await chat(fake, options={"repeat_penalty": 1.5, "repeat_last_n": 0})).status_code == 200
    assert _params(fake).repetition_penalty == 1.0


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"options": {"mirostat": 2}}, "mirostat is not served here: this sampler does not exist"),
        ({"options": {"typical_p": 0.5}}, "typical_p is not served here"),
        ({"options": {"temperature": "hot"}}, "options.temperature must be"),
        ({"options": {"top_k": 1.5}}, "options.top_k must be"),
        ({"format": "yaml"}, 'format must be "json" or a JSON schema'),
        ({"think": "hard"}, "think is wrong"),
        ({"template": "{{ .Prompt }}"}, "template is not served here: the chat template is the model's"),
        ({"truncate": True}, "truncate is not served here: a prompt that is too long is refused"),
        ({"top_logprobs": 3}, "top_logprobs needs logprobs"),
        ({"messages": [{"role": "user", "content": "x", "images": ["aGk="]}]}, "text alone"),
        ({"messages": "Hi"}, "messages must be a list of messages, not text"),
        ({"messages": [5]}, "messages[0] must be an object"),
        ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages[0].tool_calls[0] must be one of calls"),
        ({"messages": [{"role": "user", "content": "word " * 600}]}, "maximum context length is 512 tokens"),
    ],
)
async def test_what_cannot_be_obeyed_is_refused_with_a_reason(body: dict[str, Any], message: str) -> None:
    status, text = error_of(await chat(**body))
    assert status == 400 and message in text, text


async def test_unknown_options_are_named_in_the_header() -> None:
    answer = await chat(options={"temprature": 1})
    assert answer.headers["x-quintet-ignored-fields"] == "temprature (did you mean temperature?)"


async def test_a_call_comes_whole_with_its_arguments_as_an_object() -> None:
    fake = FakeBackend()
    fake.reply = fake.encode(CALL)
    whole = (await chat(fake, tools=[WEATHER], stream=False)).json()
    [call] = whole["message"]["tool_calls"]
    assert call["function"] == {"index": 0, "name": "get_weather", "arguments": {"city": "Oslo"}} and call["id"]
    assert whole["done_reason"] == "stop"
    streamed = lines(await chat(fake, tools=[WEATHER]))
    calls = [line["message"]["tool_calls"] for line in streamed if "tool_calls" in line["message"]]
    assert [each["function"] for each in calls[0]] == [call["function"]] and len(calls) == 1
    untyped = {"function": WEATHER["function"]}
    assert (await chat(fake, tools=[untyped], stream=False)).json()["message"]["tool_calls"]


async def test_thoughts_are_in_a_field_of_their_own() -> None:
    fake = FakeBackend()
    fake.reply = fake.encode("<think>Hm.</think>Yes.")
    message = (await chat(fake, think=True, stream=False)).json()["message"]
    assert (message["thinking"], message["content"]) == ("Hm.", "Yes.")
    streamed = [line["message"] for line in lines(await chat(fake, think=True))]
    assert "".join(part.get("thinking", "") for part in streamed) == "Hm."
    assert "".join(part["content"] for part in streamed) == "Yes."


async def test_calls_and_results_get_ids_for_the_template() -> None:
    fake = backend()
    call = {"function": {"name": "get_weather", "arguments": {"city": "Oslo"}}}
    messages = [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": "", "thinking": "Call.", "tool_calls": [call]},
        {"role": "tool", "tool_name": "get_weather", "content": "sunny"},
    ]
    answer = await chat(fake, messages=messages, tools=[WEATHER], stream=False)
    assert answer.status_code == 200 and "x-quintet-ignored-fields" not in answer.headers, answer.text
    assert "sunny" in (fake.submitted[0].prompt.text or "") and "Oslo" in (fake.submitted[0].prompt.text or "")


async def test_a_last_message_of_the_assistant_is_continued() -> None:
    fake = backend()
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Dear"}]
    assert (await chat(fake, messages=messages)).status_code == 200
    assert (fake.submitted[0].prompt.text or "").endswith("Dear")


async def test_log_probabilities_are_in_each_line() -> None:
    whole = (await chat(logprobs=True, top_logprobs=2, stream=False)).json()
    assert len(whole["logprobs"]) == whole["eval_count"] and len(whole["logprobs"][0]["top_logprobs"]) == 2
    streamed = lines(await chat(logprobs=True))
    assert sum(len(line.get("logprobs", ())) for line in streamed) == whole["eval_count"]


async def test_a_format_becomes_a_grammar() -> None:
    pytest.importorskip("llguidance", reason="structured_outputs are an extra")
    for form in ("json", {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}):
        fake = backend()
        assert (await chat(fake, format=form)).status_code == 200
        assert fake.submitted[0].grammar
    fake = backend()
    assert (await chat(fake, format="")).status_code == 200 and not fake.submitted[0].grammar
