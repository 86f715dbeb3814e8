"""/completion, /completions and /infill: prompts, fields, events and what is refused, over the fake engine."""

import json
import threading
from typing import Any

import httpx
import pytest

from quintet.sampling_params import SamplingParams
from quintet.tokenizers.tokenizer import Tokenizer
from tests.server.fakes import MODEL, FakeBackend
from tests.server.http.inputs.test_infill import QWEN, tokenizer
from tests.server.http.ollama.ollama_requests import SAY, backend
from tests.server.http.serving import client


async def ask(fake: FakeBackend | None = None, path: str = "/completion", **body: Any) -> httpx.Response:
    async with client(fake or backend()) as http:
        return await http.post(path, json={"prompt": "Hi", **body})


def events(answer: httpx.Response) -> list[dict[str, Any]]:
    """The data of a stream, which ends without [DONE]."""
    assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/event-stream"), answer.text
    return [json.loads(part.removeprefix("data: ")) for part in answer.text.strip().split("\n\n")]


def params_of(fake: FakeBackend) -> SamplingParams:
    params = fake.submitted[-1].params
    assert isinstance(params, SamplingParams)
    return params


@pytest.mark.parametrize("path", ["/completion", "/completions"])
async def test_a_whole_answer_has_its_facts(path: str) -> None:
    answer = (await ask(backend(cached=1), path)).json()
    assert answer["content"] == SAY and answer["stop"] is True and answer["model"] == MODEL
    assert (answer["stop_type"], answer["stopping_word"], answer["truncated"]) == ("eos", "", False)
    count = len(backend().reply or ()) + 1
    assert (answer["tokens_predicted"], answer["tokens_evaluated"], answer["tokens_cached"]) == (count, 2, 1)
    assert answer["timings"]["predicted_n"] == count and answer["timings"]["cache_n"] == 1
    assert answer["timings"]["predicted_ms"] > 0 and answer["prompt"] == "Hi" and answer["tokens"] == []
    assert answer["generation_settings"]["n_predict"] == -1 and answer["generation_settings"]["n_ctx"] == 512


async def test_events_have_the_new_text_and_the_last_has_the_facts() -> None:
    *parts, end = events(await ask(stream=True))
    assert "".join(part["content"] for part in (*parts, end)) == SAY
    assert not any(part["stop"] for part in parts) and not any("timings" in part for part in parts)
    assert end["stop"] and end["stop_type"] == "eos" and end["timings"]["predicted_n"] == end["tokens_predicted"]
    timed = events(await ask(stream=True, timings_per_token=True))
    assert all("timings" in part for part in timed)


async def test_stop_types() -> None:
    assert (await ask(n_predict=2)).json()["stop_type"] == "limit"
    word = (await ask(stop=["meet"])).json()
    assert (word["stop_type"], word["stopping_word"], word["content"]) == ("word", "meet", "Nice to ")


async def test_n_predict_0_computes_the_prompt_alone() -> None:
    fake = backend()
    answer = (await ask(fake, n_predict=0, cache_prompt=True, t_max_prompt_ms=500)).json()
    assert (answer["content"], answer["tokens_predicted"], answer["stop_type"]) == ("", 0, "limit")
    assert params_of(fake).max_tokens == 1 and answer["generation_settings"]["n_predict"] == 0


async def test_forms_of_a_prompt() -> None:
    fake = backend()
    hello = fake.encode("Hello")
    forms = {"text": "Hello", "ids": [0, *hello], "mixed": ["Hello", *hello], "object": {"prompt_string": "Hello"}}
    for form in forms.values():
        assert (await ask(fake, prompt=form)).status_code == 200
    assert [each.prompt.token_ids for each in fake.submitted] == [
        [0, *hello],
        [0, *hello],
        [0, *hello * 2],
        [0, *hello],
    ]
    answers = (await ask(fake, prompt=["Hello", [5, 6], [5, "Hello"]])).json()
    assert [answer["index"] for answer in answers] == [0, 1, 2]
    assert [each.prompt.token_ids for each in fake.submitted[-3:]] == [[0, *hello], [5, 6], [5, *hello]]
    assert len((await ask(fake, n_cmpl=2)).json()) == 2
    assert len((await ask(fake, prompt=["Hello"])).json()) == 1


async def test_fields_become_sampling_parameters() -> None:
    fake = backend()
    [token] = fake.encode("Hello")
    answer = await ask(
        fake, temperature=-1, top_k=-1, top_p=0.9, min_p=0.1, seed=2**32 - 1, repeat_penalty=1.2, ignore_eos=True,
        n_predict=3, logit_bias=[[5, 1.5], ["Hello", False]], id_slot=0, samplers=["top_k"], n_keep=5, mirostat=0,
        typical_p=1, dry_multiplier=0.0, lora=[],
    )  # fmt: skip
    assert answer.status_code == 200 and "x-quintet-ignored-fields" not in answer.headers, answer.text
    params = params_of(fake)
    assert (params.temperature, params.top_k, params.top_p, params.min_p, params.seed) == (0, 0, 0.9, 0.1, None)
    assert params.repetition_penalty == 1.2 and params.ignore_eos and params.max_tokens == 3
    assert params.logit_bias == {5: 1.5, token: -100}
    assert (await ask(fake, logit_bias={"5": 2})).status_code == 200 and params_of(fake).logit_bias == {5: 2}


async def test_long_texts_of_a_mixed_prompt_are_tokenized_beside_the_event_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    threads: list[bool] = []  # of the long text: is it the event loop's
    encode = Tokenizer.encode

    def noted(self: Tokenizer, *args: Any, **kwargs: Any) -> list[int]:
        if len(args[0]) > 1000:
            threads.append(threading.current_thread() is threading.main_thread())
        return encode(self, *args, **kwargs)

    monkeypatch.setattr(Tokenizer, "encode", noted)
    assert (await ask(prompt=[1, "a " * 20_000])).status_code == 400, "more than the model's context"
    assert threads and not any(threads)


