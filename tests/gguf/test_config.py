"""Configurations that GGUF files stand for, what of them is refused, and where their tensors go."""

import dataclasses
import struct
from pathlib import Path
from typing import Any

import pytest
import torch

from quintet.gguf.architectures import ARCHITECTURES, names_of
from quintet.gguf.config import config
from quintet.gguf.file import read
from quintet.gguf.model import GGUFModel
from quintet.gguf.names import ArchitectureNames, unpermuted_rows, without_expert_number
from quintet.hub.resolve import load_generation_config, load_model_config
from quintet.model_loader.gguf_weights import entries, model_of
from tests.helpers.checkpoints.gguf import Row, header

FOLDER = Path(__file__).parents[1] / "data" / "quantized" / "gguf"
ARCHITECTURE = "general.architecture"
# What transformers' own reading of such files knows; it has no other of ours.
THEIRS = ("gemma2", "gemma3", "gpt2", "llama", "mixtral", "phi3", "qwen2", "qwen2moe", "qwen3", "qwen3moe")
OTHERWISE = {"_model_name_or_path", "n_ctx", "feed_forward_length", "rope_theta", "model_type"}


def changed(name: str, **said: Any) -> GGUFModel:
    """A fixture that says something else; "__" stands for a dot, None takes an entry away."""
    file = read(FOLDER / f"{name}.gguf")
    prefix = str(file.metadata[ARCHITECTURE])
    own = {f"{prefix}.{key.replace('__', '.')}" if key != "architecture" else ARCHITECTURE: said[key] for key in said}
    metadata = {key: value for key, value in {**file.metadata, **own}.items() if value is not None}
    return GGUFModel([dataclasses.replace(file, metadata=metadata)])


@pytest.mark.parametrize("name", THEIRS)
def test_configurations_are_those_that_transformers_reads(name: str) -> None:
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    ours, theirs = vars(load_model_config(FOLDER / f"{name}.gguf")), load_gguf_checkpoint(str(FOLDER / f"{name}.gguf"))
    wanted = {key: value for key, value in theirs["config"].items() if key not in OTHERWISE}
    assert len(wanted) > 4 and {key: ours[key] for key in wanted} == wanted
    if "rope_theta" in theirs["config"]:
        rope = ours["rope_parameters"]
        assert rope.get("full_attention", rope)["rope_theta"] == theirs["config"]["rope_theta"]


# text models that transformers has within a multimodal one alone: tests/e2e/media/test_mmproj.py
WITH_ENCODERS = {"qwen2vl", "qwen3vl", "qwen3vlmoe"}
OTHER_FORMATS = {"whisper"}  # of whisper.cpp: tests/gguf/test_whisper_cpp.py
NOT_HERE = WITH_ENCODERS | OTHER_FORMATS


def test_every_architecture_has_a_fixture() -> None:
    assert {model_of(path).prefix for path in FOLDER.glob("*.gguf")} == set(ARCHITECTURES) - NOT_HERE


# Of gguf's tables: what the configuration is made of, and what no file that the converter writes today holds.
UNREAD = {
    *("rope_freqs", "rope_factors_long", "rope_factors_short", "attn_rot_embd"),  # of positions
    *(
        f"nextn.{name}"
        for name in ("eh_proj", "embed_tokens", "enorm", "hnorm", "shared_head_head", "shared_head_norm")
    ),
}
UNREAD_OF = {
    "bailingmoe2": {"layer_output_norm"},
    "bert": {"output_norm", "cls", "cls.output"},
    "jina-bert-v2": {"cls"},
    "jina-bert-v3": {"output_norm"},
    "modern-bert": {"cls", "cls.output", "cls.norm"},
    "nomic-bert": {"position_embd", "output_norm"},
    "nomic-bert-moe": {"output_norm"},
    "chatglm": {"attn_q", "attn_k", "attn_v"},
    "deepseek2": {"attn_k", "attn_v"},
    "lfm2": {"dense_2"},
    "qwen3next": {"ssm_in"},  # of the first files: see test_gguf.py
    "plamo2": {"attn_q", "attn_k", "ffn_gate"},
    "mpt": {"ffn", "attn_q_norm", "attn_k_norm", "position_embd"},
    "phi2": {"ffn_norm"},
}


