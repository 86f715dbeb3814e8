"""Quantized checkpoints that we write: what stands in the files, by the formats' rules, and what is refused."""

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import quintet
from quintet.quantize import packing, rounding, samples, schemes
from quintet.quantize import writer as output
from quintet.quantize.config import QuantizeConfig
from quintet.quantize.gptq import gptq
from quintet.quantize.quantize import QuantizeResult, quantize
from quintet.tokenizers.tokenizer import load_tokenizer
from quintet_tools.checkpoints.tiny import PLAIN, make
from scripts.check_quantized import dequantized, tensors_of
from tests.helpers.checkpoints.quantized_files import DATA

SIZES = {
    **PLAIN, "hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 32, "num_hidden_layers": 2,
}  # fmt: skip
BUNDLED_FOLDER = Path(quintet.__file__).parent / "bundled"
WORDS = "a red house stands near the old river and cats count the stars above green hills".split()
PRODUCT = "model.layers.1.mlp.down_proj"
ERRORS = {  # of the weights' standard deviation: a quarter of the root of the steps' squares, for normal numbers
    "W4A16": 0.15, "W4A16_ASYM": 0.13, "W8A16": 0.01, "W8A8": 0.011, "W4A8": 0.15, "FP8_DYNAMIC": 0.04,
    "FP8_BLOCK": 0.04,
}  # fmt: skip


def written(model: str | Path, folder: Path, **settings: Any) -> QuantizeResult:
    return quantize(str(model), QuantizeConfig(output=str(folder), **settings), progress=False)


@pytest.fixture(scope="module")
def model() -> Path:
    return make("llama", SIZES).folder


@pytest.mark.parametrize("scheme", ERRORS)
def test_the_file_stands_for_the_weights(scheme: str, model: Path, tmp_path: Path) -> None:
    """By the format's rule, as scripts/check_quantized.py has it."""
    done = written(model, tmp_path / "made", scheme=scheme)
    want, got = load_file(model / "model.safetensors"), dequantized(done.folder)
    assert set(got) == set(want)
    assert done.products == 14
    for name, tensor in want.items():
        error = (got[name] - tensor.float()).square().mean().sqrt() / tensor.float().std()
        quantized = "_proj" in name
        assert 0 < error < ERRORS[scheme] if quantized else torch.equal(got[name], tensor.float())


@pytest.mark.parametrize("bits", [4, 8])
def test_packing_is_the_formats(bits: int) -> None:
    values = torch.randint(-(2 ** (bits - 1)), 2 ** (bits - 1), (3, 20), dtype=torch.int8)
    assert torch.equal(packing.packed(values, bits), by_hand(values, bits))


