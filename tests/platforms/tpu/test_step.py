"""The compiled step: what it communicates, that it lowers for a TPU, that its programs are kept."""

import os
import re
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from quintet import SamplingParams
from quintet.chat.prompts import Prompt
from quintet.config import EngineConfig
from quintet.engine.client import EngineClient
from quintet_tools.checkpoints.tiny import FAMILIES, VOCAB, make, variant
from tests.helpers.platforms import tpu
from tests.helpers.platforms.null_engine import drain
from tests.helpers.platforms.run_model import Runner

pytestmark = tpu.needs_jax

if not tpu.needs_jax.args[0]:
    import jax

    from quintet.interface.types import MaxShape, ShapeBucket
    from quintet.platforms.tpu import attention
    from quintet.platforms.tpu.torchax_bridge import jax_view
    from scripts.compile_for_tpu import Sizes, program

COLLECTIVE = re.compile(r" (all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter)(?:-start)?\(")
SIZES = {"page_size": 16, "max_model_len": 64, "pages": 9}
EVEN: dict[str, Any] = {
    "hidden_size": 64,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "intermediate_size": 96,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 32,
    "vocab_size": VOCAB + 3,
    "num_hidden_layers": 3,
}


def config(family: str) -> Any:
    return make(family, {**FAMILIES[family]["plain"], **EVEN}).config


def described(family: str, devices: int, dtype: str = "float32") -> Any:
    return program(config(family), jax.devices("cpu")[:devices], Sizes(dtype=getattr(torch, dtype), **SIZES))[0]


def collectives(family: str, devices: int, dtype: str = "float32") -> list[str]:
    compiled = described(family, devices, dtype).trace(ShapeBucket(16, 4, 16, (4,))).lower().compile()
    return COLLECTIVE.findall(compiled.as_text())


@pytest.mark.grid(cases=1)
@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        ("llama", "float32"),
        *((family, "bfloat16") for family in ("llama", "mixtral", "phi3", "qwen2", "qwen3", "qwen2_moe", "qwen3_moe")),
    ],
)
def test_devices_talk_once_after_attention_and_once_after_the_feed_forward(family: str, dtype: str) -> None:
    """As tensor parallelism by hand would: two sums per layer, one for the embedding, and the logits joined."""
    found = collectives(family, 4, dtype)
    assert sorted(set(found)) == ["all-gather", "all-reduce"]
    assert found.count("all-reduce") == 2 * EVEN["num_hidden_layers"] + 1
    assert found.count("all-gather") == 1


def test_one_device_talks_to_nobody() -> None:
    assert collectives("llama", 1) == []


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["llama", "granitemoehybrid"])
def test_the_cache_is_donated_and_not_copied(family: str, dtype: str) -> None:
    sizes = Sizes(getattr(torch, dtype), **{**SIZES, "pages": 2000, "slots": 2000})
    step, kept = program(config(family), jax.devices("cpu")[:1], sizes)
    memory = step.trace(ShapeBucket(16, 4, 16, kept.table_widths(4))).lower().compile().memory_analysis()
    sizes_of = [torch.Size(each.shape).numel() * each.dtype.itemsize for each in step.state]
    assert memory.alias_size_in_bytes >= sum(sizes_of)
    assert memory.temp_size_in_bytes < sizes_of[0] / 2


@pytest.mark.grid(cases=6)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_whole_step_lowers_for_a_tpu(family: str) -> None:
    """With the kernels that a TPU would run: Mosaic programs, one to write the cache and one to read it."""
    tiny = variant(family, next(iter(FAMILIES[family])))
    with attention.for_described_tpu():
        step, kept = program(tiny.config, jax.devices("cpu")[:1], Sizes(dtype=torch.bfloat16, **SIZES))
        lowered = step.trace(ShapeBucket(16, 4, 16, kept.table_widths(4))).lower(lowering_platforms=("tpu",))
    least = 2 if kept.groups else 0  # states are left to XLA
    assert lowered.as_text().count("tpu_custom_call") >= least, "layers that are alike share theirs"


@pytest.mark.slow
def test_programs_are_kept_for_the_next_start(tmp_path: Path) -> None:
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


