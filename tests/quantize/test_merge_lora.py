"""Checkpoints with a LoRA adapter merged: their weights are PEFT's, and transformers computes the adapter's logits."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, PreTrainedModel

from quintet.cli.main import main
from quintet.lora.adapter import AdapterError, write_adapter
from quintet.quantize.lora.merge import merge_lora
from tests.helpers.checkpoints.lora import VOCABULARY, causal_lm, randomize, sequence_classifier

IDS = torch.arange(VOCABULARY - 10)[None]
ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def gpt2() -> GPT2LMHeadModel:
    """Random weights; attn.c_proj is square, the others are not."""
    torch.manual_seed(1)
    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=32,
        n_embd=16,
        n_layer=2,
        n_head=2,
        bos_token_id=0,
        eos_token_id=0,
        initializer_range=0.3,
    )
    return GPT2LMHeadModel(config).eval()


def saved(folder: Path, model: PreTrainedModel, **settings: Any) -> Path:
    """The model and a trained adapter of it, in folders of their own."""
    model.save_pretrained(folder / "base", max_shard_size="5KB")
    adapted = get_peft_model(model, LoraConfig(**{"r": 3, "lora_alpha": 5, **settings}))
    randomize(adapted).save_pretrained(folder / "adapter")
    return folder


def with_adapter(folder: Path, dtype: torch.dtype = torch.float32) -> PeftModel:
    base = AutoModelForCausalLM.from_pretrained(folder / "base", dtype=dtype)
    return PeftModel.from_pretrained(base, folder / "adapter").eval()


def merge(folder: Path, **settings: Any) -> dict[str, Tensor]:
    """Tensors of the new checkpoint."""
    merge_lora(str(folder / "base"), folder / "adapter", folder / "out", progress=False, **settings)
    return tensors_of(folder / "out")


def tensors_of(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def check_logits(folder: Path) -> None:
    """Those of the base with the adapter beside it, and not those of the base."""
    adapted = with_adapter(folder)
    with torch.inference_mode():
        wanted = adapted(IDS).logits
        with adapted.disable_adapter():
            assert (adapted(IDS).logits - wanted).abs().max() > 0.05
        merged = AutoModelForCausalLM.from_pretrained(folder / "out", dtype=torch.float32).eval()(IDS).logits
    torch.testing.assert_close(merged, wanted, rtol=1e-4, atol=1e-4)


def check_tensors(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    wanted = with_adapter(folder).merge_and_unload().state_dict()
    assert set(tensors) == set(tensors_of(folder / "base"))
    for name, tensor in tensors.items():
        torch.testing.assert_close(tensor, wanted[name], rtol=1e-5, atol=1e-5)


SORTS: dict[str, dict[str, Any]] = {
    "all layers": {"target_modules": ALL},
    "rslora and patterns": {"target_modules": ALL, "use_rslora": True, "rank_pattern": {"q_proj": 5, ".*mlp.*": 2}},
    "dora": {"target_modules": ALL, "use_dora": True},
    "embedding": {"target_modules": ["embed_tokens", "v_proj"]},
    "embedding dora": {"target_modules": ["embed_tokens"], "use_dora": True},
    "head": {"target_modules": ["lm_head", "v_proj"]},
    "lora bias": {"target_modules": ["q_proj", "down_proj"], "lora_bias": True},
    "biases": {"target_modules": ["q_proj"], "bias": "all"},
    "biases of lora": {"target_modules": ["q_proj", "down_proj"], "bias": "lora_only"},
    "all at once": {"target_modules": ALL, "use_dora": True, "bias": "all", "modules_to_save": ["norm", "lm_head"]},
    "whole tensors": {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens", "lm_head"]},
    "whole norms": {"target_modules": ["q_proj"], "modules_to_save": ["norm"]},
}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("sort", SORTS)
def test_weights_and_logits_are_those_of_the_adapter(sort: str, tmp_path: Path) -> None:
    tensors = merge(saved(tmp_path, causal_lm(), **SORTS[sort]))
    check_tensors(tmp_path, tensors)
    check_logits(tmp_path)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("dora", [False, True])
def test_bfloat16_is_rounded_once(dora: bool, tmp_path: Path) -> None:
    """PEFT rounds the change, then the sum: ours are the exact sum's nearest, PEFT's may be the next to it."""
    saved(tmp_path, causal_lm().to(torch.bfloat16), target_modules=ALL, use_dora=dora)
    tensors, exact = merge(tmp_path), with_adapter(tmp_path).merge_and_unload().state_dict()
    pefts = with_adapter(tmp_path, torch.bfloat16).merge_and_unload().state_dict()
    for name, tensor in tensors.items():
        assert tensor.dtype == torch.bfloat16
        torch.testing.assert_close(tensor.float(), exact[name], rtol=2**-8, atol=1e-6)
        torch.testing.assert_close(tensor, pefts[name], rtol=2**-5, atol=2**-7)


def test_the_files_are_a_models(tmp_path: Path) -> None:
    saved(tmp_path, causal_lm(), target_modules=ALL)
    base, out = tmp_path / "base", tmp_path / "out"
    (base / "tokenizer.json").write_text('{"a": 1}')
    (base / "adapter_config.json").write_text("{}")  # with it, transformers would look for an adapter
    tensors = merge(tmp_path)
    assert len(list(base.glob("*.safetensors"))) > 1 and set(tensors) == set(tensors_of(base))
    names = {file.name for file in out.iterdir()}
    assert names == {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json"}
    assert json.loads((out / "config.json").read_text()) == json.loads((base / "config.json").read_text())
    untouched = {"model.norm.weight", "lm_head.weight", "model.embed_tokens.weight"}
    before = tensors_of(base)
    assert all(torch.equal(before[name], tensors[name]) == (name in untouched) for name in tensors if "bias" not in name
               and "norm" not in name)  # fmt: skip


# ---------------------------------------------------------------------------------------------------------------- gpt2


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("bare", [False, True])
@pytest.mark.parametrize("dora", [False, True])
def test_conv1d_weights_are_transposed(dora: bool, bare: bool, tmp_path: Path) -> None:
    """Also in checkpoints whose names lack `transformer.`, as GPT-2's own do."""
    saved(tmp_path, gpt2(), target_modules=["c_attn", "c_proj", "c_fc"], use_dora=dora, fan_in_fan_out=True)
    if bare:
        tensors = tensors_of(tmp_path / "base")
        for file in (tmp_path / "base").glob("*.safetensors*"):
            file.unlink()
        renamed = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
        save_file(renamed, tmp_path / "base" / "model.safetensors", metadata={"format": "pt"})
    assert any(name.startswith("h.0.") for name in merge(tmp_path)) == bare
    check_logits(tmp_path)


