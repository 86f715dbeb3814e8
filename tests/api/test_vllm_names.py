"""vLLM's names over our engine: arguments, the engine that its caller steps, metrics, the registry of models."""

import argparse
import asyncio
import dataclasses
import json
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import quintet.models
from quintet import (
    LLM,
    AsyncEngineArgs,
    AsyncLLM,
    AsyncLLMEngine,
    EngineArgs,
    EngineConfig,
    FlexibleArgumentParser,
    LLMEngine,
    ModelRegistry,
    RequestOutputKind,
    TokensPrompt,
)
from quintet.common.plugins import load_plugins
from quintet.engine.observability.metrics import Counter, Gauge, Histogram, Vector, metrics_of
from quintet.engine.observability.request_stats import RequestStats
from quintet.engine.observability.stats import STEP_BOUNDS, SchedulerStats, SpecDecodeStats, Stats, StepStats
from quintet.hub.resolve import load_model_config
from quintet.models import model_class
from tests.helpers.platforms.null_engine import expected, folder, greedy

SETTINGS: dict[str, Any] = {"device": "null", "load_format": "dummy", "skip_tokenizer_init": True}


def args(**more: Any) -> EngineArgs:
    return EngineArgs(model=str(folder()), max_model_len=128, **SETTINGS, **more)


# ---------------------------------------------------------------------------------------------------------- arguments


def test_arguments_go_by_vllms_names_and_may_still_be_set() -> None:
    given = EngineArgs("bundled", block_size=32, speculative_config={"method": "ngram", "num_speculative_tokens": 2})
    given.seed = 7
    given.max_model_len = "1k"
    made = given.create_engine_config()
    assert type(made) is EngineConfig and (made.page_size, made.seed, made.max_model_len) == (32, 7, 1000)
    assert EngineConfig.from_kwargs(**dataclasses.asdict(given)) == made
    with pytest.raises(AttributeError, match="unknown engine argument 'sed'; did you mean 'seed'"):
        given.sed = 1  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="seed must be a whole number"):
        given.seed = "x"  # type: ignore[assignment]
    with pytest.raises(ValueError, match="unknown engine argument 'sed'"):
        EngineArgs(sed=1)  # type: ignore[call-arg]


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("kind", [argparse.ArgumentParser, FlexibleArgumentParser])
def test_a_command_line_becomes_arguments(kind: Any, grouped: bool) -> None:
    parser = kind()
    place = parser.add_argument_group("engine") if grouped else parser
    assert EngineArgs.add_cli_args(place) is place
    place.set_defaults(model="mine")
    parser.add_argument("--max-tokens", type=int)
    words = [
        "--max-tokens=3",
        "--block-size",
        "16",
        "--logits-processors",
        "a:B",
        "--profiler-config.profiler",
        "torch",
    ]
    parsed = parser.parse_args([*words, "--profiler-config.torch-profiler-dir", "x"])
    found = AsyncEngineArgs.from_cli_args(parsed)
    assert (parsed.model, parsed.dtype, parsed.max_tokens) == ("mine", "auto", 3)
    assert (found.model, found.page_size, found.logits_processors) == ("mine", 16, ("a:B",))
    assert str(found.profiler_config.torch_profiler_dir).endswith("/x")
    del parsed.max_tokens
    assert EngineConfig.from_kwargs(**vars(parsed)) == found.create_engine_config()