async def test_probabilities_have_ids() -> None:
    answer = (await ask(n_probs=2, return_tokens=True)).json()
    assert len(answer["completion_probabilities"]) == answer["tokens_predicted"] == len(answer["tokens"])
    first = answer["completion_probabilities"][0]
    assert first["id"] == answer["tokens"][0] and len(first["top_logprobs"]) == 2
    assert set(first) == {"id", "token", "bytes", "logprob", "top_logprobs"}
    assert set(first["top_logprobs"][0]) == {"id", "token", "bytes", "logprob"}


async def test_response_fields_are_selected() -> None:
    fields = ["content", "timings/predicted_n", "generation_settings/n_predict", "nothing"]
    answer = (await ask(n_predict=4, response_fields=fields)).json()
    assert list(answer) == fields[:3] and answer["generation_settings/n_predict"] == 4


async def test_a_grammar_and_a_schema_become_a_grammar() -> None:
    pytest.importorskip("llguidance", reason="structured_outputs are an extra")
    for body in ({"grammar": 'root ::= "yes" | "no"'}, {"json_schema": {"type": "object"}}):
        fake = backend()
        assert (await ask(fake, **body)).status_code == 200
        assert fake.submitted[0].grammar
    answer = await ask(grammar="root ::= (")
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "grammar", answer.text


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({"prompt": None}, "prompt", "must be text, token ids, or a list of these, not null"),
        ({"prompt": {"prompt_string": "x", "multimodal_data": ["aGk="]}}, "prompt.multimodal_data", "text alone"),
        ({"prompt": [5, None]}, "prompt[1]", "must be text or a token id"),
        ({"n_predict": "many"}, "n_predict", "n_predict must be"),
        ({"mirostat": 2}, "mirostat", "this sampler does not exist here"),
        ({"lora": [{"id": 0}]}, "lora", "has the id 0, and GET /lora-adapters lists none"),
        ({"post_sampling_probs": True}, "post_sampling_probs", "log-probabilities are those of the model"),
        ({"grammar": 'root ::= "a"', "json_schema": {}}, "grammar", "and json_schema exclude each other"),
        ({"logit_bias": 5}, "logit_bias", "must be pairs such as"),
        ({"logit_bias": [[[1], 1.0]]}, "logit_bias", "must have token ids or texts, not a list"),
        ({"logit_bias": [["x" * 300, 1.0]]}, "logit_bias", "has a text of 300 characters; at most 256"),
        ({"logit_bias": {str(n): 1 for n in range(2000)}}, "logit_bias", "has 2000 entries; at most 1024"),
        ({"input_prefix": "x"}, "input_prefix", "/infill has it"),
        ({"model": "other"}, "model", "'other' is not here"),
    ],
)
async def test_what_cannot_be_obeyed_is_refused_with_a_reason(body: dict[str, Any], param: str, message: str) -> None:
    answer = await ask(**body)
    error = answer.json()["error"]
    assert answer.status_code in (400, 404) and error["param"] == param and message in error["message"], answer.text


async def test_a_failure_within_a_stream_is_its_last_event() -> None:
    *_, end = events(await ask(backend(fail_at=2), stream=True))
    assert end["error"]["message"] == "the request failed: the fake failed"


# ---------------------------------------------------------------------------------------- infill


async def test_an_infill_stands_between_the_models_tokens() -> None:
    fake = FakeBackend(tokenizer=tokenizer(*QWEN))
    fake.reply = fake.encode("x")
    body = {"input_prefix": "def f(", "input_suffix": "return x", "prompt": "a"}
    assert (await ask(fake, "/infill", **body)).json()["content"] == "x"
    assert fake.submitted[0].prompt.text == f"{QWEN[0]}def f({QWEN[1]}return x{QWEN[2]}a"
    extra = {"input_extra": [{"filename": "b.py", "text": "y = 1\n"}]}
    assert (await ask(fake, "/infill", **body, **extra)).status_code == 200
    assert fake.submitted[1].prompt.text == f"y = 1\n{fake.submitted[0].prompt.text}"


async def test_other_files_come_after_the_repository_tokens() -> None:
    fake = FakeBackend(tokenizer=tokenizer(*QWEN, "<|repo_name|>", "<|file_sep|>"))
    extra = [{"filename": "b.py", "text": "y = 1\n"}]
    answer = await ask(fake, "/infill", prompt="", input_prefix="p", input_suffix="s", input_extra=extra, n_predict=1)
    assert answer.status_code == 200
    assert fake.submitted[0].prompt.text == (
        "<|repo_name|>myproject\n<|file_sep|>b.py\ny = 1\n<|file_sep|>filename\n"
        f"{QWEN[0]}p{QWEN[1]}s{QWEN[2]}"
    )  # fmt: skip


async def test_what_cannot_be_filled_in_is_refused() -> None:
    fake = FakeBackend(tokenizer=tokenizer(*QWEN))
    for model, body, param in (
        (None, {"input_suffix": "x"}, "input_suffix"),
        (fake, {"input_prefix": f"a{QWEN[1]}"}, "input_prefix"),
        (fake, {"input_extra": [{"filename": "x"}]}, "input_extra"),
        (fake, {"prompt": [5]}, "prompt"),
    ):
        answer = await ask(model, "/infill", **{"prompt": "", **body})
        assert answer.status_code == 400 and answer.json()["error"]["param"] == param, answer.text
