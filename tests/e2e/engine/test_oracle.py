"""The equality oracle: a request's tokens and log-probabilities are its own, whatever runs beside it and however.

Alone = batched = chunked = preempted = prefix-cached = in any arrival order, with ==, not nearly. The conformance kit
proves it of plain models in every type; here are quantized ones, small caches, every way of sampling and of scheduling.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from quintet import SamplingParams
from quintet.chat.prompts import Prompt
from quintet.config import EngineConfig
from quintet.conformance.harness.worker_runner import most_pages
from quintet.engine.client import EngineClient
from quintet.outputs import RequestOutput
from quintet_tools.checkpoints.tiny import FAMILIES, VOCAB, make, variant

PLAIN = {"max_model_len": 160, "num_pages": 200}
ENGINES: dict[str, dict[str, Any]] = {
    "batched": PLAIN,
    "no prefix cache": {**PLAIN, "enable_prefix_caching": False},
    "chunked": {**PLAIN, "max_num_batched_tokens": 7},
    "preempted": {
        **PLAIN,
        "num_pages": 23,
        "page_size": 8,
        "enable_prefix_caching": False,
        "max_num_batched_tokens": 40,
    },
    "preempted, cached, chunked": {**PLAIN, "num_pages": 23, "page_size": 8, "max_num_batched_tokens": 19},
    "whole prompts": {**PLAIN, "enable_chunked_prefill": False, "max_num_seqs": 3},
    "large pages": {**PLAIN, "page_size": 32},
    "eager": {**PLAIN, "enforce_eager": True},
    "by priority": {
        **PLAIN,
        "scheduling_policy": "priority",
        "num_pages": 25,
        "page_size": 8,
        "max_num_batched_tokens": 40,
    },
}
MODELS: list["Model"] = [  # family, variant, dtype, what else is set
    ("llama", "plain", "float32", {}),
    ("gemma2", "plain", "float32", {}),
    ("qwen3", "plain", "bfloat16", {}),
    ("qwen3", "plain", "bfloat16", {"kv_cache_dtype": "int8"}),
    ("qwen3", "plain", "bfloat16", {"kv_cache_dtype": "int4"}),
    ("gemma2", "plain", "float32", {"kv_cache_dtype": "fp8"}),
    ("deepseek_v3", "plain", "bfloat16", {"kv_cache_dtype": "int8"}),
    ("llama", "wide", "bfloat16", {"quantization": "w4a8"}),
    ("llama", "wide", "float32", {"quantization": "int4"}),
]
Model = tuple[str, str, str, dict[str, str]]
WIDE = {"hidden_size": 96, "intermediate_size": 160, "head_dim": 16}  # so that groups of 32 divide all inputs

Result = dict[str, Any]


@dataclass(frozen=True)
class Ask:
    """One request of a mix."""

    name: str
    prompt: list[int]
    params: SamplingParams
    priority: int
    arrival: int  # the step before which it comes


def client(model: Model, device: str = "cpu", **settings: Any) -> EngineClient:
    family, name, dtype, more = model
    tiny = make(family, {**FAMILIES[family]["plain"], **WIDE}) if name == "wide" else variant(family, name)
    settings = {"model": str(tiny.folder), "dtype": dtype, **more, **settings}
    page_size, step = settings.get("page_size", 16), settings.get("max_num_batched_tokens", 2048)
    # what groups that see a window need comes on top of the others'
    settings["num_pages"] += most_pages(tiny, 160, page_size, step) - -(-160 // page_size)
    config = EngineConfig.from_kwargs(device=device, skip_tokenizer_init=True, **settings)
    return EngineClient(config, progress=False)


def mix(seed: int) -> list[Ask]:
    """Prompts with shared beginnings, lengths around page borders, and every kind of sampling."""
    rng = random.Random(seed)
    stems = [[rng.randrange(3, VOCAB) for _ in range(70)] for _ in range(2)]
    asks = []
    for index in range(7):
        stem = rng.choice(stems)[: rng.choice([1, 8, 15, 16, 17, 31, 33, 64])]
        prompt = stem + [rng.randrange(3, VOCAB) for _ in range(rng.choice([0, 1, 3, 20]))]
        asks.append(Ask(str(index), prompt, sampling(rng), rng.randrange(3), rng.randrange(9)))
    return asks


def sampling(rng: random.Random) -> SamplingParams:
    kinds: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 0.9, "seed": rng.randrange(2**40)},
        {"temperature": 1.3, "seed": rng.randrange(99), "top_k": 7, "n": 2},
        {"temperature": 1.0, "seed": rng.randrange(99), "top_p": 0.8, "frequency_penalty": 0.5},
        {"temperature": 0.7, "seed": 5, "min_p": 0.05, "repetition_penalty": 1.3, "presence_penalty": 0.2},
        {"temperature": 0, "logit_bias": {5: 3.0}, "min_tokens": 4, "prompt_logprobs": 1},
    ]
    logprobs = rng.choice([None, 0, 3])
    return SamplingParams(
        max_tokens=rng.choice([4, 5, 18, 30]), logprobs=logprobs, detokenize=False, **rng.choice(kinds)
    )


def run(engine: EngineClient, asks: list[Ask]) -> Result:
    """Adds each request before the step it arrives at; checks the books after every step."""
    outputs: dict[str, RequestOutput] = {}
    waiting, step = sorted(asks, key=lambda ask: ask.arrival), 0
    by_priority = engine.config.scheduling_policy == "priority"
    while waiting or engine.busy:
        while waiting and waiting[0].arrival <= step:
            ask = waiting.pop(0)
            engine.add(ask.name, Prompt(ask.prompt), ask.params, ask.priority * by_priority)
        outputs.update((output.request_id, output) for output in engine.step())
        engine.engine.check_integrity()
        step += 1
    assert engine.engine.scheduler.pool.num_used == 0
    return {name: essence(output) for name, output in outputs.items()}


def essence(output: RequestOutput) -> Any:
    """What must be equal: tokens, reasons, and every log-probability to the last bit."""
    completions = [(list(c.token_ids), c.finish_reason, c.stop_reason, c.logprobs) for c in output.outputs]
    return completions, output.prompt_logprobs


@pytest.fixture(scope="module", params=MODELS[1:], ids=lambda model: "-".join([model[0], model[2], *model[3].values()]))
def model(request: pytest.FixtureRequest) -> Iterator[Model]:
    yield request.param


@pytest.fixture(scope="module")
def alone(model: Model) -> dict[int, Result]:
    """Each request of each mix on its own, in an engine that remembers nothing."""
    engine = client(model, **ENGINES["no prefix cache"])
    results: dict[int, Result] = {}
    for seed in range(3):
        results[seed] = {}
        for ask in mix(seed):
            results[seed].update(run(engine, [Ask(ask.name, ask.prompt, ask.params, 0, 0)]))
    return results


@pytest.mark.grid(cases=21)
@pytest.mark.parametrize("how", ENGINES)
def test_any_way_equals_alone(how: str, model: Model, alone: dict[int, Result]) -> None:
    engine = client(model, **ENGINES[how])
    for seed in range(3):
        assert run(engine, mix(seed)) == alone[seed], f"mix {seed}"


def test_the_mixes_do_what_their_names_say(model: Model) -> None:
    """Otherwise the oracle compares a thing with itself."""
    preempted = client(model, **ENGINES["preempted"])
    for seed in range(3):
        run(preempted, mix(seed))
    assert preempted.engine.stats().scheduler.num_preemptions > 0
    cached = client(model, **ENGINES["batched"])
    run(cached, mix(0))
    run(cached, mix(0))
    assert cached.engine.stats().scheduler.prefix_hits > 100
    chunked = client(model, **ENGINES["chunked"])
    run(chunked, mix(0))
    assert chunked.engine.stats().steps.num_steps > 40


def test_a_second_run_from_the_cache_equals_the_first(model: Model) -> None:
    engine = client(model, **ENGINES["batched"])
    assert run(engine, mix(1)) == run(engine, mix(1))


@pytest.mark.parametrize("seed", range(2))
def test_pages_come_back_after_random_aborts(seed: int) -> None:
    rng = random.Random(seed)
    engine = client(MODELS[0], **ENGINES["preempted, cached, chunked"])
    for ask in mix(seed):
        engine.add(ask.name, Prompt(ask.prompt), ask.params)
    names = [ask.name for ask in mix(seed)]
    while engine.busy:
        engine.step()
        if rng.random() < 0.4 and names:
            engine.abort([names.pop(rng.randrange(len(names)))])
        engine.engine.check_integrity()
    assert engine.engine.scheduler.pool.num_used == 0
    assert len(engine.output_processor) == 0


def test_seeds_matter_and_requests_without_one_differ() -> None:
    engine = client(MODELS[0], **PLAIN)
    params = [SamplingParams(temperature=1.0, max_tokens=20, seed=s, detokenize=False) for s in (1, 1, 2, None, None)]
    asks = [Ask(str(i), [5, 6, 7], each, 0, 0) for i, each in enumerate(params)]
    first, again, other, free, free_too = (run(engine, asks)[str(i)] for i in range(5))
    assert first == again
    assert len({str(each) for each in (first, other, free, free_too)}) == 4
