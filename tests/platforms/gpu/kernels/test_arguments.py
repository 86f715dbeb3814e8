"""What kernels are called with: whole numbers that vary by step compile nothing anew, and grids stay within limits.

Triton compiles a kernel again where a whole number is 1, or becomes or ceases to be a multiple of 16.
"""

import importlib
import random
from typing import Any

import pytest
import torch

from quintet.config import EngineConfig
from quintet.conformance.harness.batches import spec
from quintet.conformance.harness.worker_runner import random_prompts
from quintet.interface.types import Batch, Group, StepContext
from quintet_tools.checkpoints.tiny import FAMILIES, make
from tests.helpers.platforms.run_model import Runner
from tests.helpers.platforms.triton import needs_triton
from tests.platforms.gpu.fake_torch import FakeGPU, FakeRuntime

if needs_triton().type != "cpu":
    pytest.skip("these tests look at what Triton's interpreter is called with", allow_module_level=True)
from quintet.platforms.gpu import providers
from quintet.platforms.gpu.kernels import attention
from quintet.platforms.gpu.kernels.attention_layer import DeviceLimits
from quintet.platforms.gpu.ops import attention as triton_attention
from tests.platforms.gpu.kernels import aot

# Whole numbers that a model, its layers and its cache settle: they are the same in every step.
SETTLED = {
    "step", "width", "vocab", "parts", "bits_step", "room",  # of rows of logits and of features
    "inner", "outer_step", "inner_step", "q_heads", "k_heads", "q_step", "q_head_step", "k_step", "k_head_step",
    "v_step", "v_head_step", "q_blocks", "q_stride", "k_stride", "v_stride", "x_row", "weight_row", "expert_row",
    "up_row", "scale_row", "scale_column", "own_row", "dt_row", "into_row", "out_row", "gate_row", "q_row",
    "k_row", "v_row", "forget_row", "learn_row", "outputs", "inputs", "group", "groups", "kept", "size", "k", "dim",
    "each", "channels", "values", "first", "max_rank", "y_row",
}  # fmt: skip
SETTLED_OF = {  # by kernel, where a name means something else elsewhere
    "_embedding": {"count"}, "product": {"num"}, "combine": {"num"}, "choose": {"num", "row"},
    "choose_grouped": {"row"}, "count": {"num"}, "place": {"num"},
}  # fmt: skip


def fixed(kernel: Any) -> set[str]:
    """Names of arguments for whose values the kernel is compiled once."""
    given = kernel.kwargs.get("do_not_specialize") or ()
    return {each if isinstance(each, str) else kernel.arg_names[each] for each in given}


def name_of(kernel: Any) -> str:
    return str(kernel.fn.__name__)


def test_every_whole_number_is_settled_by_the_model_or_not_specialized() -> None:
    wrong = []
    for module, variant in aot.found():
        whole = {name for name, kind in variant.signature.items() if kind.split(":")[0] in ("i32", "i64")}
        settled = SETTLED | SETTLED_OF.get(name_of(variant.kernel), set())
        wrong += [f"{module}.{name_of(variant.kernel)}: {name}" for name in whole - settled - fixed(variant.kernel)]
    assert not wrong, f"say do_not_specialize, or that these never vary: {sorted(set(wrong))}"


def test_names_that_are_not_specialized_are_arguments_and_no_multiples_of_16() -> None:
    for module, variant in aot.found():
        assert fixed(variant.kernel) <= set(variant.kernel.arg_names), f"{module}.{name_of(variant.kernel)}"
        even = {name for name, kind in variant.signature.items() if kind in ("i32:16", "i64:16")}
        assert not even & fixed(variant.kernel), f"{module}: {variant.name} is compiled as no launch asks for it"


