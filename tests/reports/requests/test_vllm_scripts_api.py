"""Calls and settings of vLLM's own example scripts work with the import changed (claim 5)."""

import dataclasses
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from quintet import (
    LLM,
    AdapterLogitsProcessor,
    AsyncLLM,
    EngineArgs,
    EngineConfig,
    FlexibleArgumentParser,
    LLMEngine,
    SamplingParams,
    ShardedStateLoader,
    VllmConfig,
    cleanup_dist_env_and_memory,
)
from quintet.config import BUNDLED
from quintet.hub.resolve import resolve_model

SMALL: dict[str, Any] = {"max_model_len": 256, "kv_cache_memory_bytes": 2**24}
GREEDY = SamplingParams(temperature=0.0, max_tokens=4)
PROMPT = "The capital of France is"


def text(llm: LLM) -> str:
    return llm.generate(PROMPT, GREEDY, use_tqdm=False)[0].outputs[0].text


@pytest.fixture(scope="module")
def real() -> Iterator[LLM]:
    made = LLM("bundled", **SMALL)
    yield made
    made.close()


# --------------------------------------------------------------------------------------------------------- settings


def test_context_extension_takes_max_model_len_among_hf_overrides() -> None:
    rope = {"rope_theta": 10000.0, "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
    more = {**SMALL, "max_model_len": None}
    llm = LLM("bundled", hf_overrides={"rope_parameters": rope, "max_model_len": 4096}, device="null",
              load_format="dummy", **more)  # fmt: skip
    assert llm.config.max_model_len == 4096
    llm.close()


def test_the_length_is_given_once() -> None:
    assert EngineConfig.from_kwargs(hf_overrides={"max_model_len": 64}, max_model_len=64).max_model_len == 64
    alone = EngineConfig.from_kwargs(hf_overrides={"max_model_len": 64})
    assert (alone.max_model_len, alone.hf_overrides) == (64, None)
    assert alone.replace(seed=3).max_model_len == 64
    with pytest.raises(ValueError, match="hf_overrides has max_model_len 64, and max_model_len is 32; give one"):
        EngineConfig.from_kwargs(hf_overrides={"max_model_len": 64}, max_model_len=32)
    with pytest.raises(ValueError, match="max_model_len"):
        EngineConfig.from_kwargs(hf_overrides={"max_model_len": "long"})


@pytest.mark.parametrize(
    "setting",
    [
        {"enable_sleep_mode": True}, {"enable_sleep_mode": False}, {"task": "generate"}, {"task": "auto"},
        {"max_num_seqs": None}, {"max_num_batched_tokens": None}, {"block_size": None}, {"quantization_config": {}},
        {"quantization_config": None}, {"enable_lora": False}, {"swap_space": 0}, {"cpu_offload_gb": 0},
        {"rope_scaling": None}, {"disable_sliding_window": False},
    ],
    ids=str,
)  # fmt: skip
def test_idioms_that_ask_for_nothing_are_taken(setting: dict[str, Any]) -> None:
    assert EngineConfig.from_kwargs(**setting) == EngineConfig()
    args = EngineArgs(**setting)
    assert EngineConfig.from_kwargs(**dataclasses.asdict(args)) == EngineConfig()


@pytest.mark.parametrize(
    "setting",
    [{"swap_space": 4}, {"cpu_offload_gb": 1}, {"task": "embed"}, {"enable_sleep_mode": "yes"},
     {"quantization_config": {"a": 1}}, {"max_num_seqs": 0}],
    ids=str,
)  # fmt: skip
def test_what_asks_for_something_is_still_refused(setting: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(setting))):
        EngineConfig.from_kwargs(**setting)


# --------------------------------------------------------------------------------------------------------- scripts


