"""Slots of states: what a step reads holds just the tokens before it, whatever comes between."""

import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import CONFIG_MAPPING

from quintet.chat.prompts import Prompt
from quintet.config import EngineConfig
from quintet.engine.client import EngineClient
from quintet.engine.executor.model_part import ModelSizes
from quintet.engine.executor.worker import Worker
from quintet.engine.kv_cache.groups import KVCacheGroup, KVCacheLayout
from quintet.engine.memory_planner import ModelMemory, plan_memory
from quintet.engine.request import CoreRequest
from quintet.engine.startup import launch, prepare
from quintet.interface.platform import Platform
from quintet.interface.types import Estimate, Layout, Memory, StateSpec
from quintet.ops.states import MAX_DRAFTS
from quintet.platforms.cpu import PLATFORM
from quintet.platforms.null import PLATFORM as NULL
from quintet_tools.checkpoints.tiny import EVERY, variant
from tests.helpers.platforms.behind import Work, behind
from tests.helpers.platforms.null_engine import greedy

NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2, "prompt_lookup_min": 1}
STATE = Layout(torch.float32, (4, 8, 8), unit="request")  # 1 KiB
PAGE = Layout(torch.float32, (2, 1, 16, 8))  # 1 KiB


class Contents:
    """Stands between the plan and the step, and knows of which tokens each slot holds the state, and which drafts it
    keeps apart. What is wrong is noted: an engine takes an error for a step's."""

    def __init__(self, client: EngineClient) -> None:
        self._of: dict[int, tuple[tuple[int, ...], tuple[int, ...]]] = {}
        builder: Any = client.engine._runner._batches
        self._build: Callable[..., Any] = builder.build
        builder.build = self.build
        self.begun = 0  # requests that went on from a state that was kept
        self.recomputed = 0  # steps that compute tokens of an output again
        self.faults: list[str] = []

    def build(self, plan: Any) -> Any:
        host, rows = self._build(plan)
        table = [[*row, 0, 0][:4] for row in host.groups[-1].block_table.tolist()]
        reads, writes = {row[0] for row in table}, [row[1] for row in table]
        if len(set(writes)) < len(writes) or reads & set(writes) or 0 in writes:
            self.faults.append(f"a state is written that another writes or reads: {table}")
        for (request, count), (read, write, accepted, apart) in zip(plan.tokens.items(), table, strict=True):
            known = tuple(request.token_ids[: request.num_computed])
            state, drafts = self._of[read] if read else ((), ())
            if (*state, *drafts[:accepted]) != known:
                self.faults.append(f"{request.request_id} goes on from a state of other tokens")
            after = tuple(request.token_ids[: request.num_computed + count])
            self._of[write] = after[: len(after) - apart], after[len(after) - apart :]
            ever_preempted, of_output = request.num_preemptions > 0, request.num_computed >= request.num_prompt
            self.recomputed += of_output and not ever_preempted and count > 1 + request.num_drafts
            self.begun += request.num_cached > 0 and request.num_cached == request.num_computed
        return host, rows


def client(family: str, name: str, **more: Any) -> EngineClient:
    given = {"max_model_len": 128, "num_pages": 30, "page_size": 8, "max_num_batched_tokens": 24, **more}
    folder = str(variant(family, name).folder)
    config = EngineConfig.from_kwargs(
        model=folder, device="null", load_format="dummy", skip_tokenizer_init=True, **given
    )
    return EngineClient(config, progress=False)


@pytest.mark.parametrize(("family", "name"), [("lfm2", "plain"), ("mamba2", "plain")])
@settings(derandomize=True, max_examples=6, deadline=None, database=None)
@given(seed=st.integers(0, 2**20), drafts=st.sampled_from(["none", "held", "apart"]), seqs=st.integers(1, 5))
def test_a_step_reads_the_state_of_the_tokens_before_it(
    family: str, name: str, seed: int, drafts: str, seqs: int
) -> None:
    """Through preemptions, aborts, drafts that are refused, and a cache that is forgotten."""
    rng = random.Random(seed)
    spec = None if drafts == "none" else NGRAM
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(NULL, "optional_spec_fields", frozenset({"max_drafts"} if drafts == "apart" else ()))
        engine = client(family, name, max_num_seqs=seqs, speculative_config=spec)
    contents = Contents(engine)
    stem = [rng.randrange(3, 9) for _ in range(60)]
    for number in range(10):
        prompt = stem[: rng.randrange(60)] + [rng.randrange(3, 9) for _ in range(rng.randrange(1, 30))]
        engine.add(str(number), Prompt(prompt), greedy(max_tokens=rng.randrange(1, 30)))
        for _ in range(rng.randrange(6)):
            engine.step()
            engine.engine.check_integrity()
        if rng.random() < 0.15:
            engine.engine.abort([str(rng.randrange(number + 1))])
        if rng.random() < 0.1:
            engine.engine.reset_prefix_cache()
    while engine.busy:
        engine.step()
        engine.engine.check_integrity()
    assert not contents.faults
    assert not contents.recomputed or drafts == "held"
    slots = engine.engine.scheduler.kv_cache_manager.state_slots
    assert slots is not None and slots.num_used == 0 and engine.engine.scheduler.pool.num_used == 0


