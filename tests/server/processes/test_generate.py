"""A real server's /inference/v1/generate answers what LLM.generate() does, experts and scores of a teacher among it."""

import base64
import io
import json
from pathlib import Path
from typing import Any

import httpx
import numpy as np

import quintet
from quintet import SamplingParams
from quintet_tools.checkpoints.tiny import make, variants
from tests.helpers.platforms.engines import engine
from tests.helpers.servers.serving import Server

BUNDLED = Path(quintet.__file__).parent / "bundled"  # its tokenizer has as many tokens
IDS = [5, 6, 7, 8, 9, 10, 11, 12]
PARAMS: dict[str, Any] = {"temperature": 0, "max_tokens": 6, "ignore_eos": True, "logprobs": 2}
SCORED: dict[str, Any] = {
    "max_tokens": 1, "prompt_logprob_start": 5, "prompt_logprob_token_ids": [[3, 4], [5, -1]], "temperature": 0,
}  # fmt: skip
FLAGS = ("--device", "cpu", "--dtype", "float32", "--kv-cache-memory-bytes", "16M", "--max-model-len", "64")


def array(text: str) -> "np.ndarray[Any, Any]":
    found: np.ndarray[Any, Any] = np.load(io.BytesIO(base64.b64decode(text)), allow_pickle=False)
    return found


def test_a_server_answers_what_the_engine_does() -> None:
    tiny = make("qwen3_moe", {**next(iter(variants("qwen3_moe").values())), "vocab_size": 2048})
    with engine(tiny, enable_return_routed_experts=True) as llm:
        prompt: Any = [{"prompt_token_ids": IDS}]
        (want,) = llm.generate(prompt, SamplingParams(detokenize=False, **PARAMS))
        (scored,) = llm.generate(prompt, SamplingParams(detokenize=False, **SCORED))
    made = want.outputs[0]
    assert made.routed_experts is not None and made.logprobs is not None
    with Server(str(tiny.folder), *FLAGS, "--tokenizer", str(BUNDLED), "--enable-return-routed-experts") as server:
        url, body = server.url + "/inference/v1/generate", {"token_ids": IDS, "sampling_params": PARAMS}
        answer = httpx.post(url, json=body, timeout=60).json()
        teacher = httpx.post(url, json={"token_ids": IDS, "sampling_params": SCORED}, timeout=60).json()
        parts = streamed(url, {**body, "stream": True})
    (choice,) = answer["choices"]
    assert choice["token_ids"] == list(made.token_ids)
    for entry, at in zip(choice["logprobs"]["content"], made.logprobs, strict=True):
        assert {each["token_id"]: each["logprob"] for each in entry["top_logprobs"]} == {
            token: each.logprob for token, each in at.items()
        }
    assert np.array_equal(array(choice["routed_experts"]), made.routed_experts)
    pieces = [array(each["choices"][0]["routed_experts"]) for each in parts if each["choices"][0]["routed_experts"]]
    assert len(pieces) > 1 and np.array_equal(np.concatenate(pieces), made.routed_experts)
    assert np.array_equal(array(teacher["prompt_token_id_logprobs"]), scored.prompt_token_id_logprobs)
    assert np.isneginf(array(teacher["prompt_token_id_logprobs"])[1, 1])


def streamed(url: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    with httpx.stream("POST", url, json=body, timeout=60) as answer:
        lines = [line for line in answer.iter_lines() if line.startswith("data: {")]
    return [json.loads(line[6:]) for line in lines]