# --------------------------------------------------------------------------------------------------------- tied heads


def tied_llama() -> PreTrainedModel:
    model = causal_lm()
    model.config.tie_word_embeddings = True
    model.lm_head.weight = model.model.embed_tokens.weight
    return model


TIED: dict[str, dict[str, Any]] = {
    "embedding": {"target_modules": ["embed_tokens"]},
    "head": {"target_modules": ["lm_head"]},
    "both": {"target_modules": ["embed_tokens", "lm_head"]},
    "whole embedding": {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]},
    "whole head": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
    "neither": {"target_modules": ["q_proj"]},
}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("sort", TIED)
def test_a_tied_head_is_untied_where_one_of_the_two_changes(sort: str, tmp_path: Path) -> None:
    """The adapter leaves the other as it is."""
    tensors = merge(saved(tmp_path, tied_llama(), **TIED[sort]))
    untied = sort != "neither"
    assert ("lm_head.weight" in tensors) == untied
    assert json.loads((tmp_path / "out" / "config.json").read_text())["tie_word_embeddings"] == (not untied)
    check_logits(tmp_path)


def tie(folder: Path, **tensors: Tensor) -> Path:
    """A tied model, and an adapter with whole tensors."""
    saved(folder, tied_llama(), target_modules=["q_proj"])
    file = folder / "adapter" / "adapter_model.safetensors"
    names = {"embed": "model.embed_tokens.weight", "head": "lm_head.weight"}
    save_file(load_file(file) | {f"base_model.model.{names[name]}": each for name, each in tensors.items()}, file)
    return folder


