"""Experts: stacks of weights from a checkpoint's tensors, however it keeps them, and each rank's share of them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from quintet.config import EngineConfig
from quintet.conformance.harness.worker_runner import random_prompts
from quintet.engine.executor.model_part import ModelSizes
from quintet.engine.executor.worker import Worker
from quintet.engine.startup import prepare
from quintet.interface.weights import CheckpointSlice, Weight
from quintet.layers.build import padded_shards
from quintet.layers.moe.moe import MoE, unstacked
from quintet.model_loader.loader import declared_weights
from quintet.platforms.cpu import PLATFORM
from quintet_tools.checkpoints.tiny import EVERY, FAMILIES, VOCAB, Tiny, make, variant
from tests.helpers.platforms.run_model import Runner

MIXED = ["deepseek_v2", "deepseek_v3", "ernie4_5_moe", "minimax_m2", "mixtral", "olmoe", "qwen2_moe", "qwen3_moe"]


def weight(rank: int, axis: int, per_matrix: int, stack: int = 3) -> Weight:
    """Of matrices whose parts are [7, 5] or, with axis 1, [5, 7]: the sevens are shared out over two ranks."""
    shape = (7, 5) if axis == 0 else (5, 7)
    parts = tuple(
        CheckpointSlice(f"{e}.{p}", shape, padded_shards(7, 2).ranges) for e in range(stack) for p in range(per_matrix)
    )
    return Weight("stack", parts, axis, rank, torch.float32, "experts", stack=stack)


@pytest.mark.parametrize(("axis", "per_matrix"), [(0, 2), (0, 1), (1, 1)])
def test_a_stack_has_one_matrix_per_expert_and_each_rank_its_share(axis: int, per_matrix: int) -> None:
    """Joined again, rank by rank, the shares of a part are the checkpoint's tensor, and zeros past its end."""
    weights = [weight(rank, axis, per_matrix) for rank in (0, 1)]
    tensors = {part.source: torch.randn(part.shape) for part in weights[0].slices}
    locals_ = [each.local(tensors) for each in weights]
    for each, local in zip(weights, locals_, strict=True):
        assert tuple(local.shape) == each.shape == (3, *([4 * per_matrix, 5] if axis == 0 else [5, 4 * per_matrix]))
        assert len(each.local_slices(tensors)) == 3 * per_matrix
    for expert in range(3):
        shares = [local[expert].split(4, axis) for local in locals_]
        for part in range(per_matrix):
            joined = torch.cat([share[part] for share in shares], axis)
            assert torch.equal(joined.narrow(axis, 0, 7), tensors[f"{expert}.{part}"])
            assert not joined.narrow(axis, 7, 1).any()


def test_a_stack_of_one_is_still_a_stack() -> None:
    single = weight(0, 1, 1, stack=1)
    assert single.shape == (1, 5, 4)
    assert single.local({"0.0": torch.ones(5, 7)}).shape == (1, 5, 4)


# --------------------------------------------------------------------------------------- forms of checkpoints


def stacked(tiny: Tiny, folder: Path) -> Path:
    """The same checkpoint as transformers 5 keeps it in memory, and writes it if asked to."""
    tiny.reference.save_pretrained(folder, save_original_format=False)
    assert any(name.endswith("mlp.experts.gate_up_proj") for name in load_file(folder / "model.safetensors"))
    return folder


@pytest.mark.parametrize("family", MIXED)
def test_experts_one_by_one_and_stacked_are_the_same_model(family: str, tmp_path: Path) -> None:
    tiny = variant(family, "plain")
    assert any(".0.w1." in name or ".0.gate_proj." in name for name in load_file(tiny.folder / "model.safetensors"))
    (prompt,) = random_prompts(0, (20,), VOCAB)
    (wanted,) = Runner(tiny).prompts([prompt])
    (got,) = Runner(Tiny(stacked(tiny, tmp_path), tiny.config, tiny.reference)).prompts([prompt])
    assert torch.equal(got, wanted)


def test_other_tensors_are_no_stacks() -> None:
    assert unstacked("model.layers.0.mlp.experts.0.down_proj.weight", (8, 4)) == {}
    assert unstacked("model.layers.0.mlp.gate_up_proj", (2, 8, 4)) == {}
    assert unstacked("model.layers.0.mlp.experts.down_proj", (8, 4)) == {}


def test_scales_of_stacks_are_their_experts() -> None:
    name = "model.layers.0.mlp.experts.gate_up_proj"
    found = unstacked(f"{name}_scale_inv", (2, 4, 3))
    assert found["model.layers.0.mlp.experts.1.gate_proj.weight_scale_inv"] == (1, slice(0, 2))
    assert found["model.layers.0.mlp.experts.1.up_proj.weight_scale_inv"] == (1, slice(2, 4))
    of_both = unstacked(f"{name}_scale", (2, 1, 3))  # of gate and up together
    assert of_both["model.layers.0.mlp.experts.0.up_proj.weight_scale"] == (0, slice(0, 1))
    single = unstacked(f"{name}_activation_scale", (2,))
    assert single["model.layers.0.mlp.experts.1.up_proj.activation_scale"] == (1,)
    down = unstacked("model.layers.0.mlp.experts.down_proj_scale_inv", (2, 4, 3))
    assert down["model.layers.0.mlp.experts.1.down_proj.weight_scale_inv"] == (1,)
    with pytest.raises(ValueError, match=r"gate_up_proj_scale_inv has 3 rows, .* gate's and up's"):
        unstacked(f"{name}_scale_inv", (2, 3, 3))


