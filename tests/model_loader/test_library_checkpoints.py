"""Checkpoints of bitsandbytes, torchao and HQQ that those libraries wrote, against what they dequantize them to."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from quintet import LLM, SamplingParams
from quintet.interface.platform import Capabilities
from quintet.interface.weights import CheckpointSlice, ShardRange, WeightReader
from quintet.layers.quantization.checkpoint_config import read_quantization_config
from quintet.ops.quantized import dequantized
from quintet.platforms.cpu import PLATFORM as CPU
from tests.helpers.checkpoints.fixtures import DATA, config, plan, said, tiny, wanted
from tests.helpers.checkpoints.fixtures import forms as forms_of
from tests.helpers.platforms.run_model import Runner

LAYER = "model.layers.0"
SHAPES = {
    "q_proj": (64, 64), "k_proj": (32, 64), "v_proj": (32, 64), "o_proj": (64, 64), "gate_proj": (96, 64),
    "up_proj": (96, 64), "down_proj": (64, 96),
}  # fmt: skip
# what activations are quantized to differs (LLM.int8() does, we do not), and how they are rounded
OFF = {"bitsandbytes_int8": 0.1, "torchao_mixed": 0.06}
# minima are held in float16 here, and nf4 and fp4 in tables of 8 bits
OFF |= {"bitsandbytes_nf4": 0.06, "bitsandbytes_fp4": 0.08, "torchao_int4": 4e-3, "hqq_mixed": 6e-3}
NAMES = ["bitsandbytes_nf4", "bitsandbytes_fp4", "bitsandbytes_int8", "torchao_int4", "torchao_mixed", "hqq_mixed"]


def part_of(module: str) -> CheckpointSlice:
    shape = SHAPES[module.rpartition(".")[2]]
    return CheckpointSlice(f"{module}.weight", shape, ((0, shape[0]),))


def read(name: str, module: str) -> tuple[WeightReader, CheckpointSlice, dict[str, Any]]:
    reader, part = plan(DATA / name).plan.reader(module), part_of(module)
    assert reader is not None
    file = load_file(DATA / name / "model.safetensors")
    return reader, part, {each: file[each] for each in reader.stored(part)}


def modules(name: str) -> list[str]:
    return [each for each in wanted(name) if each.startswith(LAYER)]


@pytest.mark.parametrize("name", NAMES)
def test_weights_are_what_the_library_makes_of_them(name: str) -> None:
    for module in modules(name):
        reader, part, tensors = read(name, module)
        whole = ShardRange((0, part.shape[0]), (0, part.shape[1]), part.shape[1])
        want, known = wanted(name)[module], reader.floats(part, whole, tensors)
        assert known.dtype == torch.float32 and known.shape == part.shape
        torch.testing.assert_close(known[::4], want, rtol=1e-6, atol=1e-6)
        if not reader.format(whole).plain:
            torch.testing.assert_close(dequantized(reader.matrix(part, whole, tensors)), known, rtol=1e-6, atol=2e-6)


CUTS = [((5, 23), (0, None)), ((0, 32), (32, 64)), ((7, 8), (16, 48)), ((1, 30), (3, 21))]


@pytest.mark.parametrize("name", NAMES)
def test_a_share_is_a_share_of_the_whole(name: str) -> None:
    for module in modules(name):
        reader, part, tensors = read(name, module)
        row = part.shape[1]
        whole = reader.floats(part, ShardRange((0, part.shape[0]), (0, row), row), tensors)
        for (first, last), (start, end) in CUTS:
            cut = ShardRange((first, last), (start, end or row), row)
            share = whole[first:last, start : end or row]
            torch.testing.assert_close(reader.floats(part, cut, tensors), share, rtol=1e-6, atol=1e-6)
            if not reader.format(cut).plain:
                torch.testing.assert_close(dequantized(reader.matrix(part, cut, tensors)), share, rtol=1e-6, atol=2e-6)


@pytest.mark.parametrize("name", NAMES)
def test_a_model_gives_the_logits_of_the_library(name: str) -> None:
    facts = CPU.probe()
    assert isinstance(facts, Capabilities)
    want, run = wanted(name), Runner(tiny(name), quantization=forms_of(name, facts.weight_formats))
    (logits,) = run.prompts([want["ids"].tolist()])
    torch.testing.assert_close(logits, want["logits"], rtol=0, atol=OFF.get(name, 1e-3) * float(want["logits"].std()))


SAID = {
    "bitsandbytes_nf4": "checkpoint quantized by bitsandbytes: ",
    "torchao_int4": "checkpoint quantized by torchao: ",
    "hqq_mixed": "checkpoint quantized by hqq: ",
}


@pytest.mark.parametrize("name", SAID)
def test_an_engine_reads_them_and_says_so(name: str) -> None:
    want = wanted(name)
    with LLM(
        str(DATA / name), device="cpu", skip_tokenizer_init=True, use_tqdm=False, kv_cache_memory_bytes="4M"
    ) as llm:
        greedy = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, detokenize=False)
        (answer,) = llm.generate([{"prompt_token_ids": want["ids"].tolist()}], greedy, use_tqdm=False)
        assert any(each.startswith(SAID[name]) for each in llm._client.engine_plan.reasons)
    assert answer.outputs[0].token_ids[0] == int(want["logits"][-1].argmax())


def test_what_a_library_left_in_floats_is_not_looked_for() -> None:
    for name, module in (("bitsandbytes_int8", "o_proj"), ("torchao_mixed", "o_proj")):
        assert plan(DATA / name).plan.reader(f"{LAYER}.self_attn.{module}") is None
        assert plan(DATA / name).plan.reader("lm_head") is None


def forms_in(name: str) -> dict[str, str]:
    """Of its products, by the last part of their names."""
    known = plan(DATA / name).plan
    found = {}
    for end, shape in SHAPES.items():
        reader = known.reader(f"{LAYER}.{'self_attn' if end[0] in 'qkvo' else 'mlp'}.{end}")
        fmt = reader.format(ShardRange((0, shape[0]), (0, shape[1]), shape[1])) if reader else None
        found[end] = f"{fmt.kind}/{fmt.group}{' mins' * fmt.mins}" if fmt else "floats"
    return found


def test_products_have_the_form_that_serves_them() -> None:
    assert set(forms_in("bitsandbytes_nf4").values()) == {"table4/64", "table4/32"}  # blocks of 64 in rows of 96
    assert forms_in("bitsandbytes_nf4")["down_proj"] == "table4/32"
    assert forms_in("torchao_mixed") == {
        "q_proj": "w8a8/0", "up_proj": "w8a8/0", "k_proj": "int8/0", "v_proj": "fp8/0", "gate_proj": "fp8/0",
        "o_proj": "floats", "down_proj": "int4/32",
    }  # fmt: skip
    assert forms_in("hqq_mixed") == {
        "q_proj": "int4/64 mins", "k_proj": "int4/64 mins", "v_proj": "int4/16 mins", "o_proj": "int8/32 mins",
        "gate_proj": "int4/32 mins", "up_proj": "plain/0", "down_proj": "int4/32 mins",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("name", "module", "end", "given", "message"),
    [
        ("bitsandbytes_nf4", "k_proj", ".weight.quant_state.bitsandbytes__nf4", b"{", "no JSON"),
        ("bitsandbytes_nf4", "k_proj", ".weight.quant_state.bitsandbytes__nf4", b"[" * 4000, "no JSON"),
        ("bitsandbytes_nf4", "k_proj", ".weight.quant_state.bitsandbytes__nf4", b" " * 5000, "up to 4096 bytes"),
        ("bitsandbytes_nf4", "k_proj", ".weight.quant_state.bitsandbytes__nf4", b'{"blocksize": 128}', "type, and"),
        (
            "bitsandbytes_nf4", "k_proj", ".weight.quant_state.bitsandbytes__nf4",
            b'{"quant_type": "nf4", "blocksize": 64, "nested_offset": "x"}', "no double quantization",
        ),
        ("bitsandbytes_nf4", "k_proj", ".weight.quant_map", torch.zeros(16), "is not nf4's"),
        ("bitsandbytes_int8", "k_proj", ".weight_format", torch.tensor(1, dtype=torch.uint8), "not 0"),
        ("torchao_mixed", "k_proj", "._weight_zero_point", torch.ones(32, 1, dtype=torch.int8), "not all 0"),
        ("hqq_mixed", "k_proj", ".nbits", torch.tensor(4, dtype=torch.int32), r"is of \(4, 64, 1\)"),
    ],
)  # fmt: skip
def test_what_does_not_fit_together_is_an_error_that_names_the_tensor(
    name: str, module: str, end: str, given: Any, message: str
) -> None:
    path = f"{LAYER}.self_attn.{module}"
    reader, part, tensors = read(name, path)
    tensors[path + end] = torch.tensor(list(given), dtype=torch.uint8) if isinstance(given, bytes) else given
    with pytest.raises(ValueError, match=f"{path}.*{message}"):
        reader.matrix(part, ShardRange((0, part.shape[0]), (0, part.shape[1]), part.shape[1]), tensors)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"quant_method": "bitsandbytes"}, "load_in_4bit None"),
        ({"load_in_4bit": True, "bnb_4bit_quant_type": "nf3"}, "type nf3"),
        ({"quant_method": "torchao", "quant_type": "int8_weight_only"}, "torchao 0.15 and later"),
        ({"quant_method": "torchao", "quant_type": {"default": {"_type": "A", "_data": {}}}}, "torchao's 'A'; quintet"),
        ({"quant_method": "hqq"}, "quant_config None"),
        ({"quant_method": "hqq", "quant_config": {"weight_quant_params": {"nbits": [4]}}}, "reads 8, 4, 3, 2 and 1"),
        ({"quant_method": "hqq", "quant_config": {"weight_quant_params": {"nbits": 5}}}, "reads 8, 4, 3, 2 and 1 bits"),
        (
            {"quant_method": "hqq", "quant_config": {
                "weight_quant_params": {"nbits": 4, "group_size": 64}, "zero_quant_params": {"nbits": 8}}},
            "quantized scales or zeros",
        ),
    ],
)  # fmt: skip
def test_a_configuration_that_is_not_read_is_refused_with_the_reason(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_quantization_config(given)


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("bitsandbytes_nf4", "self_attn.k_proj.weight.absmax", "absmax has 3 numbers"),
        ("torchao_mixed", "self_attn.k_proj._weight_scale", "in a layout that quintet does not read"),
    ],
)
def test_a_file_of_another_layout_is_refused_before_a_weight_is_read(
    name: str, tensor: str, message: str, tmp_path: Path
) -> None:
    file = load_file(DATA / name / "model.safetensors")
    file[f"{LAYER}.{tensor}"] = file[f"{LAYER}.{tensor}"].flatten()[:3].clone()
    save_file(file, tmp_path / "model.safetensors")
    from quintet.model_loader.loader import tensors_of
    from quintet.models import model_class

    with pytest.raises(ValueError, match=f"{LAYER}.*{message}"):
        read_quantization_config(said(DATA / name), lambda: tensors_of(tmp_path, model_class(config(DATA / name))))
