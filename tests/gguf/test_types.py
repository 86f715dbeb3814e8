"""ggml's types, against what ggml made of blocks that its own quantizer wrote (tests/data/quantized/README.md)."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from quintet.gguf.tensor_types import KINDS
from quintet.interface.weights import CheckpointSlice, ShardRange
from quintet.layers.quantization.checkpoint_config import read_quantization_config
from quintet.layers.quantization.formats.ggml_blocks import TYPES
from quintet.layers.quantization.formats.gguf import BlockWeights, GgufPlan
from quintet.ops.quantized import dequantized

FILE = load_file(Path(__file__).parents[1] / "data" / "quantized" / "gguf" / "types.safetensors")
NAMES = [name for name in FILE if not name.endswith(".floats")]
ROWS, INPUTS = FILE["Q8_0.floats"].shape
PART = CheckpointSlice("x.weight", (ROWS, INPUTS), ((0, ROWS),))
WHOLE = ShardRange((0, ROWS), (0, INPUTS))


def test_the_fixture_has_every_type_that_is_read() -> None:
    assert set(NAMES) == {*TYPES} and set(NAMES) < {kind.name for kind in KINDS.values()}


@pytest.mark.parametrize("name", NAMES)
def test_floats_are_those_of_ggml_bit_for_bit(name: str) -> None:
    reader, tensors = BlockWeights(name), {"x.weight": FILE[name]}
    assert reader.stored(PART)["x.weight"].shape == FILE[name].shape
    assert torch.equal(reader.floats(PART, WHOLE, tensors), FILE[f"{name}.floats"])


@pytest.mark.parametrize("name", TYPES)
def test_the_canonical_matrix_stands_for_the_same(name: str) -> None:
    matrix = BlockWeights(name).matrix(PART, WHOLE, {"x.weight": FILE[name]})
    fmt = matrix.format
    assert fmt == BlockWeights(name).format(WHOLE) and not fmt.plain and matrix.scales is not None
    assert matrix.values.shape == (ROWS, INPUTS * fmt.bits // 8)
    assert matrix.scales.shape == (ROWS, INPUTS // fmt.group)
    assert (matrix.mins is not None, matrix.zeros is not None) == (fmt.mins, fmt.zeros)
    assert torch.equal(dequantized(matrix), FILE[f"{name}.floats"])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("inputs", [(256, 512), (0, 96), (64, 448), (48, 80), (8, 24)])
def test_a_share_of_the_inputs_is_cut_out_of_blocks(name: str, inputs: tuple[int, int]) -> None:
    reader, cut, tensors = BlockWeights(name), ShardRange((1, 2), inputs), {"x.weight": FILE[name]}
    want = FILE[f"{name}.floats"][1:2, slice(*inputs)]
    assert torch.equal(reader.floats(PART, cut, tensors), want)
    if not reader.format(cut).plain:
        assert torch.equal(dequantized(reader.matrix(PART, cut, tensors)), want)


def test_a_matrix_that_rows_of_blocks_do_not_divide_is_refused() -> None:
    with pytest.raises(ValueError, match="48 inputs, no multiple of Q4_0's 32"):
        BlockWeights("Q4_0").stored(CheckpointSlice("x.weight", (2, 48), ((0, 2),)))


def test_the_plan_knows_modules_and_experts() -> None:
    found = read_quantization_config(
        {"quant_method": "gguf", "types": {"lm_head": "Q6_K", "layers.0.mlp.experts.up_proj": "Q4_K"}}
    )
    assert found is not None and found.heads and found.method == "gguf (1 Q6_K, 1 Q4_K)"
    assert isinstance(found.plan, GgufPlan) and hash(found.plan)
    assert found.plan.reader("lm_head") == BlockWeights("Q6_K")
    assert found.plan.reader("layers.0.mlp.experts.17.up_proj") == BlockWeights("Q4_K")
    assert found.plan.reader("layers.0.mlp.gate") is None


@pytest.mark.parametrize(
    ("said", "why"), [({}, "no types"), ({"types": {"a": "Q9_9"}}, "Q9_9"), ({"types": {"a": "I32"}}, "I32")]
)
def test_types_that_are_not_read_are_refused(said: dict[str, object], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        read_quantization_config({"quant_method": "gguf", **said})