@pytest.mark.parametrize("architecture", sorted(set(ARCHITECTURES) - NOT_HERE))
def test_every_tensor_of_ggufs_tables_has_a_module(architecture: str) -> None:
    """gguf lists the tensors of each architecture, as llama.cpp's converter calls them."""
    import gguf

    models = [each for path in FOLDER.glob("*.gguf") if (each := model_of(path)).prefix == architecture]
    kind = next(each for each, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    listed = {gguf.TENSOR_NAMES[each].format(bid=0) for each in gguf.MODEL_TENSORS[kind]}
    assert models and len(listed) > 5
    unknown = {each for each in listed if not any(_is_known(names_of(model), each) for model in models)}
    assert {each.removeprefix("blk.0.") for each in unknown} <= UNREAD | UNREAD_OF.get(architecture, set())


def _is_known(names: ArchitectureNames, base: str) -> bool:
    tensors = (base, f"{base}.weight", f"{base}.bias")
    return bool(names.modules(base) or names.joined_module(base) or any(map(names.computed_tensors, tensors)))


def test_layers_that_draft_are_left_out() -> None:
    """They stand behind the others, and are counted with them."""
    found = config(changed("glm4moe", block_count=3, nextn_predict_layers=1))
    assert found["num_hidden_layers"] == 2 == config(changed("glm4moe"))["num_hidden_layers"]


def test_llama_3s_frequencies_are_the_files() -> None:
    rope = load_model_config(FOLDER / "llama3-bf16.gguf").rope_parameters
    assert rope["rope_type"] == "longrope" and rope["attention_factor"] == 1.0
    assert rope["long_factor"] == rope["short_factor"] and max(rope["long_factor"]) == 8.0


def test_overrides_replace_entries_by_transformers_names() -> None:
    found = load_model_config(FOLDER / "llama.gguf", {"max_position_embeddings": 32, "rope_theta": 5e5})
    assert found.max_position_embeddings == 32 and found.rope_parameters["rope_theta"] == 5e5
    with pytest.raises(ValueError, match="max_positions"):
        load_model_config(FOLDER / "llama.gguf", {"max_positions": 32})


def test_the_type_of_activations_is_that_of_floats_or_bfloat16() -> None:
    said = {name: load_model_config(FOLDER / f"{name}.gguf").dtype for name in ("llama", "llama-f16", "llama3-bf16")}
    assert said == {"llama": torch.bfloat16, "llama-f16": torch.float16, "llama3-bf16": torch.bfloat16}


def test_answers_end_with_what_the_file_says(tmp_path: Path) -> None:
    said = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": ["a", "b", "<|im_end|>"]}
    said |= {"tokenizer.ggml.token_type": [1, 3, 3], "tokenizer.ggml.eos_token_id": 1, "general.sampling.temp": 0.5}
    metadata = {**read(FOLDER / "llama.gguf").metadata, **said}
    path, table = tmp_path / "said.gguf", [Row("token_embd.weight", (32, 3), 0, 0)]
    path.write_bytes(header(metadata, table) + bytes(32 * 3 * 4))
    assert load_model_config(path).eos_token_id == [1, 2]
    assert load_generation_config(path) == {"temperature": 0.5, "eos_token_id": [1, 2]}
    assert load_generation_config(FOLDER / "llama.gguf")["eos_token_id"] == []


@pytest.mark.parametrize(
    ("name", "said", "why"),
    [
        ("llama", {"architecture": "dbrx"}, "'dbrx', which quintet does not read from GGUF; it reads afmoe, "),
        ("llama", {"architecture": None}, "'None'"),
        ("llama", {"architecture": "qwen4"}, r"'qwen4', which .* from GGUF \(the nearest is 'qwen3'\)"),
        (
            "llama",
            {"architecture": "clip"},
            r"encoder of images or audio of a model \(mmproj\).*give the model's own file, .* this one as mmproj",
        ),
        ("llama", {"embedding_length": None}, "llama.embedding_length is None"),
        ("kimi-linear", {"kda__head_dim": None}, "kimi-linear.kda.head_dim is None"),
        ("rwkv7", {"attention__gate_lora_rank": 0}, "gate_lora_rank is 0, not a whole number from 1"),
        ("llama", {"block_count": -1}, "block_count is -1, not a whole number from 1"),
        ("llama", {"attention__head_count": "4"}, "head_count is '4', not a whole number"),
        ("llama", {"attention__layer_norm_rms_epsilon": float("nan")}, "not a number"),
        ("llama", {"rope__dimension_count": 4}, "4 of 8 features are turned"),
        ("llama", {"rope__scaling__type": "ntk"}, "'ntk'"),
        ("llama", {"attention__value_length": 16}, "different lengths"),
        ("llama3-bf16", {"rope__dimension_count": 8}, "8 of 16"),
        ("phi3", {"rope__dimension_count": 4}, "rope_factors_long.weight is .4. of F32, not .2."),
        ("mpt", {"attention__max_alibi_bias": 4.0}, "attention.max_alibi_bias is not 8"),
        ("gemma3n", {"altup__num_inputs": 3}, "altup.num_inputs is 3, and files of 4 are read"),
        ("deepseek2", {"attention__key_length_mla": 4}, "keys have 4 features, and 4 of them are turned"),
        ("mistral3", {"rope__scaling__type": "none"}, "positions are of type default, and Ministral 3's are of yarn"),
        ("granitemoe", {"expert_shared_feed_forward_length": 8}, "shared experts beside the others"),
        ("cohere2", {"attention__sliding_window_pattern": "all"}, "sliding_window_pattern is 'all', no list"),
        ("stablelm", {"rope__dimension_count": "half"}, "dimension_count is 'half', not a whole number"),
        ("llama", {"attention__sliding_window": -8}, "sliding_window is -8, not a whole number"),
        ("gemma3", {"attention__sliding_window": "many"}, "sliding_window is 'many', not a whole number"),
    ],
)
def test_what_is_not_understood_is_refused_by_name(name: str, said: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why) as error:
        config(changed(name, **said))
    assert f"{name}.gguf" in str(error.value) and "\n" not in str(error.value)


def test_absurd_numbers_are_refused_before_a_model_is_made(tmp_path: Path) -> None:
    llama = {key: value for key, value in read(FOLDER / "llama.gguf").metadata.items() if key.startswith("llama.")}
    said = {ARCHITECTURE: "llama", **llama, "llama.block_count": 2**31}
    path = tmp_path / "many.gguf"
    path.write_bytes(header(said, [Row("token_embd.weight", (32, 64), 0, 0)]) + bytes(64 * 32 * 4))
    with pytest.raises(ValueError, match="num_hidden_layers is 2147483648, not a whole number from 1 to 4096"):
        load_model_config(path)


def test_a_file_without_a_vocabulary_is_no_model(tmp_path: Path) -> None:
    path = tmp_path / "projector.gguf"
    path.write_bytes(header({**read(FOLDER / "llama.gguf").metadata}))
    with pytest.raises(ValueError, match="holds no tensor token_embd.weight"):
        load_model_config(path)


def test_rows_of_q_and_k_are_put_back() -> None:
    """llama.cpp's converter: reshape(heads, 2, head_dim / 2).swapaxes(1, 2)."""
    rows = torch.arange(24)
    stored = rows.reshape(3, 2, 4).swapaxes(1, 2).reshape(24)
    assert torch.equal(stored[unpermuted_rows(24, 8)], rows)


@pytest.mark.slow
def test_a_file_of_more_matrices_than_any_model_has_is_refused(tmp_path: Path) -> None:
    """Each expert takes hundreds of bytes for its byte of the file."""
    path = tmp_path / "crowd.gguf"
    rows = [Row(f"blk.{each}.ffn_up_exps.weight", (1, 1, 2**12), 24, each * 2**12) for each in range(65)]
    path.write_bytes(header({ARCHITECTURE: "llama"}, rows) + bytes(65 * 2**12))
    with pytest.raises(ValueError, match=r"blk\.64\.ffn_up_exps.*more than 262144 matrices, and no model has; fetch"):
        list(entries(path))


def test_experts_that_are_no_stack_are_refused(tmp_path: Path) -> None:
    said = {key: value for key, value in read(FOLDER / "qwen3moe.gguf").metadata.items() if key.startswith("qwen3moe.")}
    rows = [Row("token_embd.weight", (4, 1), 0, 0), Row("blk.0.ffn_gate_exps.weight", (8,), 0, 32)]
    path = tmp_path / "flat.gguf"
    path.write_bytes(header({ARCHITECTURE: "qwen3moe", **said}, rows) + bytes(64))
    with pytest.raises(ValueError, match=r"blk\.0\.ffn_gate_exps\.weight is \[8\], and it is to have 3 axes; fetch it"):
        load_model_config(path)


def test_a_bias_of_experts_keeps_its_name(tmp_path: Path) -> None:
    """No model here has a place for it, and what has no place is refused by its name."""
    path = tmp_path / "biased.gguf"
    path.write_bytes(header({ARCHITECTURE: "llama"}, [Row("blk.0.ffn_down_exps.bias", (4, 2), 0, 0)]) + bytes(32))
    assert list(dict(entries(path))) == ["blk.0.ffn_down_exps.bias"]


def test_names_of_experts() -> None:
    names = names_of(model_of(FOLDER / "llama.gguf"))
    assert names.module("blk.3.ffn_up_exps") == "model.layers.3.mlp.experts.up_proj"
    assert names.module("blk.3.ffn_up.7") == "model.layers.3.mlp.experts.7.up_proj"  # Mixtral's first files
    assert names.module("blk.3.ssm_out") is names.module("blk.x.ffn_up") is names.module("v.blk.0.ffn_up") is None
    assert without_expert_number("model.layers.3.mlp.experts.7.up_proj") == "model.layers.3.mlp.experts.up_proj"


def test_tensors_that_no_module_has_keep_their_names(tmp_path: Path) -> None:
    path = tmp_path / "more.gguf"
    rows = [Row("blk.0.ssm_out.weight", (4,), 0, 0), Row("token_embd.weight", (4, 2), 0, 32)]
    path.write_bytes(header({ARCHITECTURE: "llama"}, rows) + struct.pack("<16f", *range(16)))
    found = dict(entries(path))
    assert list(found) == ["blk.0.ssm_out.weight", "model.embed_tokens.weight"]
    assert found["model.embed_tokens.weight"].tensor().tolist() == [[8.0, 9.0, 10.0, 11.0], [12.0, 13.0, 14.0, 15.0]]


def test_tensors_of_files_aligned_to_single_bytes_are_read(tmp_path: Path) -> None:
    path = tmp_path / "odd.gguf"
    said = {ARCHITECTURE: "llama", "general.alignment": 1, "x": "odd"}
    path.write_bytes(_unpadded(said) + struct.pack("<4f", 1, 2, 3, 4))
    assert dict(entries(path))["model.embed_tokens.weight"].tensor().tolist() == [[1, 2, 3, 4]]


def _unpadded(said: dict[str, Any]) -> bytes:
    padded = header(said, [Row("token_embd.weight", (4, 1), 0, 0)])
    return padded[: padded.rindex(b"token_embd.weight") + 17 + 4 + 16 + 4 + 8]
