"""Layers in stages beside all else that an engine does: what comes out is what comes out of one process, to the bit."""

import gzip
import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from transformers import Qwen3Config, Qwen3ForSequenceClassification, Qwen3ForTokenClassification, Qwen3Model

from quintet import LLM, SamplingParams
from quintet.conformance.harness.worker_runner import random_prompts
from quintet.sampling_params import BeamSearchParams, StructuredOutputsParams
from quintet_tools.checkpoints.tiny import VOCAB, Tiny, make, variant
from tests.e2e.engine.test_embeds import given
from tests.e2e.parallel.test_stages import DEEP, GREEDY
from tests.e2e.pooling.test_heads import QWEN3, TEXTS, saved
from tests.e2e.pooling.test_scores import DOCUMENTS, QUERY, WORDS, tokenizer
from tests.helpers.platforms.engines import engine, told
from tests.helpers.servers.serving import Server, until, words_of

pytest.importorskip("quintet._cpu", reason="ranks on the CPU meet by the compiled extension")

CHUNKS: dict[str, Any] = {"max_num_batched_tokens": 32, "max_model_len": 128}
SCORED = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True, detokenize=False, logprobs=2, prompt_logprobs=1)
DRAWN = SamplingParams(temperature=0.8, seed=3, max_tokens=40, ignore_eos=True, detokenize=False, logprobs=2)
IDS = random_prompts(5, (17, 3, 70, 8, 9, 1, 40), VOCAB)
PROMPTS: list[Any] = [{"prompt_token_ids": ids} for ids in IDS]


def both(**settings: Any) -> tuple[LLM, LLM]:
    """One process, and two stages."""
    tiny = make("llama", DEEP)
    return engine(tiny, **settings), engine(tiny, pipeline_parallel_size=2, **settings)


def counted(llm: LLM, name: str) -> float:
    return sum(getattr(each, "value", 0.0) for each in llm.get_metrics() if each.name == name)


@pytest.mark.slow
def test_prompts_that_are_embeddings_and_a_trace(tmp_path: Path) -> None:
    tiny, traces = make("llama", DEEP), {"profiler": "torch", "torch_profiler_dir": str(tmp_path)}
    alone, stages = both(**CHUNKS, enable_prompt_embeds=True, profiler_config=traces)
    with alone, stages:
        for embedded in ((0, 1, 2, 3, 4, 5, 6), (0, 3), (2,)):
            prompts = [given(tiny, ids) if at in embedded else PROMPTS[at] for at, ids in enumerate(IDS)]
            for params in (GREEDY, DRAWN):
                assert told(stages, prompts, params) == told(alone, prompts, params)
        want = told(alone, PROMPTS, SCORED)
        stages.start_profile()
        assert told(stages, PROMPTS, SCORED) == want
        traced = json.loads(gzip.decompress(Path(stages.stop_profile()).read_bytes()))["traceEvents"]
        assert {"step", "schedule", "start", "wait", "paged_attention"} <= {each["name"] for each in traced}
        assert told(stages, PROMPTS, SCORED) == want


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {"scheduling_policy": "priority"},
        pytest.param({}, marks=pytest.mark.sweep),
        pytest.param({"enable_prefix_caching": False}, marks=pytest.mark.sweep),
    ],
    ids=str,
)
def test_requests_that_give_way_to_others(settings: dict[str, Any]) -> None:
    alone, stages = both(**CHUNKS, page_size=8, num_pages=26, kv_cache_memory_bytes=None, **settings)
    order: Any = {"priority": [3, 1, 2, 0, 5, 4, -1]} if "scheduling_policy" in settings else {}
    with alone, stages:
        for _ in range(2):
            said = [[each.outputs[0].token_ids for each in llm.generate(PROMPTS, DRAWN, use_tqdm=False, **order)]
                    for llm in (alone, stages)]  # fmt: skip
            assert said[0] == said[1]
        assert counted(alone, "vllm:num_preemptions") and counted(stages, "vllm:num_preemptions")


@pytest.mark.slow
def test_logits_processors_run_in_the_last_stage() -> None:
    alone, stages = both(**CHUNKS, logits_processors=("tests.helpers.edits:Shift",))
    params = [
        SamplingParams(temperature=0, max_tokens=9, ignore_eos=True, detokenize=False, extra_args={"many": many})
        for many in (0, 1, 2, 99, 3, 0, 5)
    ]
    with alone, stages:
        for _ in range(2):
            one, two = (
                [each.outputs[0] for each in llm.generate(PROMPTS, params, use_tqdm=False)] for llm in (alone, stages)
            )
            one, two = ([(each.token_ids, each.error) for each in outputs] for outputs in (one, two))
            assert one == two and "four are enough" in str(two[3][1]) and len(two[3][0]) == 4