def test_a_head_that_equals_the_embedding_stays_tied(tmp_path: Path) -> None:
    table = torch.randn(VOCABULARY, 16)
    tensors = merge(tie(tmp_path, embed=table, head=table.clone()))
    assert "lm_head.weight" not in tensors and torch.equal(tensors["model.embed_tokens.weight"], table)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["tie_word_embeddings"]


@pytest.mark.parametrize("with_head", [False, True])
def test_a_larger_vocabulary_comes_with_its_tokenizer(with_head: bool, tmp_path: Path) -> None:
    table = torch.randn(VOCABULARY + 2, 16)
    tie(tmp_path, embed=table, **({"head": table * 2} if with_head else {}))
    (tmp_path / "base" / "tokenizer.json").write_text("old")
    (tmp_path / "adapter" / "tokenizer.json").write_text("new")
    tensors, config = merge(tmp_path), json.loads((tmp_path / "out" / "config.json").read_text())
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "new"
    assert torch.equal(tensors["model.embed_tokens.weight"], table)
    assert (config["vocab_size"], config["tie_word_embeddings"]) == (VOCABULARY + 2, not with_head)
    assert ("lm_head.weight" in tensors) == with_head
    logits = AutoModelForCausalLM.from_pretrained(tmp_path / "out")(IDS).logits
    assert logits.shape == (1, IDS.shape[1], VOCABULARY + 2)


# ------------------------------------------------------------------------------------------------------------ refusals


def refusal(folder: Path) -> str:
    with pytest.raises(ValueError) as caught:
        merge(folder)
    assert not (folder / "out").exists() and not list(folder.glob(".out*"))
    return str(caught.value)


def adapter_of(folder: Path, tensors: Mapping[str, Tensor], **entries: Any) -> Path:
    """A tiny Llama, and an adapter with these tensors."""
    causal_lm().save_pretrained(folder / "base")
    write_adapter(folder / "adapter", {"peft_type": "LORA", "r": 2, **entries}, tensors)
    return folder


def pair(path: str, outputs: int = 16, inputs: int = 16) -> dict[str, Tensor]:
    return {
        f"base_model.model.{path}.lora_A.weight": torch.ones(2, inputs),
        f"base_model.model.{path}.lora_B.weight": torch.ones(outputs, 2),
    }


def test_modules_that_no_tensor_takes_are_named(tmp_path: Path) -> None:
    layer = "model.layers.0.self_attn"
    adapter_of(tmp_path, {**pair(f"{layer}.q_proj"), **pair(f"{layer}.qkv_proj"), **pair("model.layers.7.mlp.up_proj")})
    message = refusal(tmp_path)
    assert f"{layer}.qkv_proj.weight" in message and "model.layers.7.mlp.up_proj.weight" in message
    assert f"{layer}.k_proj.weight" in message  # what is there


def test_a_head_that_the_base_lacks_is_named(tmp_path: Path) -> None:
    saved(tmp_path, sequence_classifier(), task_type="SEQ_CLS", target_modules=["q_proj"])
    shutil.rmtree(tmp_path / "base")
    causal_lm().save_pretrained(tmp_path / "base")
    message = refusal(tmp_path)
    assert "score.weight" in message and "with the head" in message


def test_the_head_of_a_classifier_is_merged(tmp_path: Path) -> None:
    saved(tmp_path, sequence_classifier(), task_type="SEQ_CLS", target_modules=["q_proj"])
    score = load_file(tmp_path / "adapter" / "adapter_model.safetensors")["base_model.model.score.weight"]
    assert torch.equal(merge(tmp_path)["score.weight"], score)


