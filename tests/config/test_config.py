"""What the user may set: one form for each value, and a message with a way out for everything else."""

import argparse
import dataclasses
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from quintet.config import (
    UNSUPPORTED,
    EngineConfig,
    Environment,
    read_environment,
    setting_fields,
    unchanged_environment,
)
from quintet.config.schema import flags

GOOD = [
    ("max_model_len", "4k", 4000),
    ("max_model_len", "4K", 4096),
    ("max_model_len", "32K", 32768),
    ("max_model_len", "25.6k", 25600),
    ("max_model_len", "auto", "auto"),
    ("max_model_len", -1, "auto"),
    ("max_model_len", None, None),
    ("kv_cache_memory_bytes", "2G", 2 * 2**30),
    ("kv_offloading_size", "512M", 0.5),
    ("kv_offloading_size", "8", 8.0),
    ("kv_cache_memory_bytes", "2GiB", 2 * 2**30),
    ("kv_cache_memory_bytes", "2GB", 2 * 10**9),
    ("kv_cache_memory_bytes", "512MiB", 512 * 2**20),
    ("dtype", "half", "float16"),
    ("dtype", "fp32", "float32"),
    ("dtype", "bf16", "bfloat16"),
    ("dtype", torch.bfloat16, "bfloat16"),
    ("gpu_memory_utilization", "0.5", 0.5),
    ("gpu_memory_utilization", 1, 1.0),
    ("enforce_eager", "true", True),
    ("model", Path("a/b"), "a/b"),
    ("hf_overrides", '{"a": {"b": 1}}', {"a": {"b": 1}}),
    ("logits_processors", ["a.b:C"], ("a.b:C",)),
    ("generation_config", "vllm", "quintet"),
    ("max_logprobs", -1, -1),
    ("capture_sizes", [8, 1, 8], (1, 8)),
    ("capture_sizes", "[1, 2, 4]", (1, 2, 4)),
    ("attention_backend", "TRITON_ATTN", "triton"),
    ("attention_backend", "Pallas", "pallas"),
]

BAD = [
    ("model", "", "not empty"),
    ("model", None, "must be text"),
    ("max_model_len", 0, "at least 1"),
    ("max_model_len", "4 kilo", "4k"),
    ("max_model_len", "1.0001k", "whole number"),
    ("max_model_len", True, "whole number"),
    ("max_num_seqs", 0, "at least 1"),
    ("max_num_seqs", 2.5, "whole number"),
    ("max_num_seqs", None, "whole number"),
    ("page_size", -1, "at least 1"),
    ("num_pages", 1, "at least 2"),
    ("gpu_memory_utilization", 0, "over 0"),
    ("gpu_memory_utilization", 90, "share"),
    ("gpu_memory_utilization", float("nan"), "over 0"),
    ("gpu_memory_utilization", True, "over 0"),
    ("dtype", "int8", "one of auto, float32"),
    ("dtype", "bflot16", "did you mean 'bfloat16'"),
    ("load_format", "ptt", "auto, safetensors, pt, npcache, gguf, bitsandbytes, dummy, mistral"),
    ("scheduling_policy", "prio", "did you mean 'priority'"),
    ("logprobs_mode", 3, "one of raw_logprobs"),
    ("enforce_eager", "maybe", "true or false"),
    ("enforce_eager", 1, "true or false"),
    ("hf_overrides", "{", "JSON"),
    ("hf_overrides", [1], "mapping"),
    ("hf_overrides", {1: 2}, "text keys"),
    ("logits_processors", "a.b:C", "must be a list"),
    ("override_generation_config", {"temprature": 1}, "did you mean 'temperature'"),
    ("quantization", "int3", "one of int8, int4, w8a8, w4a8"),
    ("trust_remote_code", 2, "true or false"),
    ("model_impl", "other", "one of auto, quintet, transformers"),
    ("device", "", "not empty"),
    ("seed", "x", "whole number"),
    ("tensor_parallel_size", 0, "at least 1"),
    ("capture_sizes", [0], "at least 1"),
    ("max_capture_size", 0, "at least 1"),
    ("attention_backend", "", "not empty"),
]


