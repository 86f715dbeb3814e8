"""Every family shared out over 2 and 3 ranks, threads of this process, equals the same model on one."""

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig

from quintet.conformance.check import NotSupported
from quintet.conformance.harness.worker_runner import random_prompts
from quintet.engine.executor.model_part import ModelSizes
from quintet.engine.executor.worker import Worker
from quintet.interface.types import RankInfo
from quintet_tools.checkpoints.tiny import FAMILIES, PLAIN, VARIANTS, VOCAB, Tiny, make, variant
from tests.helpers.platforms.loopback import LoopbackPlatform, each_rank
from tests.helpers.platforms.run_model import Runner

PROMPTS = random_prompts(3, (19, 1, 33), VOCAB)  # 101 tokens, 77 features and 6 heads over 2 and 3 ranks: all uneven
WHOLE = {"qwen3_next": 3, "granitemoehybrid": 2, "mamba2": 2}  # what alone divides the heads that belong together
Result = tuple[list[Tensor], list[list[int]]]


def alone(tiny: Tiny, dtype: torch.dtype = torch.float32) -> Result:
    run = Runner(tiny, dtype)
    return run.prompts(PROMPTS), run.greedy(PROMPTS, 3)


def shared_out(tiny: Tiny, size: int, dtype: torch.dtype = torch.float32) -> list[Result]:
    platform = LoopbackPlatform()

    def work(rank: int, endpoint: str) -> Result:
        run = Runner(tiny, dtype, platform=platform, rank_info=RankInfo(rank, size, endpoint))
        return run.prompts(PROMPTS), run.greedy(PROMPTS, 3)

    return each_rank(platform, size, work)


def assert_equal_on_ranks(tiny: Tiny, size: int) -> None:
    logits, tokens = alone(tiny)
    for other_logits, other_tokens in shared_out(tiny, size):
        assert other_tokens == tokens
        for mine, theirs in zip(logits, other_logits, strict=True):
            assert theirs.shape == mine.shape
            torch.testing.assert_close(theirs, mine, rtol=0, atol=1e-4 * float(mine.std()))


@pytest.mark.grid(cases=40)
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize(("family", "name"), VARIANTS)
def test_ranks_equal_one(family: str, name: str, size: int) -> None:
    if WHOLE.get(family, size) == size:
        return assert_equal_on_ranks(variant(family, name), size)
    with pytest.raises((ValueError, NotSupported), match="choose a tensor_parallel_size that divides them"):
        shared_out(variant(family, name), size)


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("bloom", "plain"),
        ("codegen", "plain"),
        ("cohere", "norms of heads"),
        ("falcon", "few KV heads"),
        ("stablelm", "parallel"),
    ],
)
def test_two_ranks_equal_one_where_heads_lie_otherwise_in_the_file(family: str, name: str) -> None:
    assert_equal_on_ranks(variant(family, name), 2)


# heads, KV heads, ranks
SHARES = {
    "odd heads, one KV head each": (5, 5, 2),
    "odd heads over three": (7, 7, 3),
    "one KV head on every rank": (5, 1, 3),
    "two KV heads on three ranks": (6, 2, 3),
    "three KV heads on two ranks": (9, 3, 2),
}


@pytest.mark.parametrize("family", ["llama", "olmo2", "phi3"])
@pytest.mark.parametrize("share", SHARES)
def test_heads_that_do_not_divide(family: str, share: str) -> None:
    heads, kv_heads, size = SHARES[share]
    sizes = {"hidden_size": heads * 8, "num_attention_heads": heads, "num_key_value_heads": kv_heads}
    assert_equal_on_ranks(make(family, {**PLAIN, **sizes, "num_hidden_layers": 2}), size)


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("bailing_hybrid", "plain"),
        ("gemma4_text", "plain"),
        ("gemma4_text", "experts, keys as values"),
        ("glm5_next_text", "unbounded decays, groups of experts"),
        ("hy_v4", "plain"),
        ("kimi_linear", "groups of experts, a latent of q, biased"),
        ("lfm2_moe", "plain"),
        ("mistral_large4_text", "plain"),
        ("minimax", "plain"),
        ("nemotron_h", "latent experts, biased"),
        ("olmo_hybrid", "rotary, biased, beta below 1"),
        ("plamo2", "plain"),
        ("rwkv7", "plain"),
        ("zamba2", "plain"),
        ("zamba2", "no adapters of attention, biased"),
    ],
)
def test_two_ranks_equal_one_in_other_families(family: str, name: str) -> None:
    assert_equal_on_ranks(variant(family, name), 2)


@pytest.mark.parametrize("family", FAMILIES)
def test_ranks_keep_less_than_the_whole(family: str) -> None:
    """No rank holds more than its share of the matrices and of the cache, give or take what does not divide."""
    tiny = variant(family, next(iter(FAMILIES[family])))
    shape = ModelSizes(torch.float32, 16, 64)
    platform, size = LoopbackPlatform(), WHOLE.get(family, 3)
    whole = Worker(platform, tiny.config, shape)
    for rank in range(size):
        part = Worker(platform, tiny.config, shape, RankInfo(rank, size, "here"))
        latent = "kv_lora_rank" in next(iter(FAMILIES[family].values()))
        if size == 3:  # which divides the KV heads
            ours, all_of_it = (each.kv_cache_layout.page_bytes for each in (part, whole))
            assert ours == all_of_it // (1 if latent else size)  # a latent is of all heads
        assert (
            part.weight_bytes
            < (0.65 if latent or size == 2 or family in ("gpt2", "opt", "gemma3n_text") else 0.45) * whole.weight_bytes
        )


def test_too_many_ranks_are_refused_with_what_to_do() -> None:
    config = AutoConfig.for_model("llama", **{**PLAIN, "num_attention_heads": 2, "num_key_value_heads": 1})
    with pytest.raises((ValueError, NotSupported), match="lower tensor_parallel_size to 2 or less"):
        Worker(LoopbackPlatform(), config, ModelSizes(torch.float32, 16, 64), RankInfo(0, 3, "here"))


def test_ranks_agree_with_each_other_to_the_bit() -> None:
    """Each rank samples for itself, so their logits must not differ at all."""
    results = shared_out(variant("llama", "plain"), 3, torch.bfloat16)
    for logits, tokens in results[1:]:
        assert tokens == results[0][1]
        assert all(torch.equal(a, b) for a, b in zip(logits, results[0][0], strict=True))