@pytest.mark.sweep
@pytest.mark.parametrize("family", ["llama", "zamba2", "gemma3n_text"])  # the last two: what layers share is there once
def test_weights_that_stages_have_kept_are_read_again(family: str, tmp_path: Path) -> None:
    tiny, cache = variant(family, "plain"), str(tmp_path / "cache")
    with engine(tiny, **CHUNKS) as alone:
        want = told(alone, PROMPTS, SCORED)
    for _ in range(2):
        with engine(tiny, pipeline_parallel_size=2, weights_cache=cache, **CHUNKS) as stages:
            assert told(stages, PROMPTS, SCORED) == want
            stages.save_sharded_state(str(tmp_path / "sharded"))
    saved = Tiny(tmp_path / "sharded", tiny.config, tiny.reference)
    with engine(saved, pipeline_parallel_size=2, load_format="sharded_state", **CHUNKS) as stages:
        assert told(stages, PROMPTS, SCORED) == want
    with pytest.raises(ValueError, match="pipeline_parallel_size"):
        engine(saved, load_format="sharded_state", **CHUNKS)


SHAPES = [
    {"regex": "(yes, of course I shall|no, never in all my life)"},
    {"choice": ["red", "green", "blue"]},
    {"json": {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}},
]


def spoken(llm: LLM) -> list[Any]:
    """Texts with shapes, several of one prompt, ends by a string, edits, and beams."""
    shaped = [StructuredOutputsParams(**shape) for shape in SHAPES]
    params = [
        *(SamplingParams(temperature=heat, seed=5, max_tokens=24, logprobs=heat or None, structured_outputs=each)
          for each in shaped for heat in (0, 1)),
        SamplingParams(n=3, seed=2, temperature=1, max_tokens=12, logprobs=1),
        SamplingParams(stop=["a"], max_tokens=30, temperature=0),
        SamplingParams(logit_bias={5: 3.0}, repetition_penalty=1.3, max_tokens=10, seed=1, bad_words=["the"]),
    ]  # fmt: skip
    texts = llm.generate(["Once upon a time there was"] * len(params), params, use_tqdm=False)
    found: list[Any] = [
        (
            out.text,
            out.token_ids,
            out.finish_reason,
            [[each.logprob for each in at.values()] for at in out.logprobs or ()],
        )
        for each in texts
        for out in each.outputs
    ]
    beams = llm.beam_search(["Once upon", "A dog"], BeamSearchParams(beam_width=2, max_tokens=4))
    return found + [[(each.tokens, each.cum_logprob) for each in beam.sequences] for beam in beams]


BUNDLED: dict[str, Any] = {"device": "cpu", "use_tqdm": False, "kv_cache_memory_bytes": "16M", **CHUNKS}


@pytest.mark.slow
def test_grammars_and_text_of_stages() -> None:
    pytest.importorskip("llguidance")
    guessed = {"method": "ngram", "num_speculative_tokens": 3}
    with (
        LLM("bundled", **BUNDLED) as alone,
        LLM("bundled", pipeline_parallel_size=2, speculative_config=guessed, **BUNDLED) as stages,
    ):
        want = spoken(alone)
        assert [spoken(stages) for _ in range(2)] == [want] * 2
        assert counted(stages, "quintet:jump_forward_tokens") and counted(stages, "vllm:spec_decode_num_drafts")
        stages.sleep(1)
        stages.wake_up()
        assert spoken(stages) == want


@pytest.mark.sweep
def test_grammars_and_text_of_two_engines_of_two_stages_of_two_ranks() -> None:
    """A sum over ranks has other bits: tokens alone are those of one process."""
    pytest.importorskip("llguidance")
    shaped = [StructuredOutputsParams(**shape) for shape in SHAPES] * 2
    params = [SamplingParams(temperature=0, max_tokens=24, structured_outputs=each) for each in shaped]
    sizes = {"pipeline_parallel_size": 2, "tensor_parallel_size": 2, "data_parallel_size": 2}
    with LLM("bundled", **BUNDLED) as alone, LLM("bundled", **sizes, **BUNDLED) as several:
        one, two = (
            [each.outputs[0].text for each in llm.generate(["Well?"] * len(params), params, use_tqdm=False)]
            for llm in (alone, several)
        )
        assert one == two