def test_prompts_go_on_from_states_that_are_kept() -> None:
    """Otherwise the property above says little."""
    engine = client("mamba2", "plain")
    contents = Contents(engine)
    for _ in range(3):
        engine.add("only", Prompt(list(range(3, 50))), greedy(max_tokens=3))
        while engine.busy:
            engine.step()
    assert contents.begun == 2 and not contents.faults
    assert engine.engine.stats().scheduler.prefix_hits == 2 * 40


def test_the_plan_counts_states() -> None:
    arrangement = KVCacheLayout((KVCacheGroup(),), (PAGE,), (STATE,), has_states=True)
    assert (arrangement.page_bytes, arrangement.slot_bytes) == (1024, 1024)
    footprint = ModelMemory(Estimate(0, 0), arrangement, 128, 64)
    memory = Memory(1 << 30, 1 << 30, 0)
    config = EngineConfig(max_num_seqs=4, max_model_len=128, kv_cache_memory_bytes=100 * 1024)
    made = plan_memory(config, footprint, memory)
    assert (made.num_slots, made.max_requests) == (1 + 3 * 4, 6)
    assert made.num_pages == 1 + 4 * 8 and made.kv_bytes == (33 + 13) * 1024
    apart = replace(footprint, kv_cache_layout=replace(arrangement, max_drafts=3))
    assert "13 states of 6 requests at once, with 3 drafts beside each" in str(plan_memory(config, apart, memory))
    without = plan_memory(config.replace(enable_prefix_caching=False), footprint, memory)
    assert (without.num_slots, without.max_requests) == (1 + 2 * 4, 4)
    tight = plan_memory(config.replace(kv_cache_memory_bytes=24 * 1024), footprint, memory)
    assert (tight.num_slots, tight.max_requests) == (12, 5)
    crowded = plan_memory(config.replace(kv_cache_memory_bytes=13 * 1024), footprint, memory)
    assert (crowded.num_slots, crowded.num_pages) == (4, 9), "states leave room for one request's pages"
    alone = plan_memory(
        config, replace(footprint, kv_cache_layout=KVCacheLayout((), (), (STATE,), has_states=True)), memory
    )
    assert alone.num_slots == 13 and alone.budget_share == 0
    with pytest.raises(ValueError, match="KV cache needs 9 pages"):
        plan_memory(config.replace(kv_cache_memory_bytes=8 * 1024), footprint, memory)


def test_behind_a_device_the_state_of_an_answer_is_kept_too() -> None:
    """A step is planned before the token is known that fills a page."""
    work, folder = Work(), str(variant("lfm2", "plain").folder)
    given: dict[str, Any] = {"page_size": 4, "num_pages": 40, "max_model_len": 64, "max_num_seqs": 2}
    config = EngineConfig.from_kwargs(
        model=folder, device="null", load_format="dummy", skip_tokenizer_init=True, **given
    )
    prepared = prepare(config, behind(work, overlap=True, static_shapes=False))
    work.take(prepared.ranks.workers[0].ops)
    engine = launch(prepared, progress=False)
    work.begin()
    said = list(range(3, 9))
    for name in ("first", "second"):
        engine.add(CoreRequest(name, tuple(said), greedy(), (0, 0), 8))
        while engine.busy:
            said += [token for delta in engine.step() for token in delta.token_ids]
            engine.check_integrity()
    assert engine.stats().scheduler.prefix_hits == 12, "of 14 tokens"