@pytest.mark.parametrize(
    ("tensors", "entries", "words"),
    [
        (pair("model.layers.0.self_attn.q_proj", 12), {}, ["q_proj.weight", "[12, 16]", "[16, 16]"]),
        (pair("model.layers.0.mlp.up_proj", 16, 24), {}, ["up_proj.weight", "[16, 24]", "[24, 16]"]),
        (
            pair("lm_head", VOCABULARY) | {"base_model.model.lm_head.lora_B.bias": torch.ones(VOCABULARY)},
            {"lora_bias": True}, ["lm_head.bias"],
        ),
        (pair("model.norm", 16, 1), {}, ["model.norm.weight", "[16, 1]", "[16]"]),
        (
            pair("lm_head", VOCABULARY) | {"model.norm.weight": torch.ones(15)}, {},
            ["model.norm.weight", "[15]", "[16]"],
        ),
        (
            pair("lm_head", 42)
            | {"lm_head.weight": torch.ones(42, 16), "model.embed_tokens.weight": torch.ones(43, 16)},
            {}, ["42", "43", "rows"],
        ),
    ],
)  # fmt: skip
def test_shapes_that_do_not_fit_are_named(
    tensors: dict[str, Tensor], entries: dict[str, Any], words: list[str], tmp_path: Path
) -> None:
    message = refusal(adapter_of(tmp_path, tensors, **entries))
    assert [word for word in words if word not in message] == []


def test_numbers_beyond_the_type_are_refused(tmp_path: Path) -> None:
    tensors = {name: tensor * 1e4 for name, tensor in pair("model.layers.0.self_attn.q_proj").items()}
    adapter_of(tmp_path, tensors)
    causal_lm().half().save_pretrained(tmp_path / "base")
    message = refusal(tmp_path)
    assert "model.layers.0.self_attn.q_proj.weight" in message and "bfloat16" in message


def edit(folder: Path, **entries: Any) -> None:
    file = folder / "base" / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **entries}))


def test_a_quantized_base_is_refused(tmp_path: Path) -> None:
    adapter_of(tmp_path, pair("model.layers.0.self_attn.q_proj"))
    edit(tmp_path, quantization_config={"quant_method": "gptq", "bits": 4, "group_size": 8})
    assert "is quantized" in refusal(tmp_path)


def test_a_weight_of_integers_is_refused(tmp_path: Path) -> None:
    adapter_of(tmp_path, pair("model.layers.0.self_attn.q_proj"))
    tensors = tensors_of(tmp_path / "base")
    tensors["model.layers.0.self_attn.q_proj.weight"] = torch.ones(16, 16, dtype=torch.int8)
    save_file(tensors, tmp_path / "base" / "model.safetensors")
    message = refusal(tmp_path)
    assert "q_proj.weight" in message and "int8" in message


def test_fused_experts_are_refused(tmp_path: Path) -> None:
    adapter_of(tmp_path, pair("model.layers.0.mlp.experts.0.gate_proj"))
    fused = "model.layers.0.mlp.experts.gate_up_proj"
    save_file(tensors_of(tmp_path / "base") | {fused: torch.ones(2, 8, 16)}, tmp_path / "base" / "model.safetensors")
    message = refusal(tmp_path)
    assert fused in message and "experts.0.gate_proj" in message and "fused" in message


def test_a_folder_that_is_there_is_not_written_over(tmp_path: Path) -> None:
    adapter_of(tmp_path, pair("model.layers.0.self_attn.q_proj"))
    first = merge(tmp_path)
    with pytest.raises(ValueError, match="is there already"):
        merge(tmp_path)
    again = merge(tmp_path, overwrite=True)
    assert all(torch.equal(first[name], again[name]) for name in first)
    with pytest.raises(ValueError, match="where the original is"):
        merge_lora(str(tmp_path / "base"), tmp_path / "adapter", tmp_path / "base", overwrite=True, progress=False)


# ------------------------------------------------------------------------------------------------------------- command


def test_the_command_writes_the_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved(tmp_path, causal_lm(), target_modules=ALL)
    words = ["merge-lora", *(str(tmp_path / name) for name in ("base", "adapter", "out"))]
    assert main(words) == 0
    assert "14 modules merged" in capsys.readouterr().out
    check_logits(tmp_path)
    assert main(words) == 1 and "is there already" in capsys.readouterr().err


def test_the_command_names_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    adapter_of(tmp_path, pair("model.layers.9.mlp.up_proj"))
    assert main(["merge-lora", *(str(tmp_path / name) for name in ("base", "adapter", "out"))]) == 1
    error = capsys.readouterr().err
    assert "model.layers.9.mlp.up_proj.weight" in error and "Traceback" not in error
    assert isinstance(AdapterError("a", "b"), ValueError)