def classes(llm: LLM) -> list[Any]:
    return [each.outputs.data for each in llm.classify(TEXTS * 2, use_tqdm=False)]


def of_tokens(llm: LLM) -> list[Any]:
    return [each.outputs.data for each in llm.encode(TEXTS * 2, use_tqdm=False)]


def vectors(llm: LLM) -> list[Any]:
    return [each.outputs.data for each in llm.embed(TEXTS * 2, use_tqdm=False)]


def scores(llm: LLM) -> list[Any]:
    return [each.outputs.score for each in llm.score(QUERY, DOCUMENTS, use_tqdm=False)]


NUMBERS: dict[str, tuple[type, dict[str, Any], Callable[[LLM], list[Any]]]] = {
    "classes": (Qwen3ForSequenceClassification, {"num_labels": 3}, classes),
    "classes of tokens": (Qwen3ForTokenClassification, {"num_labels": 5}, of_tokens),
    "vectors": (Qwen3Model, {}, vectors),
    "scores": (Qwen3ForSequenceClassification, {"num_labels": 1, "vocab_size": 4 + len(WORDS)}, scores),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if "of" in name else pytest.mark.sweep) for name in NUMBERS]
)
def test_numbers_of_texts(name: str, tmp_path: Path) -> None:
    kind, sizes, call = NUMBERS[name]
    torch.manual_seed(0)
    saved(kind(Qwen3Config(**{**QWEN3, **sizes})), tmp_path)
    tokenizer().save_pretrained(tmp_path)
    settings: Any = {"device": "cpu", "use_tqdm": False, "runner": "pooling", "kv_cache_memory_bytes": "16M"}
    settings |= {"max_num_batched_tokens": 16, "skip_tokenizer_init": name != "scores"}
    with LLM(str(tmp_path), **settings) as alone, LLM(str(tmp_path), pipeline_parallel_size=2, **settings) as stages:
        for _ in range(3):
            for one, two in zip(call(alone), call(stages), strict=True):
                np.testing.assert_array_equal(one, two)


FLAGS = ("--model", "bundled", "--device", "cpu", "--kv-cache-memory-bytes", "16M", "--max-num-batched-tokens", "32")
ASKED = {"prompt": "Once upon a time", "max_tokens": 24, "temperature": 0, "ignore_eos": True}


def streamed(url: str, **more: Any) -> str:
    """The text of a stream, until the caller leaves it or it ends."""
    text, most = "", more.pop("most", None)
    with httpx.stream("POST", url + "/v1/completions", json={**ASKED, "stream": True, **more}, timeout=60) as stream:
        for line in stream.iter_lines():
            if line.startswith("data: {"):
                text += json.loads(line[6:])["choices"][0]["text"]
            if most is not None and len(text) > most:
                break
    return text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "ranks", "engines"),
    [
        (("-pp", "2"), 2, 1),
        pytest.param(("-pp", "2", "-tp", "2", "-dp", "2", "--api-workers", "2"), 4, 2, marks=pytest.mark.sweep),
    ],
)
def test_a_server_of_stages_streams_counts_sleeps_and_ends_with_one(
    flags: tuple[str, ...], ranks: int, engines: int
) -> None:
    with LLM("bundled", device="cpu", use_tqdm=False, kv_cache_memory_bytes="16M") as alone:
        params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
        want = alone.generate(str(ASKED["prompt"]), params, use_tqdm=False)[0].outputs[0].text
    with Server(*FLAGS, *flags, "--enable-sleep-mode") as server:
        found: list[str] = []
        threads = [threading.Thread(target=lambda: found.append(streamed(server.url))) for _ in range(4)]
        for each in threads:
            each.start()
        for each in threads:
            each.join(60)
        assert found == [want] * 4
        assert until(lambda: server.metrics()["vllm:generation_tokens_total"] == 4 * 24)
        assert streamed(server.url, max_tokens=900, most=4)
        assert until(lambda: server.metrics()["vllm:num_requests_running"] == 0)
        for path in ("/sleep?level=1", "/wake_up", "/reset_prefix_cache"):
            assert httpx.post(server.url + path, timeout=60).status_code == 200
        assert server.complete(**ASKED).json()["choices"][0]["text"] == want
        followers = [each for each in server.children() if "quintet.engine.parallel.follower" in words_of(each)]
        assert len(followers) == (ranks - 1) * engines
        followers[0].kill()
        assert until(lambda: server.process.poll() is not None) and server.process.returncode == 1
        assert f"of {ranks} has ended: it was killed by SIGKILL" in server.output and server.leftovers() == []
