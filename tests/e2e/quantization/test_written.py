"""Checkpoints that ModelOpt and Quark wrote, a scheme for each product, against what the libraries read."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from quintet import LLM
from quintet.interface.platform import Capabilities
from quintet.interface.types import RankInfo
from quintet.interface.weights import ShardRange
from quintet.layers.quantization import QuantizationPlan
from quintet.platforms.cpu import PLATFORM
from tests.helpers.checkpoints.quantized_files import DATA, committed, expected, plan_of, read_out
from tests.helpers.platforms.loopback import LoopbackPlatform, each_rank
from tests.helpers.platforms.run_model import Runner

ROWS = 4  # what is expected holds one row in so many
FOLDERS = ("modelopt", "quark")
ODD = {"modelopt": {"layers.1.mlp.down_proj"}, "quark": {"layers.2.mlp.up_proj"}}  # that stayed in floats


def tensors(folder: str) -> dict[str, Tensor]:
    return load_file(DATA / folder / "model.safetensors")


def found(folder: str) -> Any:
    return plan_of(committed(folder).config.quantization_config, tensors(folder))


def modules(folder: str) -> list[tuple[str, str]]:
    return [(folder, name.removesuffix(".weight")) for name in expected(folder) if name.endswith(".weight")]


@pytest.mark.parametrize(("folder", "module"), [each for folder in FOLDERS for each in modules(folder)])
def test_weights_are_those_that_the_library_reads(folder: str, module: str) -> None:
    want, held = expected(folder)[f"{module}.weight"], tensors(folder)
    shape = len(want) * ROWS, want.shape[1]
    whole = read_out(found(folder), module, shape, held)
    assert torch.equal(whole[::ROWS].to(want.dtype), want)
    outputs, inputs = shape
    for cut in [
        ShardRange((5, outputs - 3), (0, inputs)),
        ShardRange((0, outputs), (16, 48)),
        ShardRange((2, 10), (8, inputs - 7)),
    ]:
        share = read_out(found(folder), module, shape, held, cut)
        assert torch.equal(share, whole[slice(*cut.outputs), slice(*cut.inputs)])


@pytest.mark.parametrize("folder", FOLDERS)
def test_what_was_left_out_stays_in_floats(folder: str) -> None:
    plan = found(folder).plan
    assert all(plan.reader(f"model.{module}") is None for module in ODD[folder]) and plan.reader("lm_head") is None


def forms(folder: str, kept: frozenset[str] | None = None) -> QuantizationPlan:
    facts = PLATFORM.probe()
    assert isinstance(facts, Capabilities)
    return QuantizationPlan(None, found(folder), facts.weight_formats if kept is None else kept)


def off(logits: Tensor, folder: str) -> float:
    """The largest difference, in standard deviations of the logits."""
    want = expected(folder)["logits"]
    return float((logits - want).abs().max() / want.std())


@pytest.mark.parametrize("folder", FOLDERS)
def test_logits_are_those_of_what_the_checkpoint_stands_for(folder: str) -> None:
    ids = expected(folder)["ids"].tolist()
    (floats,) = Runner(committed(folder), quantization=forms(folder, frozenset())).prompts([ids])
    assert off(floats, folder) < (1e-3 if folder == "modelopt" else 0.02)  # Quark rounds weights to bfloat16
    (kept,) = Runner(committed(folder), quantization=forms(folder)).prompts([ids])
    assert off(kept, folder) < 0.05


@pytest.mark.parametrize("folder", FOLDERS)
def test_ranks_read_their_shares(folder: str) -> None:
    tiny, platform, ids = committed(folder), LoopbackPlatform(), expected(folder)["ids"].tolist()

    def run(rank: int, endpoint: str) -> Tensor:
        where = RankInfo(rank, 2, endpoint)
        (logits,) = Runner(tiny, platform=platform, rank_info=where, quantization=forms(folder)).prompts([ids])
        return logits

    for logits in each_rank(platform, 2, run):
        assert off(logits, folder) < 0.05


def test_an_engine_reads_what_modelopt_says_beside_config_json(tmp_path: Path) -> None:
    """Its first checkpoints have nothing in config.json."""
    folder = Path(shutil.copytree(DATA / "modelopt", tmp_path / "copy"))
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    small: dict[str, Any] = {"dtype": "float32", "kv_cache_memory_bytes": "16M", "max_model_len": 64, "use_tqdm": False}
    with LLM(str(folder), device="cpu", skip_tokenizer_init=True, **small) as llm:
        reasons = "; ".join(llm._client.engine_plan.reasons)
    assert "checkpoint quantized by modelopt: " in reasons and "activations stay in the model's type" in reasons