@pytest.mark.parametrize(("name", "value", "form"), GOOD)
def test_a_value_is_brought_to_one_form(name: str, value: object, form: object) -> None:
    got = getattr(EngineConfig(**{name: value}), name)
    assert got == form
    assert type(got) is type(form)


@pytest.mark.parametrize(("name", "value", "says"), BAD)
def test_a_bad_value_is_refused_by_name(name: str, value: object, says: str) -> None:
    with pytest.raises(ValueError, match=name) as error:
        EngineConfig(**{name: value})
    assert says in str(error.value)


@pytest.mark.parametrize(
    ("kwargs", "says"),
    [
        ({"max_modl_len": 3}, "did you mean 'max_model_len'"),
        ({"blocksize": 3}, "did you mean 'block_size'"),
        ({"page_size": 8, "block_size": 8}, "block_size and page_size are the same setting"),
        ({"num_pages": 8, "kv_cache_memory_bytes": "1G"}, "give one of them"),
        ({"enforce_eager": True, "capture_ahead": True}, "captures nothing"),
        ({"capture_sizes": [1, 8], "max_capture_size": 4}, "ends at 8"),
        ({"skip_tokenizer_init": True, "tokenizer": "x"}, "must not be given"),
        ({"swap_space": 4}, "computed again"),
        ({"disable_log_requests": True}, "texts of requests are never logged"),
        ({"n_ctx": 4}, "use max_model_len"),
        ({"xyzzy": 4}, "known: "),
    ],
)
def test_names_are_refused_with_a_way_out(kwargs: dict[str, object], says: str) -> None:
    with pytest.raises(ValueError, match=".") as error:
        EngineConfig.from_kwargs(**kwargs)
    assert says in str(error.value)


def test_aliases_are_the_same_setting() -> None:
    config = EngineConfig.from_kwargs(block_size=8, num_gpu_blocks_override=9)
    assert (config.page_size, config.num_pages) == (8, 9)
    assert config.replace(block_size=4).page_size == 4


def test_replace_keeps_the_rest_and_checks_again() -> None:
    config = EngineConfig(model="m", max_model_len="4K", hf_token="secret")
    changed = config.replace(seed=3)
    assert (changed.model, changed.max_model_len, changed.hf_token, changed.seed) == ("m", 4096, "secret", 3)
    assert config.seed == 0
    with pytest.raises(ValueError, match="did you mean 'seed'"):
        config.replace(sed=3)
    with pytest.raises(ValueError, match="page_size must be"):
        config.replace(page_size=0)


def test_the_token_is_not_shown() -> None:
    assert "secret" not in repr(EngineConfig(hf_token="secret"))


def test_no_name_is_both_there_and_lacking() -> None:
    names = {each.name for each in setting_fields(EngineConfig)}
    aliases = {alias for each in setting_fields(EngineConfig) for alias in each.metadata["aliases"]}
    assert not (names | aliases) & set(UNSUPPORTED)
    assert not names & aliases


# ------------------------------------------------------------------------------------------------------------- flags

