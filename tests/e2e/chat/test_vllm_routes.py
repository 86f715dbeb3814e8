"""vLLM's further routes over a real model: beam search, several chats at once, generative scoring, SageMaker's."""

import math
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from quintet import LLM, BeamSearchParams, SamplingParams
from tests.helpers.servers.serving import PATIENCE, Server

MODEL = "bundled"
CHATS = [
    [{"role": "user", "content": "Hello"}],
    [{"role": "system", "content": "Be short."}, {"role": "user", "content": "What is the capital of France?"}],
    [{"role": "user", "content": "Hello"}],
]
PROMPT = "Once upon a"
FLAGS = ("--device", "cpu", "--dtype", "float32", "--max-model-len", "256")


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server(MODEL, *FLAGS) as made:
        yield made


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(MODEL, device="cpu", dtype="float32", max_model_len=256)


@pytest.fixture
def ai(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE) as made:
        yield made


def post(server: Server, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    answer = httpx.post(server.url + path, json=body, timeout=PATIENCE)
    found: dict[str, Any] = answer.json()
    return answer.status_code, found


@pytest.mark.parametrize("penalty", [1.0, 0.0])
def test_beams_of_a_completion_are_those_of_the_offline_search(ai: openai.OpenAI, llm: LLM, penalty: float) -> None:
    params = BeamSearchParams(beam_width=3, max_tokens=8, length_penalty=penalty)
    [wanted] = llm.beam_search([{"prompt": PROMPT}], params)
    answer = ai.completions.create(
        model=MODEL, prompt=PROMPT, n=3, max_tokens=8, logprobs=1,
        extra_body={"use_beam_search": True, "length_penalty": penalty, "return_token_ids": True},
    )  # fmt: skip
    start = len(answer.choices[0].prompt_token_ids)  # type: ignore[attr-defined]
    for choice, beam in zip(answer.choices, wanted.sequences, strict=True):
        assert choice.token_ids == beam.tokens[start:] and choice.finish_reason == beam.finish_reason  # type: ignore[attr-defined]
        assert choice.logprobs is not None and choice.logprobs.token_logprobs is not None
        assert math.isclose(sum(each or 0 for each in choice.logprobs.token_logprobs), beam.cum_logprob, abs_tol=1e-4)
        assert beam.text is not None and beam.text.endswith(choice.text)
    assert answer.usage is not None
    assert answer.usage.completion_tokens == sum(len(beam.tokens) - start for beam in wanted.sequences)


def test_log_probabilities_beside_beams_are_as_many_as_were_asked_for(server: Server) -> None:
    body = {"prompt": PROMPT, "n": 1, "max_tokens": 3, "use_beam_search": True, "logprobs": 5, "top_k": -1, "stop": []}
    status, answer = post(server, "/v1/completions", body)
    assert status == 200, answer
    assert [len(each) for each in answer["choices"][0]["logprobs"]["top_logprobs"]] == [5, 5, 5]


def test_a_search_is_one_request_in_metrics(server: Server) -> None:
    def ended() -> float:
        lines = httpx.get(f"{server.url}/metrics").text.splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith("vllm:request_success_total"))

    before = ended()
    status, _ = post(server, "/v1/completions", {"prompt": PROMPT, "n": 3, "max_tokens": 8, "use_beam_search": True})
    assert status == 200 and ended() == before + 1


def test_beams_of_a_chat_are_its_choices(ai: openai.OpenAI) -> None:
    asked: Any = {"model": MODEL, "messages": CHATS[1], "max_completion_tokens": 12}
    beams = ai.chat.completions.create(**asked, n=2, extra_body={"use_beam_search": True})
    one = ai.chat.completions.create(**asked, n=1, extra_body={"use_beam_search": True})
    greedy = ai.chat.completions.create(**asked, temperature=0)
    assert [each.index for each in beams.choices] == [0, 1]
    assert beams.choices[0].message.content != beams.choices[1].message.content
    assert one.choices[0].message.content == greedy.choices[0].message.content  # a beam of one is greedy


@pytest.mark.parametrize(
    ("field", "value"),
    [("stream", True), ("top_k", 5), ("stop", ["x"]), ("response_format", {"type": "json_object"}), ("n", 11),
     ("temperature", 0.5), ("tools", None),
     ("thinking", {"type": "enabled", "budget_tokens": 5})],
)  # fmt: skip
def test_what_beam_search_does_not_look_at_is_refused(server: Server, field: str, value: Any) -> None:
    body: dict[str, Any] = {"messages": CHATS[0], "n": 2, "max_tokens": 4, "use_beam_search": True, field: value}
    param = field
    if field == "tools":
        tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
        body |= {"tools": [tool], "tool_choice": "required"}
        param = "tool_choice"
    status, answer = post(server, "/v1/chat/completions", body)
    assert (status, answer["error"]["param"]) == (400, param), answer