def test_vllms_parser_takes_underscores_and_names_the_nearest(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    monkeypatch.setattr(sys, "argv", ["script", "--max_model_len", "4K"])
    assert parser.parse_args().max_model_len == 4096
    with pytest.raises(SystemExit):
        parser.parse_args(["--max_modle_len", "4K"])
    assert "--max-modle-len" in capsys.readouterr().err


# ------------------------------------------------------------------------------------------------------- the engine


def drain(engine: LLMEngine) -> dict[str, list[int]]:
    found = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            found[output.request_id] = list(output.outputs[0].token_ids)
    return found


def test_requests_are_added_between_steps_and_come_out_as_alone() -> None:
    engine = LLMEngine.from_engine_args(args())
    assert engine.step() == [] and not engine.has_unfinished_requests()
    assert engine.add_request("a", TokensPrompt(prompt_token_ids=[1, 5]), greedy(max_tokens=20)) == "a"
    first = engine.step()
    assert engine.add_request("b", [9], greedy()) == "b" and engine.get_num_unfinished_requests() == 2
    assert first == [] or first[0].outputs[0].token_ids == expected([1, 5], 1)
    assert drain(engine) == {"a": expected([1, 5], 20), "b": expected([9], 8)}
    with pytest.raises(ValueError, match="lora_request is a LoRARequest, not str"):
        engine.add_request("c", [1], greedy(), lora_request="x")  # type: ignore[call-arg]
    with pytest.raises(AttributeError, match="LLMEngine.model_config is not there: use config"):
        engine.model_config  # noqa: B018


def test_an_aborted_request_gives_nothing_more() -> None:
    engine = LLMEngine(args())
    for name in "abc":
        engine.add_request(name, [1], greedy(max_tokens=30))
    engine.step()
    engine.abort_request("a")
    engine.abort_request(["b", "nobody"])
    assert drain(engine) == {"c": expected([1], 30)} and engine.get_stats()["num_running"] == 0


def test_a_refused_request_leaves_nothing_behind() -> None:
    engine = LLMEngine(args())
    with pytest.raises(ValueError, match="takes one prompt, not 2"):
        engine.add_request("a", [[1], [2]], greedy())  # type: ignore[list-item]
    with pytest.raises(ValueError, match="token id 500"):
        engine.add_request("a", [500], greedy())
    with pytest.raises(ValueError, match="request_id is text, not int"):
        engine.add_request(1, [1], greedy())  # type: ignore[arg-type]
    assert not engine.has_unfinished_requests()


def test_an_llm_and_its_engine_share_steps_and_keep_their_requests_apart() -> None:
    llm = LLM.from_engine_args(args())
    engine = llm.llm_engine
    assert engine is llm.llm_engine
    engine.add_request("mine", [3], greedy(max_tokens=40))
    found: list[Any] = []
    caller = threading.Thread(target=lambda: found.extend(llm.generate([[7]], greedy(max_tokens=30), use_tqdm=False)))
    caller.start()
    assert drain(engine) == {"mine": expected([3], 40)}
    caller.join()
    assert found[0].outputs[0].token_ids == expected([7], 30)


def test_only_arguments_open_an_engine() -> None:
    with pytest.raises(ValueError, match="engine_args are EngineArgs or an EngineConfig, not dict"):
        LLM.from_engine_args({})  # type: ignore[arg-type]


def test_the_async_engine_is_ours_under_both_names() -> None:
    assert AsyncLLMEngine is AsyncLLM
    given = AsyncEngineArgs(model=str(folder()), **SETTINGS)
    engine = AsyncLLMEngine.from_engine_args(given)

    async def main() -> list[int]:
        tokens = []
        params = greedy(output_kind=RequestOutputKind.DELTA)
        async for output in engine.generate(request_id="x", prompt=[4], sampling_params=params):
            tokens += output.outputs[0].token_ids
        await engine.abort("x")
        return tokens

    assert asyncio.run(main()) == expected([4], 8)
    assert engine.get_metrics()
    engine.shutdown()


# ----------------------------------------------------------------------------------------------------------- metrics


def test_metrics_are_objects_of_four_kinds() -> None:
    sizes = (2, 1, *(0,) * (len(STEP_BOUNDS) - 2), 4)
    stats = Stats(
        SchedulerStats(num_running=2, num_waiting=1, kv_usage=0.5, prefix_queries=12, prefix_hits=5),
        StepStats(7, 3, num_tokens=99, num_prompt_tokens=10, num_generation_tokens=20, step_sizes=sizes),
        SpecDecodeStats(accepted_at=(3, 2)),
    )
    found = {each.name: each for each in metrics_of(stats, RequestStats(), "m")}
    labels = {"model_name": "m", "engine": "0"}
    assert found["vllm:num_requests_running"] == Gauge("vllm:num_requests_running", labels, 2.0)
    assert found["vllm:prompt_tokens"] == Counter("vllm:prompt_tokens", labels, 15)
    accepted = "vllm:spec_decode_num_accepted_tokens_per_pos"
    assert found[accepted] == Vector(accepted, labels, [3, 2])
    steps = found["vllm:iteration_tokens_total"]
    assert isinstance(steps, Histogram) and (steps.count, steps.sum) == (7, 99.0)
    assert (steps.buckets["1.0"], steps.buckets["8.0"], steps.buckets["16384.0"], steps.buckets["+Inf"]) == (2, 3, 3, 7)


def test_requests_that_ended_are_in_the_metrics() -> None:
    """As vLLM's example reads them; what was taken back counts as aborted, and is not timed as if it had ended."""
    llm = LLM(**dataclasses.asdict(args()))
    llm.generate([[4], [5, 6, 7]], greedy(max_tokens=8, n=2, temperature=1.0), use_tqdm=False)
    engine = llm.llm_engine
    engine.add_request("left", TokensPrompt(prompt_token_ids=[4]), greedy(max_tokens=50))
    engine.step()
    engine.abort_request(["left"])
    found = {(each.name, each.labels.get("finished_reason")): each for each in llm.get_metrics()}
    ended = {why: each.value for (name, why), each in found.items() if name == "vllm:request_success"}  # type: ignore[attr-defined]
    assert ended == {"stop": 0, "length": 4, "repetition": 0, "abort": 1, "error": 0}
    prompts, latency = found["vllm:request_prompt_tokens", None], found["vllm:e2e_request_latency_seconds", None]
    assert isinstance(prompts, Histogram) and isinstance(latency, Histogram)
    assert (prompts.count, prompts.sum, prompts.buckets["1.0"]) == (latency.count, 1 + 3 + 1, 2)
    assert latency.count == 3 and latency.buckets["+Inf"] == 3 and latency.sum > 0


# ------------------------------------------------------------------------------------------------ models of others

MODULE = """
from quintet.models.llama import LlamaForCausalLM

class PluggedForCausalLM(LlamaForCausalLM):
    pass

def register():
    from quintet import ModelRegistry
    ModelRegistry.register_model("PluggedForCausalLM", "quintet_test_plugin:PluggedForCausalLM")
"""
POINTS = """
[quintet.models]
plugged_by_type = quintet_test_plugin:PluggedForCausalLM
no_class = quintet_test_plugin
BroughtForCausalLM = quintet_test_plugin:PluggedForCausalLM
lost = quintet_test_plugin:Nothing

[quintet.general_plugins]
tester = quintet_test_plugin:register
"""


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A distribution as pip leaves it: a module, and its dist-info."""
    site = tmp_path / "site"
    info = site / "quintet_test_plugin-1.0.dist-info"
    info.mkdir(parents=True)
    (site / "quintet_test_plugin.py").write_text(MODULE)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: quintet-test-plugin\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(POINTS)
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.setattr(quintet.models, "_REGISTERED", {})
    _forget()
    yield site
    sys.modules.pop("quintet_test_plugin", None)
    _forget()


def _forget() -> None:
    quintet.models._plugged.cache_clear()
    load_plugins.cache_clear()


def config_of(path: Path, **entries: Any) -> Any:

    said = json.loads((folder() / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**said, **entries}))
    return load_model_config(path)


@pytest.mark.parametrize("architecture", ["BroughtForCausalLM", "PluggedForCausalLM"])
def test_an_installed_package_brings_a_model(plugin: Path, tmp_path: Path, architecture: str) -> None:
    config = config_of(tmp_path, architectures=[architecture])
    assert model_class(config).__module__ == "quintet_test_plugin"
    assert "plugged_by_type" in quintet.models.families() and architecture in ModelRegistry.get_supported_archs()
    assert model_class(config_of(tmp_path)).__module__ == "quintet.models.llama"
    llm = LLM(str(tmp_path), **{**SETTINGS, "use_tqdm": False})
    assert llm.generate([[1]], greedy(), use_tqdm=False)[0].outputs[0].token_ids == expected([1], 8)


def test_what_a_package_promises_and_does_not_have_is_refused(plugin: Path) -> None:
    class Config:
        model_type = "lost"

    with pytest.raises(ValueError, match="model 'lost' comes from 'quintet_test_plugin:Nothing', which cannot be load"):
        model_class(Config())
    Config.model_type = "no_class"
    with pytest.raises(ValueError, match=r"'quintet_test_plugin', which names no class; write .package\.module:Class"):
        model_class(Config())


def test_a_plugin_that_fails_is_named(plugin: Path, tmp_path: Path) -> None:
    (plugin / "quintet_test_plugin.py").write_text("def register():\n    raise RuntimeError('no luck')\n")
    with pytest.raises(ValueError, match=r"the plug-in 'tester' \(.*\) failed: RuntimeError: no luck; mend"):
        config_of(tmp_path)


def test_a_model_is_registered_by_its_class(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(quintet.models, "_REGISTERED", {})
    from quintet.models.llama import LlamaForCausalLM

    class Mine(LlamaForCausalLM):
        pass

    ModelRegistry.register_model("MineForCausalLM", Mine)
    assert model_class(config_of(tmp_path, architectures=["MineForCausalLM"])) is Mine
    supported = ModelRegistry.get_supported_archs()
    assert "MineForCausalLM" in supported and "LlamaForCausalLM" in supported and "BertLMHeadModel" not in supported
    with pytest.raises(ValueError, match="model_cls is a class or 'package.module:Class', not 'nothing'"):
        ModelRegistry.register_model("X", "nothing")