SAMPLES = {"max_model_len": "4K", "dtype": "half", "gpu_memory_utilization": "0.5", "hf_overrides": '{"a": 1}'}
SAMPLES |= {"lora_dtype": "bfloat16", "encoder_cache_rows": "64", "worker_extension_cls": "package.module.Class"}
SAMPLES |= {"override_generation_config": '{"top_p": 0.5}', "load_format": "dummy", "scheduling_policy": "priority"}
SAMPLES |= {"logprobs_mode": "raw_logits", "quantization": "int4", "quantization_group_size": "64"}
SAMPLES |= {"activation_bits": "8", "config_format": "hf", "tokenizer_mode": "mistral"}
SAMPLES |= {"safetensors_load_strategy": "eager", "model_loader_extra_config": "{}"}
SAMPLES |= {"model_impl": "transformers", "runner": "pooling", "convert": "embed"}
SAMPLES["kv_cache_dtype"] = "fp8_e4m3"
SAMPLES["kv_offloading_lmcache"] = '{"local_cpu": true}'
SAMPLES |= {"kv_offloading_backend": "native", "kv_offloading_policy": "arc", "kv_load_failure_policy": "fail"}
SAMPLES |= {"pipeline_parallel_size": "1", "distributed_executor_backend": "mp"}
SAMPLES |= {"expert_placement_strategy": "round_robin", "all2all_backend": "naive"}
SAMPLES |= {"limit_mm_per_prompt": '{"image": 2}', "optimization_level": "2", "attention_backend": "triton"}
SAMPLES |= {"mm_processor_kwargs": '{"max_pixels": 4096}', "media_io_kwargs": '{"video": {"num_frames": 8}}'}
NESTED = {each.name: each.metadata["nested"] for each in setting_fields(EngineConfig) if "nested" in each.metadata}
SEVERAL = ("capture_sizes", "lora_target_modules")  # values of one flag
ALONE = [each for each in setting_fields(EngineConfig) if each.name not in (*NESTED, *SEVERAL)]


def _parser() -> flags.Parser:
    parser = flags.Parser(prog="test")
    flags.add_arguments(parser, EngineConfig)
    return parser


@pytest.mark.parametrize("field", ALONE, ids=lambda field: field.name)
def test_every_field_has_its_flags_and_they_set_it_alone(field: dataclasses.Field) -> None:
    word = SAMPLES.get(field.name, "7")
    many = field.default == ()  # such a flag is repeated
    for flag in flags.flags_of(field):
        words = [flag] if isinstance(field.default, bool) else [flag, word] * (1 + many)
        want = True if isinstance(field.default, bool) else [word] * 2 if many else field.metadata["parse"](word)
        assert flags.given_settings(_parser().parse(words), EngineConfig) == {field.name: want}
    if isinstance(field.default, bool):
        off = "--no-" + field.name.replace("_", "-")
        assert flags.given_settings(_parser().parse([off]), EngineConfig) == {field.name: False}


def test_several_names_follow_one_flag() -> None:
    typed = _parser().parse(["--lora-target-modules", "q_proj", "experts"])
    given = flags.given_settings(typed, EngineConfig)
    assert EngineConfig("m", **given).lora_target_modules == ("q_proj", "experts")
    assert EngineConfig("m", lora_target_modules="all").lora_target_modules == ("all",)
    for wrong in ([], "", ["q_proj", ""], [7]):
        with pytest.raises(ValueError, match="lora_target_modules"):
            EngineConfig("m", lora_target_modules=wrong)


def test_several_numbers_follow_one_flag() -> None:
    for flag in ("--capture-sizes", "--cudagraph-capture-sizes"):
        given = flags.from_arguments(_parser().parse([flag, "8", "1", "2", "--seed", "3"]), EngineConfig)
        assert (given.capture_sizes, given.seed) == ((1, 2, 8), 3)


def test_every_flag_is_a_fields() -> None:
    parser = _parser()
    dests = {action.dest for action in parser._actions} - {"help"}
    entries = {f"{name}.{each.name}" for name, cls in NESTED.items() for each in dataclasses.fields(cls)}
    assert dests == {f"EngineConfig.{name}" for name in {each.name for each in setting_fields(EngineConfig)} | entries}


def test_no_flags_are_the_defaults() -> None:
    assert flags.from_arguments(_parser().parse([]), EngineConfig) == EngineConfig()
    assert flags.from_arguments(argparse.Namespace(), EngineConfig, seed=3) == EngineConfig(seed=3)


# ------------------------------------------------------------------------------------------------------- environment


