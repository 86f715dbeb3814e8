"""The compiled step: what it communicates, that it lowers for a TPU, that its programs are kept."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers import tpu
from tests.helpers.models import FAMILIES, VOCAB, make, variant
from tests.helpers.run_model import Runner

pytestmark = tpu.needs_jax

if not tpu.needs_jax.args[0]:
    import jax

    from quintet.platforms.tpu import attention
    from quintet.platforms.tpu.bridge import jax_view
    from quintet.types import Bucket
    from scripts.compile_for_tpu import Sizes, program

COLLECTIVE = re.compile(r" (all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter)(?:-start)?\(")
SIZES = {"page_size": 16, "max_model_len": 64, "pages": 9}
EVEN: dict[str, Any] = {
    "hidden_size": 64,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "intermediate_size": 96,
    "vocab_size": VOCAB + 3,
    "num_hidden_layers": 3,
}


def config(family: str) -> Any:
    return make(family, {**FAMILIES[family]["plain"], **EVEN}).config


def described(family: str, devices: int, dtype: str = "float32") -> Any:
    return program(config(family), jax.devices("cpu")[:devices], Sizes(dtype=getattr(torch, dtype), **SIZES))


def collectives(family: str, devices: int, dtype: str = "float32") -> list[str]:
    compiled = described(family, devices, dtype).trace(Bucket(16, 4, 16, 4)).lower().compile()
    return COLLECTIVE.findall(compiled.as_text())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["llama", "phi3", "qwen2", "qwen3"])
def test_devices_talk_once_after_attention_and_once_after_the_feed_forward(family: str, dtype: str) -> None:
    """As tensor parallelism by hand would: two sums per layer, one for the embedding, and the logits joined."""
    found = collectives(family, 4, dtype)
    assert sorted(set(found)) == ["all-gather", "all-reduce"]
    assert found.count("all-reduce") == 2 * EVEN["num_hidden_layers"] + 1
    assert found.count("all-gather") == 1


def test_one_device_talks_to_nobody() -> None:
    assert collectives("llama", 1) == []


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_cache_is_donated_and_not_copied(dtype: str) -> None:
    step = program(config("llama"), jax.devices("cpu")[:1], Sizes(getattr(torch, dtype), **{**SIZES, "pages": 2000}))
    memory = step.trace(Bucket(16, 4, 16, 4)).lower().compile().memory_analysis()
    layer = step.kv[0]
    size = torch.Size(layer.shape).numel() * layer.dtype.itemsize
    assert memory.alias_size_in_bytes >= len(step.kv) * size
    assert memory.temp_size_in_bytes < size / 2


@pytest.mark.parametrize("family", FAMILIES)
def test_the_whole_step_lowers_for_a_tpu(family: str) -> None:
    """With the kernels that a TPU would run: Mosaic programs, one to write the cache and one to read it."""
    tiny = variant(family, next(iter(FAMILIES[family])))
    with attention.for_described_tpu():
        step = program(tiny.config, jax.devices("cpu")[:1], Sizes(dtype=torch.bfloat16, **SIZES))
        lowered = step.trace(Bucket(16, 4, 16, 4)).lower(lowering_platforms=("tpu",))
    assert lowered.as_text().count("tpu_custom_call") >= 2, "layers that are alike share theirs"


def test_programs_are_kept_for_the_next_start(tmp_path: Path) -> None:
    from quintet.config import EngineConfig
    from quintet.platforms.tpu import PLATFORM

    before = jax.config.jax_compilation_cache_dir
    folder = tmp_path / "programs"
    try:
        settled, _ = PLATFORM.configure(EngineConfig(compilation_cache_dir=str(folder)))
        Runner(variant("llama", "plain"), platform=PLATFORM(settled), sizes=(16,))
        assert folder.stat().st_mode & 0o077 == 0, "what lies there is run: it is nobody else's to write"
        assert list(folder.iterdir())
    finally:
        jax.config.update("jax_compilation_cache_dir", before)


def test_each_device_holds_its_share_of_matrices_and_cache() -> None:
    even = make("llama", {**FAMILIES["llama"]["plain"], **EVEN, "num_key_value_heads": 8})
    whole, shared = (Runner(even, platform=tpu.platform(count), sizes=(16,)).worker for count in (1, 8))
    for worker, count in ((whole, 1), (shared, 8)):
        for name, parameter in worker.model.named_parameters():
            array = jax_view(parameter)
            shards = {shard.data.size for shard in array.addressable_shards}
            assert shards == {array.size // (count if "proj" in name or array.ndim > 1 and "table" not in name else 1)}
        assert {shard.data.size for kv in worker._kv for shard in kv.addressable_shards} == {
            kv.size // count for kv in worker._kv
        }


def test_a_tied_head_is_held_once() -> None:
    worker = Runner(variant("llama", "tied, biased"), platform=tpu.platform(), sizes=(16,)).worker
    head, embedding = (jax_view(worker.model.get_parameter(name)) for name in TIED)
    assert head.unsafe_buffer_pointer() == embedding.unsafe_buffer_pointer()


TIED = ("lm_head.linear.weight", "model.embed_tokens.weight")
