"""AutoRound's and AWQ's configurations and packings: what each says of modules, and what is refused."""

from typing import Any

import pytest
import torch

from quintet.interface.weights import CheckpointSlice, ShardRange, StoredTensor
from quintet.layers.quantization.checkpoint_config import read_quantization_config
from quintet.layers.quantization.formats.awq import Awq
from quintet.layers.quantization.formats.awq_gemv import Gemv, GemvFast, width
from quintet.layers.quantization.formats.gptq import Gptq
from quintet.layers.quantization.formats.marlin import Marlin

ROUND = {"quant_method": "auto-round", "bits": 4, "group_size": 128, "sym": True}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
NAME = "model.layers.0.mlp.up_proj"


def reader(said: dict[str, Any], module: str = NAME) -> Any:
    found = read_quantization_config(said)
    assert found is not None
    return found.plan.reader(module)


@pytest.mark.parametrize(
    ("said", "want"),
    [
        ({}, Gptq(4, 128, True, zeros_minus_one=True)),
        ({"packing_format": "auto_round:auto_gptq"}, Gptq(4, 128, True, zeros_minus_one=True)),
        ({"backend": "auto_round:gptq:exllamav2"}, Gptq(4, 128, True, zeros_minus_one=True)),
        ({"backend": "auto_round:exllamav2", "sym": False}, Gptq(4, 128, False, zeros_minus_one=False)),
        ({"packing_format": "auto_round", "sym": False}, Gptq(4, 128, False, zeros_minus_one=False)),
        ({"packing_format": "auto_round", "bits": 5, "group_size": -1}, Gptq(5, 0, True, zeros_minus_one=False)),
        ({"packing_format": "auto_round:gptqmodel", "bits": 2}, Gptq(2, 128, True, zeros_minus_one=False)),
        ({"packing_format": "auto_round:auto_awq", "sym": False}, Awq(128)),
        ({"quant_method": "intel/auto-round"}, Gptq(4, 128, True)),
        ({"quant_method": "inc"}, Gptq(4, 128, True)),
    ],
    ids=str,
)
def test_how_auto_round_packs(said: dict[str, Any], want: Any) -> None:
    assert reader({**ROUND, **said}) == want


def test_auto_rounds_modules() -> None:
    extra = {
        "model.layers.1.mlp.up_proj": {"bits": 8, "group_size": 32},
        ".*layers\\.1\\..*": {"bits": 3},
        "mlp.*down": {"bits": 16, "data_type": "fp"},
        "lm_head": {"bits": 4, "sym": False},
    }
    found = read_quantization_config(
        {**ROUND, "extra_config": extra, "block_name_to_quantize": "model.layers,model.other"}
    )
    assert found is not None and found.heads
    read = found.plan.reader
    assert read("model.layers.0.mlp.up_proj") == Gptq(4, 128, True)
    assert read("model.layers.1.mlp.up_proj") == Gptq(8, 32, True)
    assert read("model.layers.1.mlp.down_proj") == Gptq(3, 128, True)
    assert read("model.layers.2.mlp.down_proj") is None
    assert read("model.vision.0.up_proj") is None
    assert read("lm_head") == Gptq(4, 128, False)


@pytest.mark.parametrize("blocks", [[["model.layers.0", "model.layers.1"]], ["model.layers"], "model.layers"])
def test_blocks_are_lists_or_text(blocks: Any) -> None:
    read = [reader({**ROUND, "block_name_to_quantize": blocks}, each) for each in (NAME, "visual.blocks.0.up_proj")]
    assert read == [Gptq(4, 128, True), None]