def test_the_environment_is_read_whole() -> None:
    variables = {"QUINTET_DEVICE": "cpu", "QUINTET_LOG_LEVEL": "debug", "HF_HOME": "/x", "HF_HUB_OFFLINE": "YES"}
    assert read_environment({**variables, "PATH": "p"}) == Environment("cpu", "DEBUG", "/x", True)
    assert read_environment({"QUINTET_DEVICE": " "}) == Environment()


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("QUINTET_DEVISE", "cpu", "did you mean 'QUINTET_DEVICE'"),
        ("QUINTET_XYZZY_PLUGH", "", "known: QUINTET_ADMIN_API_KEY, QUINTET_ALLOW_RUNTIME_LORA_UPDATING"),
        ("QUINTET_LOG_LEVEL", "LOUD", "DEBUG, INFO"),
        ("HF_HUB_OFFLINE", "perhaps", "true or false"),
    ],
)
def test_a_wrong_variable_is_refused_by_name(name: str, value: str, says: str) -> None:
    with pytest.raises(ValueError, match=name) as error:
        read_environment({name: value})
    assert says in str(error.value)


def test_the_environment_settles_only_what_was_left_open() -> None:
    environment = Environment(device="cpu")
    assert environment.apply(EngineConfig()).device == "cpu"
    assert environment.apply(EngineConfig(device="null")).device == "null"
    assert Environment().apply(EngineConfig()).device == "auto"


def test_config_imports_without_torch() -> None:
    code = "import quintet.config, sys; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_an_import_leaves_no_variable_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XYZ_KEPT", "1")
    with unchanged_environment():
        os.environ["XYZ_NEW"] = "2"
        os.environ["XYZ_KEPT"] = "3"
    assert "XYZ_NEW" not in os.environ and os.environ["XYZ_KEPT"] == "1"


@pytest.mark.parametrize(
    "settings",
    [
        {"pipeline_parallel_size": 1, "enable_expert_parallel": True, "distributed_executor_backend": "uni"},
        {"distributed_executor_backend": "mp", "tensor_parallel_size": 2},
        {"expert_placement_strategy": "round_robin", "all2all_backend": "naive"},
        {"distributed_executor_backend": None},
    ],
)
def test_parallelism_that_asks_for_what_is_so_is_taken(settings: dict[str, Any]) -> None:
    config = EngineConfig.from_kwargs(**settings)
    assert all(getattr(config, name) == value for name, value in settings.items())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"distributed_executor_backend": "uni", "pipeline_parallel_size": 2}, "'uni' is one rank, and pipe.* is 2"),
        ({"pipeline_parallel_size": 0}, "pipeline_parallel_size must be"),
        ({"all2all_backend": "pplx"}, "all2all_backend 'pplx' is not there: .*every rank has all tokens.*leave it out"),
        ({"all2all_backend": "deepep_low_latency"}, "is not there: it sends the tokens of a rank"),
        ({"all2all_backend": "magic"}, "must be allgather_reducescatter or naive"),
        ({"expert_placement_strategy": "magic"}, "must be one of linear, round_robin"),
        ({"enable_eplb": True}, "enable_eplb moves whole experts .*enable_expert_parallel is off"),
        (
            {"enable_eplb": True, "enable_expert_parallel": True, "pipeline_parallel_size": 2},
            "enable_eplb: .* other stages see other layers; leave it out",
        ),
        ({"eplb_config": {"num_redundant_experts": 2}}, "copies are kept for enable_eplb, which is off"),
        ({"eplb_config": {"use_async": True}}, "eplb_config.use_async is not there: experts move between two steps"),
        ({"distributed_executor_backend": "magic"}, "must be mp .*, uni .*, ray .* or external_launcher"),
        ({"distributed_executor_backend": "uni", "tensor_parallel_size": 2}, "'uni' is one rank, and .* is 2"),
    ],
)
def test_parallelism_that_is_not_there_is_refused_with_what_to_do(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EngineConfig.from_kwargs(**settings)
