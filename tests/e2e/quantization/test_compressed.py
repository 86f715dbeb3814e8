"""A checkpoint that llm-compressor wrote, a scheme for each product, against what compressed-tensors reads."""

from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from quintet import LLM
from quintet.interface.types import RankInfo
from quintet.interface.weights import ShardRange
from quintet.layers.quantization import QuantizationPlan
from quintet.platforms.cpu import PLATFORM
from tests.helpers.checkpoints.quantized_files import DATA, committed, expected, plan_of, read_out
from tests.helpers.platforms.loopback import LoopbackPlatform, each_rank
from tests.helpers.platforms.run_model import Runner

FOLDER = "compressed_tensors"
ROWS = 4  # what is expected holds one row in so many


def config() -> Any:
    return committed(FOLDER).config.quantization_config


def tensors() -> dict[str, Tensor]:
    return load_file(DATA / FOLDER / "model.safetensors")


def modules() -> list[str]:
    return [name.removesuffix(".weight") for name in expected(FOLDER) if name.endswith(".weight")]


@pytest.mark.parametrize("module", modules())
def test_weights_are_those_that_the_library_reads(module: str) -> None:
    want, held = expected(FOLDER)[f"{module}.weight"], tensors()
    if f"{module}.weight_scale" not in held:
        assert module.endswith("3.mlp.up_proj") and plan_of(config(), held).plan.reader(module) is None
        return
    shape = len(want) * ROWS, want.shape[1]
    whole = read_out(plan_of(config(), held), module, shape, held)
    assert torch.equal(whole[::ROWS].to(want.dtype), want)
    outputs, inputs = shape
    for cut in [
        ShardRange((5, outputs - 3), (0, inputs)),
        ShardRange((0, outputs), (16, 48)),
        ShardRange((2, 10), (8, inputs - 7)),
    ]:
        share = read_out(plan_of(config(), held), module, shape, held, cut)
        assert torch.equal(share, whole[slice(*cut.outputs), slice(*cut.inputs)])


def forms(kept: Any = PLATFORM.probe) -> QuantizationPlan:
    found = kept() if callable(kept) else kept
    return QuantizationPlan(None, plan_of(config(), tensors()), getattr(found, "weight_formats", found))


def off(logits: Tensor, name: str) -> float:
    """The largest difference, in standard deviations of the logits."""
    want = expected(FOLDER)[name]
    return float((logits - want).abs().max() / want.std())


def test_logits_are_those_of_what_the_checkpoint_stands_for() -> None:
    ids = expected(FOLDER)["ids"].tolist()
    (floats,) = Runner(committed(FOLDER), quantization=forms(frozenset())).prompts([ids])
    assert off(floats, "logits") < 0.02  # the library rounds weights to bfloat16
    (kept,) = Runner(committed(FOLDER), quantization=forms()).prompts([ids])
    assert off(kept, "logits") < 0.05  # W8A8 rounds activations
    assert off(kept, "logits_quantized") < 1.1 * off(expected(FOLDER)["logits"], "logits_quantized")


@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_read_their_shares(ranks: int) -> None:
    """Also where these begin within groups and blocks."""
    tiny, platform, ids = committed(FOLDER), LoopbackPlatform(), expected(FOLDER)["ids"].tolist()

    def run(rank: int, endpoint: str) -> Tensor:
        where = RankInfo(rank, ranks, endpoint)
        (logits,) = Runner(tiny, platform=platform, rank_info=where, quantization=forms()).prompts([ids])
        return logits

    for logits in each_rank(platform, ranks, run):
        assert off(logits, "logits") < 0.05


def test_an_engine_says_what_it_read_and_what_it_computes_otherwise() -> None:
    with LLM(
        str(DATA / FOLDER), device="cpu", skip_tokenizer_init=True, dtype="float32", kv_cache_memory_bytes="16M",
        max_model_len=64, use_tqdm=False,
    ) as llm:  # fmt: skip
        reasons = "; ".join(llm._client.engine_plan.reasons)
    assert "checkpoint quantized by compressed-tensors: " in reasons
    assert "static scales of inputs are not used" in reasons
    assert "activations stay in the model's type, where the checkpoint means floats of 8 bits" in reasons
    assert "activations are quantized without zero points" in reasons
