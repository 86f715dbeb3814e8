"""What floats become while they are loaded, by the names that users give: forms, options, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from quintet.config import EngineConfig
from quintet.engine.quantization import TargetPlatform, resolve_quantization
from quintet.hub.hf_overrides import model_overrides
from quintet.interface.platform import Capabilities
from quintet.interface.weights import PLAIN, CheckpointSlice, ShardRange, Weight, WeightFormat
from quintet.layers.quantization import QuantizationPlan
from quintet.layers.quantization.formats.bitsandbytes import NF4, TABLES
from quintet.layers.quantization.online import FP8, ONLINE, RoundedWeights, format_for_inputs
from quintet.ops.quantize import canonical, quantize
from quintet.ops.quantized import dequantized
from tests.helpers.checkpoints.fixtures import DATA, said

E4M3 = torch.float8_e4m3fn
AO = {"_type": "Int8WeightOnlyConfig", "_version": 2, "_data": {"group_size": None}}


@pytest.mark.parametrize("table", TABLES)
def test_four_bits_are_bitsandbytes_own_bit_for_bit(table: str) -> None:
    given = load_file(DATA / "bitsandbytes_made.safetensors")
    matrix = quantize(given[f"{table}.of"], WeightFormat("table4", 4, 16, 64, codebook=TABLES[table]))
    assert matrix.scales is not None
    assert torch.equal(matrix.scales.reshape(-1), given[f"{table}.absmax"])
    high_first = (matrix.values & 15) << 4 | matrix.values >> 4
    packed = given[f"{table}.packed"].reshape(high_first.shape)
    unequal = high_first != packed
    assert not unequal.any() or table == "fp4"  # whose two zeros are the same number
    known = [torch.tensor(TABLES[table])[each.int()] for each in (high_first >> 4, high_first & 15)]
    want = [torch.tensor(TABLES[table])[each.int()] for each in (packed >> 4, packed & 15)]
    assert all(torch.equal(*pair) for pair in zip(known, want, strict=True))


@pytest.mark.parametrize("fmt", [ONLINE["fp8"], *FP8.values()], ids=["output", "tensor", "block"])
def test_floats_of_eight_bits_meet_the_largest_and_are_off_by_a_sixteenth(fmt: WeightFormat) -> None:
    weight = torch.randn(200, 300, generator=torch.Generator().manual_seed(0))
    weight[:, 7] *= 20
    matrix = quantize(weight, fmt)
    known = dequantized(matrix)
    assert matrix.values.dtype == E4M3 and matrix.scales is not None and matrix.scales.shape == (200, fmt.groups(300))
    least = 2.0**-9 * matrix.scales.repeat_interleave(fmt.group or 300, 1)[:, :300]
    assert bool(((known - weight).abs() <= weight.abs() / 16 + least).all())
    torch.testing.assert_close(known.abs().max(), weight.abs().max())
    scales = {"0": 1, "1": 200, "128": 6}[str(fmt.outputs_per_scale)]
    assert len(matrix.scales.unique()) == scales


def test_a_tensor_has_its_scale_whatever_stands_beside_it() -> None:
    x = {"a": torch.randn(16, 64), "b": torch.randn(8, 64) * 9}
    parts = tuple(CheckpointSlice(name, tuple(each.shape), ((0, len(each)),)) for name, each in x.items())
    scales = canonical(Weight("weight", parts, 0, 0, torch.float32, "linear", FP8["fp8_per_tensor"]), x).scales
    assert scales is not None and len(scales[:16].unique()) == len(scales[16:].unique()) == 1 < len(scales.unique())


@pytest.mark.parametrize("fmt", [ONLINE["fp8"], WeightFormat("table4", 4, 16, 64, codebook=NF4)], ids=["fp8", "nf4"])
@pytest.mark.parametrize("number", [torch.nan, torch.inf])
def test_what_is_not_finite_is_refused(fmt: WeightFormat, number: float) -> None:
    weight = torch.ones(4, 64)
    weight[2, 3] = number
    with pytest.raises(ValueError, match="not finite"):
        quantize(weight, fmt)


def settled(
    *, quant: set[str], fp8: torch.dtype | None = None, beside: Any = None, **settings: Any
) -> QuantizationPlan:
    config = EngineConfig(**settings)

    class Model:
        """Of a config.json that says nothing."""

        def get_text_config(self) -> "Model":
            return self

    facts = Capabilities(1, (torch.float32,), fp8=fp8, weight_formats=frozenset(quant))
    return resolve_quantization(config, Model(), TargetPlatform("a test's", facts), dict, beside)


def kind(forms: QuantizationPlan, module: str = "model.layers.0.self_attn.q_proj", inputs: int = 256) -> str:
    fmt, reader = forms.format_for(module, ShardRange((0, 8), (0, inputs), inputs))
    return f"{fmt.kind}/{fmt.group}" if reader is None else f"rounded to {getattr(reader, 'weight_format', PLAIN).kind}"


ALL = {"int8", "int4", "w8a8", "w4a8", "fp8", "fp8a8", "table4"}


@pytest.mark.parametrize(
    ("settings", "there", "want", "head"),
    [
        ({"quantization": "int4"}, {}, "int4/32", "int8/128"),
        ({"quantization": "int4", "quantization_group_size": 128}, {}, "int4/128", "int8/128"),
        ({"quantization": "w4a8"}, {}, "w4a8/32", "w8a8/0"),
        ({"quantization": "fp8"}, {}, "fp8/0", "plain/0"),
        ({"quantization": "fp8a8"}, {"fp8": E4M3}, "fp8a8/0", "plain/0"),
        ({"quantization": "fp8a8"}, {}, "fp8/0", "plain/0"),  # no fp8 in its products
        ({"quantization": "fp8_per_block"}, {"fp8": E4M3}, "fp8a8/128", "plain/0"),
        ({"quantization": "bitsandbytes"}, {}, "table4/64", "plain/0"),
        ({"load_format": "bitsandbytes"}, {}, "table4/64", "plain/0"),
        ({"quantization": "bitsandbytes"}, {"quant": {"int8", "int4"}}, "rounded to table4", "plain/0"),
        ({"quantization": "fp8"}, {"quant": {"int8"}}, "rounded to fp8", "plain/0"),
        (
            {"quantization": "bitsandbytes", "hf_overrides": {"quantization_config": {"load_in_8bit": True}}},
            {}, "int8/128", "plain/0",
        ),
        (
            {"quantization": "bitsandbytes",
             "hf_overrides": {"quantization_config": {"llm_int8_skip_modules": ["q_proj"]}}},
            {}, "plain/0", "plain/0",
        ),
        (
            {"quantization": "torchao", "hf_overrides": {"quantization_config_dict_json": json.dumps(AO)}},
            {}, "int8/128", "plain/0",
        ),
    ],
)  # fmt: skip
def test_a_name_becomes_a_form(settings: dict[str, Any], there: dict[str, Any], want: str, head: str) -> None:
    forms = settled(**{"quant": ALL, **there}, **settings)
    assert kind(forms) == want
    assert kind(forms.for_head(), "lm_head") == head


def test_torchaos_configuration_says_each_modules_form() -> None:
    text = json.dumps(said(DATA / "torchao_mixed")["quant_type"]["default"])
    forms = settled(quant=ALL, quantization="torchao", hf_overrides={"quantization_config_dict_json": text})
    at = "model.layers.0"
    assert {name: kind(forms, f"{at}.{name}", 64) for name in ("self_attn.q_proj", "self_attn.v_proj")} == {
        "self_attn.q_proj": "w8a8/0", "self_attn.v_proj": "fp8/0",
    }  # fmt: skip
    assert kind(forms, f"{at}.self_attn.o_proj") == "plain/0" and kind(forms, f"{at}.mlp.down_proj") == "int4/32"


def test_the_configuration_may_stand_in_a_file(tmp_path: Path) -> None:
    file = tmp_path / "torchao.json"
    file.write_text(json.dumps({"_type": "Int4WeightOnlyConfig", "_data": {"group_size": 128}}))
    forms = settled(quant=ALL, quantization="torchao", hf_overrides={"quantization_config_file": str(file)})
    assert kind(forms) == "int4/128"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"quantization": "torchao"}, "give torchao's config_to_dict"),
        ({"quantization": "torchao", "hf_overrides": {"quantization_config_dict_json": "{"}}, "is no JSON"),
        ({"quantization": "torchao", "hf_overrides": {"quantization_config_dict_json": "[]"}}, "no object"),
        (
            {"quantization": "torchao",
             "hf_overrides": {"quantization_config_dict_json": {"_type": "NVFP4Config", "_data": {}}}},
            "torchao's NVFP4Config .* is not made while loading; quintet makes Int8WeightOnlyConfig",
        ),
        (
            {"quantization": "torchao",
             "hf_overrides": {"quantization_config_dict_json": {
                 "_type": "Int4WeightOnlyConfig", "_data": {"group_size": 256}}}},
            "groups of 256; quintet makes them of 32, 64 and 128",
        ),
        (
            {"quantization": "bitsandbytes", "hf_overrides": {"quantization_config": {"bnb_4bit_quant_type": "nf3"}}},
            "'nf3' is not one of nf4, fp4",
        ),
        ({"quantization": "gptq_marlin"}, "is of checkpoints that are quantized, and config.json says nothing of it"),
        ({"quantization": "awq"}, "let floats be quantized while they are loaded by one of int8, int4,"),
    ],
)  # fmt: skip
def test_what_cannot_be_made_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        settled(quant=ALL, **settings)


NVFP4 = {"quant_method": "modelopt", "quantization": {"quant_algo": "NVFP4", "group_size": 16}}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128}


@pytest.mark.parametrize(
    ("name", "said"),
    [
        *(("modelopt", NVFP4), ("modelopt_fp4", NVFP4), ("modelopt_mxfp8", NVFP4), ("gptq", GPTQ)),
        *(("gptq_marlin", GPTQ), ("inc", {**GPTQ, "quant_method": "auto-round"}), ("mxfp4", {"quant_method": "mxfp4"})),
    ],
)
def test_vllms_names_of_a_checkpoints_method_are_taken(name: str, said: dict[str, Any]) -> None:
    found = settled(quant=ALL, beside=said, quantization=name).checkpoint
    assert found is not None and found.method == said["quant_method"]


def test_a_load_format_that_contradicts_the_quantization_is_refused() -> None:
    with pytest.raises(ValueError, match="load_format='bitsandbytes' is of quantization='bitsandbytes', not 'int4'"):
        EngineConfig(load_format="bitsandbytes", quantization="int4")


def test_options_of_a_quantization_are_no_entries_of_the_model() -> None:
    overrides = {"quantization_config": {"load_in_8bit": True}, "max_position_embeddings": 64}
    config = EngineConfig(quantization="bitsandbytes", hf_overrides=overrides)
    assert model_overrides(config) == {"max_position_embeddings": 64}
    assert model_overrides(EngineConfig(hf_overrides={"quantization_config": None})) == {"quantization_config": None}


def test_a_form_that_is_not_kept_is_rounded_to_as_its_own_would_be() -> None:
    weight = torch.randn(40, 96, generator=torch.Generator().manual_seed(2))
    fmt = WeightFormat("table4", 4, 16, 64, codebook=NF4)
    part = CheckpointSlice("x.weight", (40, 96), ((0, 40),))
    known = RoundedWeights(fmt).floats(part, ShardRange((8, 40), (0, 96), 96), {"x.weight": weight})
    assert torch.equal(known, dequantized(quantize(weight, format_for_inputs(fmt, 96)))[8:])
    flipped = CheckpointSlice("x.weight", (40, 96), ((0, 40),), transposed=True)
    assert torch.equal(
        RoundedWeights(fmt).floats(flipped, ShardRange((8, 40), (0, 96), 96), {"x.weight": weight.t()}), known
    )