def changed(family: str, folder: Path, change: Any) -> Any:
    """Loads a checkpoint with its tensors changed."""
    tiny = variant(family, "plain")
    tensors = load_file(tiny.folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    worker = Worker(PLATFORM(), tiny.config, ModelSizes(torch.float32, 16, 64))
    worker.load(folder, 4, (), progress=False)


EXPERT = "model.layers.1.mlp.experts.3"


@pytest.mark.parametrize(
    ("family", "name", "tensor", "message"),
    [
        ("qwen3_moe", f"{EXPERT}.up_proj.weight", None, rf"lacks {EXPERT}\.up_proj\.weight"),
        ("mixtral", "model.layers.1.block_sparse_moe.experts.3.w2.weight", None, rf"lacks {EXPERT}\.down_proj\.weight"),
        (
            "qwen3_moe",
            f"{EXPERT}.up_proj.weight",
            (60, 48),
            rf"{EXPERT}\.up_proj\.weight is \[60, 48\], not \[61, 48\]",
        ),
        ("qwen3_moe", "model.layers.1.mlp.experts.7.up_proj.weight", (61, 48), r"holds \S+\.experts\.7\.up_proj"),
        ("mixtral", "model.layers.1.mlp.experts.down_proj", (5, 48, 77), r"holds \S+\.experts\.0\.down_proj\S+ twice"),
    ],
)
def test_wrong_experts_are_named(
    family: str, name: str, tensor: tuple[int, ...] | None, message: str, tmp_path: Path
) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        tensors.pop(name, None)
        if tensor is not None:
            tensors[name] = torch.ones(tensor)

    with pytest.raises(ValueError, match=message):
        changed(family, tmp_path, change)


def test_a_stack_of_fewer_experts_is_refused(tmp_path: Path) -> None:
    tiny = variant("qwen3_moe", "plain")
    fewer = make("qwen3_moe", {**FAMILIES["qwen3_moe"]["plain"], "num_experts": 6})
    worker = Worker(PLATFORM(), tiny.config, ModelSizes(torch.float32, 16, 64))
    with pytest.raises(ValueError, match=r"lacks model\.layers\.0\.mlp\.experts\.6\.down_proj\.weight"):
        worker.load(stacked(fewer, tmp_path), 4, (), progress=False)


# --------------------------------------------------------------------------------------- beside quantization


def test_with_a_scheme_experts_and_routers_stay_as_they_are_and_the_plan_says_so() -> None:
    settings = {**FAMILIES["qwen3_moe"]["plain"], "hidden_size": 64, "mlp_only_layers": [1]}
    folder = make("qwen3_moe", settings).folder
    config = EngineConfig.from_kwargs(
        model=str(folder), device="cpu", dtype="float32", quantization="int8", skip_tokenizer_init=True
    )
    prepared = prepare(config)
    (said,) = [reason for reason in prepared.reasons if reason.startswith("quantization")]
    # a head, 3 layers' qkv and output, and a gate and up; the product down has 77 inputs
    assert said == (
        "quantization int8: 8 products as w8a8 by native, 1 stay as they are: no group of 32 or more divides their "
        "inputs, experts and their routers stay as they are, the head in 8 bits"
    )
    model = prepared.ranks.workers[0].model
    assert all(each.weight.format.plain for each in declared_weights(model) if each.weight.use == "experts")


@pytest.mark.parametrize(
    ("family", "kind"),
    [
        *((family, torch.float32) for family in ("deepseek_v2", "deepseek_v3", "dots1", "ernie4_5_moe", "glm4_moe")),
        *((family, torch.float32) for family in ("bailing_moe_v2", "hunyuan_v1_moe")),
        ("bailing_moe", torch.bfloat16),
        ("qwen3_moe", torch.bfloat16),
    ],
)
def test_routers_multiply_in_the_type_that_transformers_multiply_in(family: str, kind: torch.dtype) -> None:
    """In float32 the numbers are those of the checkpoint's own, which no type of 16 bits holds."""
    tiny = variant(family, next(iter(EVERY[family])))
    model = Runner(tiny, torch.bfloat16).worker.model
    path, mixture = [(name, each) for name, each in model.named_modules() if isinstance(each, MoE)][-1]
    names = {model.canonical(name): name for name in load_file(tiny.folder / "model.safetensors")}
    weight = load_file(tiny.folder / "model.safetensors")[names[f"{path}.gate.weight"]]
    x = torch.randn(9, weight.shape[1], generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    logits = mixture.gate(x)
    assert logits.dtype == kind
    off = float((logits.float() - x.float() @ weight.T).abs().max())
    assert off < 1e-5 if kind == torch.float32 else off > 1e-3