@pytest.mark.parametrize(
    ("said", "want"),
    [
        ({"version": "GEMM"}, Awq(128)),
        ({"version": "exllama"}, Awq(128)),
        ({"version": "ipex", "zero_point": False}, Awq(128)),
        ({"version": None, "checkpoint_format": "gemm", "group_size": -1}, Awq(0)),
        ({"version": "gemv", "group_size": 64}, Gemv(64)),
        ({"version": "gemv_fast"}, GemvFast(128)),
        ({"version": "llm-awq"}, GemvFast(128, "scaled_zeros")),
        ({"version": "marlin", "zero_point": False}, Marlin(128, ("qweight", "scales"))),
        ({"version": "marlin", "zero_point": False, "group_size": -1}, Marlin(0, ("qweight", "scales"))),
        ({"bits": None, "w_bit": 4, "group_size": None, "q_group_size": 64}, None),
    ],
    ids=str,
)
def test_how_awq_packs(said: dict[str, Any], want: Any) -> None:
    said = {key: value for key, value in {**AWQ, **said}.items() if value is not None}
    assert reader(said) == (want or Awq(64))


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({**AWQ, "bits": 3}, "AWQ with 3 bits"),
        ({**AWQ, "bits": "x"}, "AWQ with 'x' bits"),
        ({**AWQ, "version": "gemx"}, "layout 'gemx' and zero_point True; quintet reads 4 bits of gemm, exllama"),
        ({**AWQ, "version": "marlin"}, "layout 'marlin' and zero_point True"),
        ({**AWQ, "version": "marlin", "zero_point": False, "group_size": 64}, "group_size 64 is none that the layout"),
        ({**AWQ, "version": "gemv", "group_size": -1}, "group_size -1 is none that the layout gemv has"),
        ({**AWQ, "version": "gemv_fast", "group_size": 16}, "group_size 16 is none"),
        ({**AWQ, "group_size": 20}, "group_size 20 is not -1 or a multiple of 16"),
        ({**AWQ, "group_size": 2**70}, "group_size 11805"),
        ({**ROUND, "bits": 9}, "AutoRound with 9 bits"),
        ({**ROUND, "bits": 16}, "AutoRound with 16 bits"),
        ({**ROUND, "group_size": [128, 128]}, r"group_size \[128, 128\]"),
        ({**ROUND, "data_type": "mx_fp"}, "data_type 'mx_fp' and act_bits 16; quintet reads int"),
        ({**ROUND, "act_bits": 8}, "act_bits 8; quintet reads int with activations as they are"),
        ({**ROUND, "packing_format": "auto_round:fp8_static"}, "packing_format 'auto_round:fp8_static'"),
        ({**ROUND, "packing_format": "auto_round:auto_awq", "bits": 8}, "8 bits, packed as awq"),
        ({**ROUND, "packing_format": "auto_round:awq", "extra_config": {"a": {"bits": 2}}}, "2 bits, packed as awq"),
        ({**ROUND, "extra_config": [1]}, r"extra_config is \[1\]"),
        ({**ROUND, "extra_config": {"(a+)+": {}}}, "could take long to match"),
    ],
    ids=str,
)
def test_what_is_not_read_is_refused_by_name(said: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        read_quantization_config(said)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("inputs", "group", "want"),
    [(4096, 128, 4), (1024, 128, 1), (4096, 64, 8), (192, 64, 2), (96, 32, 4), (512, 512, 1)],
)
def test_rows_of_zero_points_are_padded(inputs: int, group: int, want: int) -> None:
    assert width(inputs, group) == want


@pytest.mark.parametrize("read", [Awq(32), Gemv(32), GemvFast(32), Marlin(0)], ids=lambda each: type(each).__name__)
@pytest.mark.parametrize("shape", [(63, 128), (64, 100)])
def test_sizes_that_a_layout_does_not_have(read: Any, shape: tuple[int, int]) -> None:
    if isinstance(read, Gemv) and shape[0] == 63:
        return
    with pytest.raises(ValueError, match=r"model\.layers\.0\.mlp\.up_proj \[\d+, \d+\] does not divide"):
        read.stored(CheckpointSlice(f"{NAME}.weight", shape, ((0, shape[0]),)))


@pytest.mark.parametrize("read", [Gemv(32), GemvFast(64)], ids=str)
def test_a_share_is_the_wholes(read: Any) -> None:
    part = CheckpointSlice(f"{NAME}.weight", (64, 192), ((0, 64),))
    tensors = {name: made(on) for name, on in read.stored(part).items()}
    whole = read.floats(part, ShardRange((0, 64), (0, 192)), tensors)
    for cut in (
        ShardRange((5, 23), (0, 192)),
        ShardRange((0, 64), (64, 128)),
        ShardRange((8, 32), (16, 80)),
        ShardRange((1, 9), (3, 50)),
    ):
        want = whole[slice(*cut.outputs), slice(*cut.inputs)]
        torch.testing.assert_close(read.floats(part, cut, tensors), want, rtol=0, atol=0)


def made(on: StoredTensor) -> torch.Tensor:
    generator, dtype, shape = torch.Generator().manual_seed(0), on.dtypes[0], on.shape
    assert shape is not None
    if dtype.is_floating_point:
        return torch.rand(shape, generator=generator)
    ends = torch.iinfo(dtype)
    return torch.randint(ends.min, ends.max, shape, generator=generator, dtype=dtype)