class Calls:
    """Notes of every launch the kernel, its constants and its whole numbers."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.noted: list[tuple[Any, dict[str, Any]]] = []
        interpreted: Any = importlib.import_module("triton.runtime.interpreter").InterpretedFunction
        run = interpreted.run

        def noting(kernel: Any, *args: Any, **more: Any) -> Any:
            named = {**dict(zip(kernel.arg_names, args, strict=False)), **more}
            whole = {name: x for name, x in named.items() if type(x) is int and name in kernel.arg_names}
            self.noted.append((kernel, whole))
            return run(kernel, *args, **more)

        monkeypatch.setattr(interpreted, "run", noting)


@pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")  # NumPy's, of masked lanes
@pytest.mark.parametrize("family", ["llama", "mixtral", pytest.param("qwen3_next", marks=pytest.mark.slow)])
def test_steps_of_other_sizes_differ_in_what_is_not_specialized_alone(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two steps of one model launch the same kernels, in one order."""
    members = {"_fake": FakeRuntime(), "op_priority": providers.PRIORITY}
    platform = type("WithKernels", (FakeGPU,), members)(EngineConfig(max_num_seqs=4, enforce_eager=True))
    whole = next(iter(FAMILIES[family].values()))
    types = whole.get("layer_types", ["every layer is alike"])
    kinds = {"layer_types": sorted(set(types))} if len(types) > 1 else {}
    tiny = make(family, {**whole, "num_hidden_layers": max(1, len(set(types))), **kinds})
    run, rng = Runner(tiny, platform=platform), random.Random(1)
    calls = Calls(monkeypatch)
    found = []
    for lengths in ([16], [3, 1, 5]):
        calls.noted.clear()
        run.step({f"{len(lengths)} {n}": each for n, each in enumerate(random_prompts(rng.random(), lengths, 90))})
        found.append(list(calls.noted))
    assert [kernel for kernel, _ in found[0]] == [kernel for kernel, _ in found[1]] and len(found[0]) > 5
    varying = {
        (name_of(kernel), name)
        for (kernel, one), (_, other) in zip(*found, strict=True)
        for name in one
        if one[name] != other.get(name) and name not in fixed(kernel)
    }
    assert not varying, "these would compile anew while requests wait"


# ------------------------------------------------------------------------------------------------------- grids


class Grids:
    """In the place of a kernel: the grids that it would be launched on."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        self.asked.append(grid)
        return lambda *args, **more: None


@pytest.mark.parametrize(("heads", "kv_heads"), [(128, 1), (32, 8), (64, 64)])
def test_long_prompts_in_large_groups_stay_within_a_grid(
    heads: int, kv_heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second and third axis of a grid end at 65,535."""
    tokens, of, grids = 200_000, spec(heads, kv_heads, 64, dtype=torch.float16), Grids()
    monkeypatch.setattr(attention, "attend_tiles", grids)
    monkeypatch.setattr(triton_attention, "single", lambda group: False)
    monkeypatch.setattr("quintet.platforms.gpu.kernels.attention_split.attend_splits", grids)
    monkeypatch.setattr("quintet.platforms.gpu.kernels.attention_split.merge_splits", grids)
    row = torch.zeros(1, dtype=torch.int32)
    group = Group(row.expand(tokens), torch.zeros(1, 1000, dtype=torch.int32), row)
    context = StepContext(Batch(row, row, row, torch.tensor([0, tokens], dtype=torch.int32), row, (group,)), group)
    q = torch.zeros(1, heads, 64, dtype=torch.float16).expand(tokens, -1, -1)
    monkeypatch.setattr(torch, "empty", lambda shape, **kind: torch.zeros((), **kind).expand(shape))
    triton_attention.attend(q, torch.zeros(2, 2, kv_heads, 16, 64).half(), context, of, None, DeviceLimits())
    assert len(grids.asked) == 3
    assert all(0 < axis <= 65_535 for grid in grids.asked for axis in grid[1:]), grids.asked
    assert all(grid[0] < 2**31 for grid in grids.asked)


def test_sums_of_splits_are_of_few_tokens() -> None:
    """Their tokens are a grid's second axis."""
    from quintet.platforms.gpu.kernels import quantized
    from quintet.platforms.gpu.kernels.product_tiles import tile_for

    for tile in (tile_for(65_536, False), tile_for(65_536, True)):
        splits = [quantized._splits(tokens, 1, 10**6, tile, 10**6, 1000) for tokens in (64, 65, 65_536)]
        assert splits[0] > 1 and splits[1:] == [1, 1]