@pytest.mark.slow
def test_each_device_holds_its_share_of_matrices_and_cache() -> None:
    even = make("llama", {**FAMILIES["llama"]["plain"], **EVEN, "num_key_value_heads": 8})
    whole, shared = (Runner(even, platform=tpu.platform(count), sizes=(16,)).worker for count in (1, 8))
    for worker, count in ((whole, 1), (shared, 8)):
        for name, parameter in worker.model.named_parameters():
            array = jax_view(parameter)
            shards = {shard.data.size for shard in array.addressable_shards}
            assert shards == {array.size // (count if "proj" in name or array.ndim > 1 and "table" not in name else 1)}
        assert {shard.data.size for kv in worker._state for shard in kv.addressable_shards} == {
            kv.size // count for kv in worker._state
        }


def test_a_tied_head_is_held_once() -> None:
    worker = Runner(variant("llama", "tied, biased"), platform=tpu.platform(), sizes=(16,)).worker
    head, embedding = (jax_view(worker.model.get_parameter(name)) for name in TIED)
    assert head.unsafe_buffer_pointer() == embedding.unsafe_buffer_pointer()


TIED = ("lm_head.linear.weight", "model.embed_tokens.weight")


@pytest.mark.slow
def test_the_plan_counts_what_each_device_keeps() -> None:
    """Heads that do not divide are whole on every device; what is planned is what is there."""
    for kv_heads, shares in ((8, 8), (4, 1)):
        tiny = make("llama", {**FAMILIES["llama"]["plain"], **EVEN, "num_key_value_heads": kv_heads})
        worker = Runner(tiny, platform=tpu.platform(8), sizes=(16,)).worker
        per_device = {shard.data.nbytes for kv in worker._state for shard in kv.addressable_shards}
        assert {layout.shards for layout in worker.layouts} == {shares}
        assert per_device == {worker.layouts[0].nbytes * worker._room.pages}
        weights = [jax_view(parameter) for name, parameter in worker.model.named_parameters() if "table" not in name]
        planned = worker.estimate(MaxShape(ShapeBucket(16, 8, 16, (4,)), EVEN["hidden_size"], EVEN["vocab_size"]))
        assert planned.weights == sum(array.addressable_shards[0].data.nbytes for array in weights)


# One that comes while Python clears something up is dropped there, and pytest would be told of it.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:(?s).*KeyboardInterrupt:pytest.PytestUnraisableExceptionWarning")
def test_ctrl_c_never_loses_the_cache() -> None:
    """At any moment of any step: what runs afterwards gives what it gave before."""
    engine = client("tpu")
    wanted = list(complete(engine).outputs[0].token_ids)
    heard = signal.signal(signal.SIGINT, signal.default_int_handler)
    interrupted = turn = 0
    try:
        while turn < 25 or (interrupted <= 5 and turn < 250):  # where steps are quick, a Ctrl-C often comes too late
            timer = threading.Timer(0.001 + 0.0013 * (turn % 25), os.kill, (os.getpid(), signal.SIGINT))
            try:
                timer.start()
                complete(engine)
                timer.join()
                time.sleep(0.01)
            except KeyboardInterrupt:
                interrupted += 1
            timer.join()
            engine.abort(["only"])
            turn += 1
    finally:
        signal.signal(signal.SIGINT, heard)
    assert interrupted > 5
    assert list(complete(engine).outputs[0].token_ids) == wanted


def client(device: str) -> Any:
    config = EngineConfig(
        model=str(variant("llama", "plain").folder), device=device, dtype="float32", skip_tokenizer_init=True,
        max_model_len=64, num_pages=40, max_num_seqs=4, max_num_batched_tokens=16,
        compilation_cache_dir=tpu.programs().name,
    )  # fmt: skip
    return EngineClient(config, progress=False)


def complete(engine: Any) -> Any:
    engine.add("only", Prompt(list(range(3, 40))), SamplingParams(temperature=0, max_tokens=12, detokenize=False))
    return drain(engine)["only"]


def test_a_prompt_in_chunks_is_waited_for_chunk_by_chunk() -> None:
    """Or the host would run ahead of the device: nobody could join, and an abort would save nothing."""
    engine = client("tpu")
    landed = []
    device = engine.engine_plan.ranks.workers[0].device
    to_host = device.to_host
    device.to_host = lambda x: landed.append(tuple(x.shape)) or to_host(x)
    engine.add("only", Prompt(list(range(3, 60))), SamplingParams(temperature=0, max_tokens=2, detokenize=False))
    drain(engine)
    assert landed == [(16,)] * 5, "four chunks and a decode, each with its token ids"


def test_a_folder_that_others_may_write_to_is_refused(tmp_path: Path) -> None:
    from quintet.platforms.tpu import PLATFORM

    tmp_path.chmod(0o777)
    with pytest.raises(ValueError, match="can be written to by others, and what lies there is trusted; choose another"):
        PLATFORM.configure(EngineConfig(compilation_cache_dir=str(tmp_path)))
    assert PLATFORM.configure(EngineConfig(compilation_cache_dir=str(tmp_path / "own")))[0] is not None