def test_weights_are_loaded_after_a_start_without_them(real: LLM) -> None:
    """As the script that skips loading at the start."""
    llm = LLM("bundled", load_format="dummy", enforce_eager=True, **SMALL)
    before = text(llm)
    assert llm.collective_rpc("update_config", args=({"load_config": {"load_format": "auto"}},)) == [None]
    assert llm.collective_rpc("reload_weights") == [None]
    assert before != text(llm) == text(real)
    llm.close()


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (("apply",), "workers have no method 'apply'; name one of the class that worker_extension_cls gives"),
        (("update_config", None, ({"load_config": {"load_format": "auto", "x": 1}},)), "update_config takes"),
        (("update_config", None, ({"model_config": {"seed": 1}},)), "update_config takes"),
        (("update_config", None, ({"load_config": {"load_format": "wrong"}},)), "load_format"),
        (("update_config",), "missing 1 required"),
        (("reload_weights", None, (), {"wrong": 1}), "unexpected keyword argument 'wrong'"),
        (("save_sharded_state", None, ("x", "other-{rank}")), "pattern is 'model-rank-"),
    ],
)
def test_other_calls_of_workers_are_refused_in_a_sentence(real: LLM, call: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        real.collective_rpc(*call)
    assert real.collective_rpc("check_health", timeout=1.0) == [None]
    assert real.collective_rpc(lambda worker: worker.rank) == [0]  # in one process
    assert text(real).startswith(" Paris.")


def test_sharded_state_is_written_and_read_as_in_the_script(real: LLM, tmp_path: Path) -> None:
    parser = FlexibleArgumentParser()
    EngineArgs.add_cli_args(parser)
    parser.add_argument("--file-pattern", default=ShardedStateLoader.DEFAULT_PATTERN)
    parser.add_argument("--max-file-size", type=int, default=5 * 1024**3)
    options = parser.parse_args(["--model", "bundled", "--max-model-len", "256"])
    llm = LLM(**dataclasses.asdict(EngineArgs.from_cli_args(options)))
    core = llm.llm_engine.engine_core
    core.save_sharded_state(path=str(tmp_path), pattern=options.file_pattern, max_size=options.max_file_size)
    llm.close()
    folder = resolve_model(EngineConfig(model=BUNDLED))
    for file in folder.iterdir():
        if file.is_file() and file.suffix not in (".bin", ".pt", ".safetensors"):
            shutil.copy(file, tmp_path)
    again = LLM(str(tmp_path), load_format="sharded_state", **SMALL)
    assert text(again) == text(real)
    again.close()


class Wrapped(AdapterLogitsProcessor):
    """Draws the token that a request names; written against vLLM's names."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool) -> None:
        super().__init__(vllm_config, device, is_pin_memory)
        self.on_cpu = device.type == "cpu"

    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(self, params: SamplingParams) -> Any:
        target = params.extra_args and params.extra_args.get("target_token")
        if target is None or not self.on_cpu:
            return None

        def only(output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
            kept = logits[target].item()
            logits[:] = float("-inf")
            logits[target] = kept
            return logits

        return only


def test_a_logits_processor_of_the_example_runs() -> None:
    llm = LLM("bundled", logits_processors=[Wrapped], **SMALL)
    wanted = SamplingParams(temperature=0.0, max_tokens=3, extra_args={"target_token": 128})
    first, second = llm.generate([PROMPT, PROMPT], [wanted, GREEDY], use_tqdm=False)
    assert first.outputs[0].token_ids == [128] * 3 and second.outputs[0].text.startswith(" Paris.")
    llm.close()


def test_a_cache_is_reset_while_requests_run(real: LLM) -> None:
    long = [list(range(5, 105))]
    assert real.reset_prefix_cache() is True
    engine: LLMEngine = real.llm_engine
    engine.add_request("runs", long[0], SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True))
    engine.step()
    assert real.reset_prefix_cache(reset_running_requests=True, reset_connector=True) is True
    outputs = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    fresh = real.generate(long, SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True), use_tqdm=False)[0]
    assert outputs[-1].outputs[0].token_ids == fresh.outputs[0].token_ids


async def test_it_is_so_in_async_llm() -> None:
    llm = AsyncLLM.from_engine_args(EngineArgs("bundled", device="null", load_format="dummy", **SMALL))
    assert await llm.reset_prefix_cache(reset_running_requests=True) is True
    assert await llm.collective_rpc("check_health") == [None]
    with pytest.raises(ValueError, match="workers have no method 'apply'"):
        await llm.collective_rpc("apply")
    llm.shutdown()


@pytest.mark.slow
def test_one_engine_is_given_up_for_another() -> None:
    """As the script on prefix caching."""
    for enabled in (False, True):
        llm = LLM("bundled", enable_prefix_caching=enabled, gpu_memory_utilization=0.4, **SMALL)
        assert text(llm).startswith(" Paris.")
        del llm
        cleanup_dist_env_and_memory()