@pytest.mark.parametrize("family", ["falcon_mamba", "mamba", "mamba2", "rwkv7"])
def test_states_alone_hold_as_many_tokens_as_are_asked_for(family: str, tmp_path: Path) -> None:
    """Their published configs do not say how long a text they were made for, or mean how long they were trained."""
    entries = {**EVERY[family]["plain"], "model_type": family}
    if family == "rwkv7":
        entries |= {"max_position_embeddings": 512, "architectures": ["RWKV7ForCausalLM"]}
    else:
        del entries["max_position_embeddings"]
    (tmp_path / "config.json").write_text(json.dumps(entries))
    made = EngineConfig(model=str(tmp_path), device="null", load_format="dummy")
    assert prepare(made).memory_plan.max_model_len == 2048
    assert prepare(made.replace(max_model_len=5000)).memory_plan.max_model_len == 5000


@pytest.mark.parametrize(
    "family", [*("bamba", "falcon_h1", "granitemoehybrid", "jamba", "mamba", "mamba2", "minimax", "qwen3_next")]
)
def test_no_other_activation_than_silu_follows_a_convolution(family: str) -> None:
    config = CONFIG_MAPPING[family](**{**EVERY[family]["plain"], "hidden_act": "gelu"})
    with pytest.raises(ValueError, match=f"^{family} with hidden_act='gelu' is not supported"):
        Worker(PLATFORM(), config, ModelSizes(torch.float32, 16, 128))


def test_no_more_requests_run_than_have_states() -> None:
    """Room for the states of two requests at once, of four that may run."""
    worker = Worker(PLATFORM(), variant("mamba2", "plain").config, ModelSizes(torch.float32, 16, 128))
    size = worker.kv_cache_layout.slot_bytes
    folder = str(variant("mamba2", "plain").folder)
    given: dict[str, Any] = {"max_num_seqs": 4, "max_model_len": 128, "kv_cache_memory_bytes": 5 * size}
    config = EngineConfig.from_kwargs(
        model=folder, device="null", load_format="dummy", skip_tokenizer_init=True, **given
    )
    engine = EngineClient(config, progress=False)
    for number in range(4):
        engine.add(str(number), Prompt([3, 4, 5]), greedy(max_tokens=4))
    most = 0
    while engine.busy:
        engine.step()
        most = max(most, len(engine.engine.scheduler.running))
    assert most == 2


def test_states_keep_as_many_drafts_apart_as_kernels_take(caplog: pytest.LogCaptureFixture) -> None:
    """Of layers that all can; the memory plan counts them."""
    sizes = ModelSizes(torch.float32, 16, 128, max_drafts=3)
    made = [
        Worker(PLATFORM(), variant("qwen3_next", "plain").config, each)
        for each in (sizes, replace(sizes, max_drafts=0))
    ]
    assert [each.kv_cache_layout.max_drafts for each in made] == [3, 0]
    assert made[0].kv_cache_layout.slot_bytes > made[1].kv_cache_layout.slot_bytes
    assert [each.kv_cache_layout.table_widths(2)[-1] for each in made] == [4, 2]
    many = Worker(PLATFORM(), variant("lfm2", "plain").config, replace(sizes, max_drafts=40))
    assert many.kv_cache_layout.max_drafts == MAX_DRAFTS
    selective = Worker(PLATFORM(), variant("mamba", "plain").config, sizes)
    assert selective.kv_cache_layout.max_drafts == 0, "a selective scan's state holds drafts"
    with caplog.at_level("INFO"):
        engine = client("lfm2", "plain", speculative_config={**NGRAM, "num_speculative_tokens": 40})
    assert f"{MAX_DRAFTS} drafts of a request at most, not 40: states keep no more" in caplog.text
    assert engine.engine.scheduler.max_num_drafts == MAX_DRAFTS


def test_a_platform_that_keeps_pages_alone_refuses_by_name() -> None:
    platform: Platform = PLATFORM()
    platform.supports_states = False  # type: ignore[misc]  # as one that was written before
    with pytest.raises(
        ValueError,
        match=r"keeps pages alone \(supports_states is False\), and layers of lfm2 keep a state per request",
    ):
        Worker(platform, variant("lfm2", "plain").config, ModelSizes(torch.float32, 16, 128))


def test_a_mixer_for_states_says_what_it_keeps() -> None:
    platform = PLATFORM()
    worker = Worker(platform, variant("lfm2", "plain").config, ModelSizes(torch.bfloat16, 16, 128))
    assert {layout.unit for layout in worker.kv_cache_layout.states} == {"request"}
    mixer = platform.mixer(StateSpec("state_space", (2, 3, 4)), worker.ops, 0)
    assert mixer.layouts == (Layout(torch.float32, (2, 3, 4), unit="request"),)