def by_hand(values: Tensor, bits: int) -> Tensor:
    """compressed-tensors' rule, a number at a time."""
    rows = []
    for row in values.tolist():
        words = [0] * -(-len(row) * bits // 32)
        for place, value in enumerate(row):
            words[place * bits // 32] |= (value + 2 ** (bits - 1)) << place * bits % 32
        rows.append([word - 2**32 if word >> 31 else word for word in words])
    return torch.tensor(rows, dtype=torch.int32)


def test_zero_points_are_packed_by_outputs(model: Path, tmp_path: Path) -> None:
    done = written(model, tmp_path / "made", scheme="W4A16_ASYM", group_size=32)
    held = tensors_of(done.folder)
    assert held[f"{PRODUCT}.weight_packed"].shape == (128, 256 // 8)
    assert held[f"{PRODUCT}.weight_scale"].shape == (128, 256 // 32)
    assert held[f"{PRODUCT}.weight_zero_point"].shape == (128 // 8, 256 // 32)
    assert held[f"{PRODUCT}.weight_shape"].tolist() == [128, 256]


def test_the_configuration_names_what_stayed(model: Path, tmp_path: Path) -> None:
    done = written(model, tmp_path / "made", scheme="W8A8", ignore=["lm_head", "layers.0.self_attn.q_proj", "re:.*up_"])
    said = json.loads((done.folder / "config.json").read_text())["quantization_config"]
    assert said["ignore"] == [
        "lm_head",
        "model.layers.0.mlp.up_proj",
        "model.layers.0.self_attn.q_proj",
        "model.layers.1.mlp.up_proj",
    ]
    assert said["config_groups"]["group_0"]["input_activations"] == {
        "num_bits": 8, "type": "int", "strategy": "token", "group_size": None, "observer_kwargs": {}, "symmetric": True,
        "dynamic": True, "block_structure": None, "actorder": None, "observer": None,
    }  # fmt: skip
    held = tensors_of(done.folder)
    assert held["model.layers.0.mlp.up_proj.weight"].dtype == torch.float32
    assert held["model.layers.0.mlp.gate_proj.weight"].dtype == torch.int8


def test_a_head_is_quantized_if_nothing_is_ignored(model: Path, tmp_path: Path) -> None:
    done = written(model, tmp_path / "made", scheme="W8A16", ignore=[])
    assert "lm_head.weight_packed" in tensors_of(done.folder)
    assert json.loads((done.folder / "config.json").read_text())["quantization_config"]["ignore"] == []


def test_products_whose_inputs_no_group_divides_stay(model: Path, tmp_path: Path) -> None:
    done = written(model, tmp_path / "made", scheme="W4A16", group_size=256)
    assert (done.products, done.left) == (2, 13)  # down_proj alone has 256 inputs; the head is left too


def test_routers_of_experts_stay(tmp_path: Path) -> None:
    sizes = {**SIZES, "num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 128, "num_hidden_layers": 1}
    done = written(make("qwen3_moe", sizes).folder, tmp_path / "made", scheme="W4A16")
    names = tensors_of(done.folder)
    assert "model.layers.0.mlp.experts.1.down_proj.weight_packed" in names
    assert "model.layers.0.mlp.gate.weight" in names
    said = json.loads((done.folder / "config.json").read_text())["quantization_config"]["ignore"]
    assert said == ["lm_head", "model.layers.0.mlp.gate"]


def test_large_models_come_in_several_files(tmp_path: Path) -> None:
    shards = output.CheckpointShards(tmp_path, most=100)
    shards.add({f"t{each}": torch.full((10,), float(each)) for each in range(5)})
    shards.finish()
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_size": 200}
    assert index["weight_map"]["t4"] == "model-00003-of-00003.safetensors"
    assert {name: each[0].item() for name, each in tensors_of(tmp_path).items()} == {f"t{n}": n for n in range(5)}


# ----------------------------------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"scheme": "W4A61"}, "unknown scheme 'W4A61'; did you mean 'W4A16'"),
        ({"scheme": "W8A8", "group_size": 32}, "has no groups"),
        ({"scheme": "W4A16", "group_size": 24}, "multiple of 16"),
        ({"method": "gptq"}, "needs calibration"),
        ({"act_order": True}, "of method 'gptq'"),
        ({"ignore": ["q_prj"]}, "means no product"),
        ({"ignore": ["re:("]}, "ignore has the pattern '(', which is no regular expression"),
        ({"scheme": "W4A16", "group_size": 512}, "no product of this model"),
    ],
)
def test_what_cannot_be_done(settings: dict[str, Any], says: str, model: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=".") as error:
        written(model, tmp_path / "made", **settings)
    assert says in str(error.value)
    assert list(tmp_path.iterdir()) == []


def test_a_quantized_model_is_no_original(model: Path, tmp_path: Path) -> None:
    done = written(model, tmp_path / "made")
    with pytest.raises(ValueError, match="quantized already; give the original"):
        written(done.folder, tmp_path / "again")


def test_nothing_is_written_over_unless_asked(model: Path, tmp_path: Path) -> None:
    place = tmp_path / "made"
    place.mkdir()
    (place / "mine.txt").write_text("mine")
    with pytest.raises(ValueError, match="is there already"):
        written(model, place)
    with pytest.raises(ValueError, match="is no model, and is not written over"):
        written(model, place, overwrite=True)
    assert (place / "mine.txt").read_text() == "mine"
    shutil.rmtree(place)
    written(model, place)
    written(model, place, scheme="W8A8", overwrite=True)
    assert tensors_of(place)[f"{PRODUCT}.weight"].dtype == torch.int8
    assert list(tmp_path.iterdir()) == [place]


@pytest.mark.parametrize("scheme", ["W4A16", "Q8_0"])
def test_a_model_is_not_written_over_itself(scheme: str, model: Path, tmp_path: Path) -> None:
    """Nor is a folder that it is in: the floats would be gone, and the report would compare the result with itself."""
    own = tmp_path / "own" / "model"
    shutil.copytree(model, own)
    shutil.copyfile(own / "config.json", own.parent / "config.json")
    (tmp_path / "link").symlink_to(own)
    for place in (own, own.parent, tmp_path / "link"):
        with pytest.raises(ValueError, match=r"is where the original is; give another folder"):
            written(own, place, scheme=scheme, overwrite=True)
    assert load_file(own / "model.safetensors").keys() == load_file(model / "model.safetensors").keys()
    assert {each.name for each in tmp_path.iterdir()} == {"own", "link"}


def test_a_gguf_file_is_no_original(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"llama3-bf16.gguf' is a GGUF file; give the original"):
        written(DATA / "gguf" / "llama3-bf16.gguf", tmp_path / "made", scheme="W8A8")


def test_no_room_is_found_out_before_anything_is_written(model: Path, tmp_path: Path) -> None:
    with (
        output.CheckpointWriter(tmp_path / "made") as made,
        pytest.raises(OSError, match="has room for .* will take about"),
    ):
        made.check_space(10**18)


def test_what_fails_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), output.CheckpointWriter(tmp_path / "made") as made:
        (made.folder / "part").touch()
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []


def test_names_are_read_in_any_case() -> None:
    assert schemes.scheme("w4a16-asym", 64) == schemes.Scheme("W4A16_ASYM", 4, 64, symmetric=False)
    assert schemes.scheme("W4A16", -1).group == 0


# --------------------------------------------------------------------------------------------------------- calibration


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("text") / "lines.txt"
    words = [random.Random(each).sample(WORDS, 5) for each in range(40)]
    file.write_text("\n".join(" ".join(each) for each in words) + "\n")
    return file


@pytest.fixture(scope="module")
def readable(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model with the bundled one's tokenizer: its ids beyond the vocabulary are not in the text."""
    folder = tmp_path_factory.mktemp("readable")
    sizes = {**SIZES, "vocab_size": 2048}
    shutil.copytree(make("llama", sizes).folder, folder, dirs_exist_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(BUNDLED_FOLDER / name, folder / name)
    return folder


def error_of_products(hessian: Tensor, want: Tensor, got: Tensor) -> float:
    off = want - got
    return float(((off @ hessian) * off).sum())


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("scheme", ["W4A16", "W4A16_ASYM", "W8A8"])
def test_gptq_keeps_products_better_than_rounding(scheme: str, ordered: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2000, 64, generator=generator) @ torch.randn(64, 64, generator=generator)
    weight, hessian = torch.randn(32, 64, generator=generator), x.t() @ x / len(x)
    how = schemes.scheme(scheme, 32 if scheme.startswith("W4") else None)
    made = gptq(weight, hessian, how, torch.float32, 0.01, ordered)
    plain = rounding.round_to_nearest(weight, how, torch.float32)
    errors = [error_of_products(hessian, weight, rounding.floats(each, how)) for each in (made, plain)]
    assert errors[0] < 0.6 * errors[1]
    assert made.values.dtype == torch.int8


def test_gptq_leaves_inputs_that_are_never_there() -> None:
    hessian = torch.diag(torch.tensor([1.0, 0.0] * 16))
    made = gptq(torch.randn(4, 32), hessian, schemes.scheme("W4A16", 32), torch.float32)
    assert torch.isfinite(made.scales).all()


@pytest.mark.parametrize("settings", [
    {"method": "gptq"}, {"method": "gptq", "act_order": True}, {"method": "awq", "scheme": "W4A16_ASYM"},
])  # fmt: skip
def test_calibrated_files_stand_for_a_model_like_the_original(
    settings: dict[str, Any], readable: Path, text: Path, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    calibration = {"calibration": str(text), "num_samples": 4, "sequence_length": 64}
    done = written(readable, tmp_path / "made", group_size=32, **calibration, **settings)
    assert done.products == 14
    model = AutoModelForCausalLM.from_pretrained(readable, dtype=torch.float32).eval()
    ids = torch.tensor(samples.sequences(text, load_tokenizer(BUNDLED_FOLDER), 1, 64))
    with torch.no_grad():
        want = model(ids).logits
        model.load_state_dict(dequantized(done.folder), strict=False)
        off = (model(ids).logits - want).std() / want.std()
    assert 0 < off < 0.35


def test_one_scale_for_all_activations_is_of_the_largest(readable: Path, text: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="calibration finds.*FP8_DYNAMIC"):
        written(readable, tmp_path / "made", scheme="FP8")
    done = written(readable, tmp_path / "made", scheme="FP8", calibration=str(text), sequence_length=64, num_samples=2)
    held = tensors_of(done.folder)
    assert held[f"{PRODUCT}.weight_scale"].shape == held[f"{PRODUCT}.input_scale"].shape == (1,)
    assert held[f"{PRODUCT}.input_scale"].item() > 0


@pytest.mark.parametrize(
    ("content", "name", "says"),
    [
        ("one", "a.txt", "16 are the least"),
        ("{", "a.jsonl", "not an object of JSON per line"),
        ('{"txt": "a"}', "a.jsonl", "a.jsonl:1 has neither 'text' nor 'messages'"),
        (None, "gone.txt", "is not there"),
    ],
)
def test_text_that_does_not_do(content: str | None, name: str, says: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises((ValueError, OSError), match=".") as error:
        samples.sequences(tmp_path / name, load_tokenizer(BUNDLED_FOLDER), 4, 64)
    assert says in str(error.value)


def test_messages_are_text_as_the_model_sees_it(tmp_path: Path) -> None:
    entry = {"messages": [{"role": "user", "content": "Hello there, how are you?"}]}
    (tmp_path / "a.jsonl").write_text(f"{json.dumps(entry)}\n" * 9)
    tokenizer = load_tokenizer(BUNDLED_FOLDER)
    (first, *_) = samples.sequences(tmp_path / "a.jsonl", tokenizer, 2, 32)
    assert tokenizer.decode(first, skip_special_tokens=False).startswith("<s><|user|>Hello there")
