"""Ranks that keep whole experts say what one process says, wherever the experts are and whatever moves."""

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from quintet import LLM
from quintet.api.explain import explain
from quintet.config import EngineConfig
from quintet.conformance.check import NotSupported
from quintet.conformance.harness.worker_runner import random_prompts
from quintet.engine.parallel.eplb import balancer
from quintet.engine.parallel.eplb.transfer import ExpertMove
from quintet.engine.parallel.expert_parallel import expert_placement_of, moe_layers_of
from quintet.interface.platform import Capabilities
from quintet.interface.types import RankInfo
from quintet.layers.moe.expert_placement import ExpertPlacement, Placement
from quintet_tools.checkpoints.tiny import FAMILIES, VOCAB, Tiny, make, variant
from tests.helpers.checkpoints.packed import gptq
from tests.helpers.platforms.engines import answers, engine, forms_of
from tests.helpers.platforms.loopback import LoopbackPlatform, each_rank
from tests.helpers.platforms.run_model import Runner

PROMPTS = random_prompts(3, (19, 1, 33), VOCAB)
MIXTRAL = {
    **FAMILIES["mixtral"]["plain"], "hidden_size": 128, "intermediate_size": 64, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 16, "num_hidden_layers": 1,
}  # fmt: skip
MADE: dict[str, Callable[[], Tiny]] = {
    **{
        family: lambda family=family: variant(family, next(iter(FAMILIES[family])))  # type: ignore[misc]
        for family in ("mixtral", "qwen3_moe", "qwen2_moe", "deepseek_v3", "gpt_oss", "llama4_text")
    },
    "nemotron_h": lambda: variant("nemotron_h", "latent experts, biased"),
    "int4 experts": lambda: gptq(make("mixtral", MIXTRAL), 4, 32, ("block_sparse_moe.gate",)),
}
PLACED = {
    "linear": ExpertPlacement(),
    "round robin": ExpertPlacement("round_robin"),
    "copies": ExpertPlacement("linear", redundant_experts=2),
}
Result = tuple[list[torch.Tensor], list[list[int]]]


@pytest.fixture(scope="module", params=MADE)
def whole(request: pytest.FixtureRequest) -> tuple[Tiny, dict[str, Any], Result]:
    """A model, what else it is built with, and what it says on one rank."""
    tiny = MADE[request.param]()
    more = {"quantization": forms_of(tiny)} if request.param == "int4 experts" else {}
    run = Runner(tiny, **more)
    return tiny, more, (run.prompts(PROMPTS), run.greedy(PROMPTS, 3))


@pytest.mark.grid(cases=16)
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("placed", PLACED)
def test_ranks_with_whole_experts_equal_one(whole: tuple[Tiny, dict[str, Any], Result], placed: str, size: int) -> None:
    tiny, more, (logits, tokens) = whole
    platform = LoopbackPlatform()

    def work(rank: int, endpoint: str) -> tuple[Result, list[int]]:
        place = RankInfo(rank, size, endpoint)
        run = Runner(tiny, platform=platform, rank_info=place, expert_placement=PLACED[placed], **more)
        held = [
            len(each.rank_experts.local_experts)
            for _, each in moe_layers_of(run.worker.model)
            if each.rank_experts is not None
        ]
        return (run.prompts(PROMPTS), run.greedy(PROMPTS, 3)), held

    if tiny.config.model_type == "nemotron_h" and size == 3:  # two groups of heads, which stay together
        with pytest.raises((ValueError, NotSupported), match="choose a tensor_parallel_size that divides them"):
            each_rank(platform, size, work)
        return
    found = each_rank(platform, size, work)
    for (other_logits, other_tokens), _ in found:
        assert other_tokens == tokens
        for mine, theirs in zip(logits, other_logits, strict=True):
            torch.testing.assert_close(theirs, mine, rtol=0, atol=1e-4 * float(mine.std()))
    shares = list(zip(*(held for _, held in found), strict=True))  # of each layer
    assert shares and all(max(held) - min(held) <= 1 < sum(held) for held in shares)


EPLB = {"window_size": 8, "step_interval": 10, "num_redundant_experts": 2, "log_balancedness": True}
MOVING: dict[str, Any] = {"enable_expert_parallel": True, "enable_eplb": True, "eplb_config": EPLB}


def placements(llm: LLM) -> list[Placement]:
    model = llm._client.engine_plan.ranks.workers[0].model
    return [each.rank_experts.placement for _, each in moe_layers_of(model) if each.rank_experts is not None]


@pytest.fixture(scope="module")
def moving() -> Iterator[tuple[LLM, Tiny, list[list[int]]]]:
    """Two processes whose experts move, their model, and what one process says."""
    tiny = variant("qwen3_moe", "plain")
    with engine(tiny) as alone:
        want = answers(alone)
    with engine(tiny, tensor_parallel_size=2, **MOVING) as llm:
        yield llm, tiny, want


Moving = tuple[LLM, Tiny, list[list[int]]]