def test_several_conversations_have_the_answers_that_each_has_alone(server: Server) -> None:
    more = {"max_tokens": 12, "temperature": 0, "logprobs": True}
    alone = [post(server, "/v1/chat/completions", {"messages": chat, **more})[1] for chat in CHATS]
    status, answer = post(server, "/v1/chat/completions/batch", {"messages": CHATS, **more})
    assert status == 200, answer
    assert [each["index"] for each in answer["choices"]] == [0, 1, 2]
    for choice, single in zip(answer["choices"], alone, strict=True):
        assert choice["message"] == single["choices"][0]["message"]
        assert [each["token"] for each in choice["logprobs"]["content"]] == [
            each["token"] for each in single["choices"][0]["logprobs"]["content"]
        ]
    for name in ("prompt_tokens", "completion_tokens"):
        assert answer["usage"][name] == sum(each["usage"][name] for each in alone)
    cached = [each["usage"]["prompt_tokens_details"]["cached_tokens"] for each in alone]
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] >= sum(cached) > 0


@pytest.mark.parametrize(
    ("fields", "param"),
    [({"messages": CHATS[0]}, "messages"), ({"messages": [[]]}, "messages"), ({"messages": []}, "messages"),
     ({"messages": CHATS, "n": 2}, "n"), ({"messages": CHATS, "stream": True}, "stream"),
     ({"messages": [CHATS[0], [{"role": "user", "content": 5}]]}, "messages.1"),
     ({"messages": CHATS, "return_token_ids": True}, "return_token_ids"),
     ({"messages": CHATS * 100}, "messages")],
)  # fmt: skip
def test_a_wrong_batch_names_its_field(server: Server, fields: dict[str, Any], param: str) -> None:
    status, answer = post(server, "/v1/chat/completions/batch", fields)
    assert (status, answer["error"]["param"]) == (400, param), answer


@pytest.mark.parametrize("item_first", [False, True])
@pytest.mark.parametrize("apply_softmax", [True, False])
def test_scores_are_probabilities_of_the_next_token(
    server: Server, llm: LLM, item_first: bool, apply_softmax: bool
) -> None:
    tokenizer = llm.get_tokenizer()
    query, items, labels = "The sky is", [" blue today", " not", " a"], [5, 77, 300]
    body = {
        "query": query, "items": items, "label_token_ids": labels, "apply_softmax": apply_softmax,
        "item_first": item_first,
    }  # fmt: skip
    status, answer = post(server, "/generative_scoring", body)
    assert status == 200, answer
    first = tokenizer.encode(query)
    prompts = []
    for item in items:
        own = tokenizer.encode(item, add_special_tokens=False)
        prompts.append({"prompt_token_ids": own + first if item_first else first + own})
    params = SamplingParams(max_tokens=1, temperature=0, logprobs=0, logprob_token_ids=labels)
    for got, output in zip(answer["data"], llm.generate(prompts, params, use_tqdm=False), strict=True):
        logprobs = output.outputs[0].logprobs
        assert logprobs is not None
        shares = [math.exp(logprobs[0][each].logprob) for each in labels]
        wanted = shares[0] / sum(shares) if apply_softmax else shares[0]
        assert math.isclose(got["score"], wanted, rel_tol=1e-4) and got["object"] == "score"
    usage = answer["usage"]
    assert usage["completion_tokens"] == 0
    assert usage["prompt_tokens"] == sum(len(each["prompt_token_ids"]) for each in prompts)


@pytest.mark.parametrize(
    ("fields", "param"),
    [({"items": []}, "items"), ({"label_token_ids": []}, "label_token_ids"), ({"label_token_ids": [10**6]},
     "label_token_ids"), ({"query": 5}, "query"), ({"items": ["x" * 5000]}, "items"), ({"items": [[10**6]]}, "items"),
     ({"items": ["a", None]}, "items.1")],
)  # fmt: skip
def test_a_wrong_scoring_request_names_its_field(server: Server, fields: dict[str, Any], param: str) -> None:
    status, answer = post(
        server, "/generative_scoring", {"query": "a", "items": ["b"], "label_token_ids": [1], **fields}
    )
    assert (status, answer["error"]["param"]) == (400, param), answer


def test_sagemakers_route_takes_the_bodies_of_the_others(server: Server) -> None:
    chat = {"messages": CHATS[0], "max_tokens": 5, "temperature": 0}
    text = {"prompt": PROMPT, "max_tokens": 5, "temperature": 0}
    for path, body in (("/v1/chat/completions", chat), ("/v1/completions", text)):
        assert post(server, "/invocations", body)[1]["choices"] == post(server, path, body)[1]["choices"]
    with httpx.stream("POST", server.url + "/invocations", json={**chat, "stream": True}, timeout=PATIENCE) as stream:
        assert list(stream.iter_lines())[-2] == "data: [DONE]"
    status, answer = post(server, "/invocations", {"input": "x"})
    assert status == 400 and "generates text" in answer["error"]["message"]
    status, answer = post(server, "/invocations", {"max_tokens": 3})
    assert status == 400 and "give messages (chat)" in answer["error"]["message"]
    assert httpx.get(f"{server.url}/ping").status_code == 200