def test_a_rank_that_cannot_fetch_an_expert_leaves_all_where_they_are(
    moving: Moving, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    llm, _, want = moving
    before = placements(llm)

    def failing(*_: Any) -> ExpertMove:
        raise MemoryError("no room for an expert")

    with monkeypatch.context() as patch:
        patch.setattr(balancer, "ExpertMove", failing)  # on rank 0 alone
        assert [answers(llm) for _ in range(2)] == [want] * 2
    assert placements(llm) == before
    assert "experts stay where they are: rank 0 of 2: MemoryError: no room for an expert" in caplog.text


def test_experts_move_and_tokens_stay(moving: Moving, caplog: pytest.LogCaptureFixture) -> None:
    llm, _, want = moving
    before = placements(llm)
    with caplog.at_level(logging.INFO, "quintet.engine.parallel.eplb.balancer"):
        assert [answers(llm) for _ in range(4)] == [want] * 4  # the last from recorded steps, whose addresses hold
    assert placements(llm) != before
    told = {each.name: each.value for each in llm.get_metrics() if "expert" in each.name}  # type: ignore[attr-defined]
    assert told["quintet:expert_placements"] >= 1 and told["quintet:experts_moved"] >= 1
    assert 0.5 <= told["quintet:expert_balancedness"] <= 1
    assert "balancedness of the last 8 steps" in caplog.text


def test_what_is_read_anew_goes_where_experts_are(moving: Moving) -> None:
    llm, tiny, want = moving
    llm.reload_weights(str(tiny.folder))
    assert answers(llm) == want
    llm.sleep(level=2)
    llm.wake_up()
    assert [answers(llm) for _ in range(2)] == [want] * 2


@pytest.mark.slow
def test_what_ranks_save_is_read_by_ranks_that_begin(moving: Moving, tmp_path: Path) -> None:
    llm, tiny, want = moving
    llm.save_sharded_state(str(tmp_path / "saved"))
    assert answers(llm) == want
    saved = Tiny(tmp_path / "saved", tiny.config, tiny.reference)
    with engine(saved, tensor_parallel_size=2, load_format="sharded_state", **MOVING) as again:
        assert answers(again) == want


@pytest.mark.slow
@pytest.mark.parametrize("family", ["mixtral", "gpt_oss", "deepseek_v2"])
def test_three_processes_say_what_one_says(family: str, tmp_path: Path) -> None:
    """Experts that 3 does not divide, out of a cache of weights the second time."""
    tiny, kept = variant(family, "plain"), {"weights_cache": str(tmp_path)}
    with engine(tiny) as alone:
        want = answers(alone)
    for _ in range(2):
        with engine(tiny, tensor_parallel_size=3, enable_expert_parallel=True, **kept) as llm:
            assert [answers(llm) for _ in range(2)] == [want] * 2


def explained(tiny: Tiny, **settings: Any) -> str:
    config = EngineConfig(str(tiny.folder), device="cpu", kv_cache_memory_bytes="16M", max_model_len=64, **settings)
    return str(explain(config))


def test_explain_says_who_has_which_experts() -> None:
    tiny = variant("qwen3_moe", "plain")
    said = explained(
        tiny, tensor_parallel_size=3, enable_expert_parallel=True, expert_placement_strategy="round_robin",
        all2all_backend="naive", data_parallel_size=2,
    )  # fmt: skip
    assert (
        "7 experts of a layer, whole on their ranks (round_robin): rank 0: 0, 3, 6; rank 1: 1, 4; rank 2: 2, 5" in said
    )
    assert "all2all_backend=naive: every rank has all tokens" in said and "each of 2 engines has all experts" in said
    assert "nothing changes, for one rank has all experts" in explained(tiny, enable_expert_parallel=True)
    assert "whole on their ranks" not in explained(tiny, tensor_parallel_size=2)


def test_what_cannot_be_is_refused_with_what_to_do() -> None:
    dense, sparse = variant("llama", "plain"), variant("mixtral", "plain")
    with pytest.raises(ValueError, match="enable_expert_parallel: .* has no experts; leave it out"):
        explained(dense, enable_expert_parallel=True, tensor_parallel_size=2)
    with pytest.raises(ValueError, match="enable_eplb moves experts between ranks, and there is one"):
        explained(sparse, enable_expert_parallel=True, enable_eplb=True)
    with pytest.raises(ValueError, match="5 experts cannot be dealt out to 6 ranks"):
        explained(sparse, enable_expert_parallel=True, tensor_parallel_size=6)


@pytest.mark.slow
def test_a_process_that_drives_all_devices_refuses() -> None:
    config = EngineConfig(enable_expert_parallel=True, tensor_parallel_size=2)
    facts = Capabilities(2, (torch.float32,), spmd=True)
    with pytest.raises(ValueError, match="one process drives all devices here, and its compiler cuts every expert"):
        expert_placement_of(config, facts)
    assert expert_placement_of(config.replace(tensor_parallel_size=1), facts) is None
