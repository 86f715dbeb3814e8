"""Mistral's own format: params.json, consolidated files and tekken.json give what transformers' layout gives."""

import base64
import json
import re
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from torch import Tensor

from quintet.config import EngineConfig, Environment
from quintet.hub.resolve import resolve_tokenizer
from quintet.model_loader.mistral_format import config_of, transformers_name
from quintet.tokenizers.tokenizer import load_tokenizer
from quintet_tools.checkpoints.tiny import FAMILIES, Tiny, variant
from tests.helpers.platforms.engines import answers, engine

BACK = (  # transformers' names -> Mistral's
    ("model.embed_tokens.", "tok_embeddings."), ("model.norm.", "norm."), ("lm_head.", "output."),
    ("model.layers.", "layers."), (".input_layernorm.", ".attention_norm."),
    (".post_attention_layernorm.", ".ffn_norm."), (".self_attn.q_proj.", ".attention.wq."),
    (".self_attn.k_proj.", ".attention.wk."), (".self_attn.v_proj.", ".attention.wv."),
    (".self_attn.o_proj.", ".attention.wo."), (".mlp.gate_proj.", ".feed_forward.w1."),
    (".mlp.down_proj.", ".feed_forward.w2."), (".mlp.up_proj.", ".feed_forward.w3."),
    (".block_sparse_moe.", ".feed_forward."),
)  # fmt: skip


def paired(weight: Tensor, heads: int) -> Tensor:
    """Features of each head in Mistral's order: 0, half, 1, half + 1, ..."""
    half = weight.shape[0] // heads // 2
    order = [head * 2 * half + at for head in range(heads) for pair in range(half) for at in (pair, half + pair)]
    return weight[order].contiguous()


def in_their_format(made: Tiny, folder: Path) -> Tiny:
    config, tensors = made.config, {}
    for name, weight in load_file(made.folder / "model.safetensors").items():
        if ".q_proj." in name:
            weight = paired(weight, config.num_attention_heads)
        if ".k_proj." in name:
            weight = paired(weight, config.num_key_value_heads)
        theirs = name
        for ours, their in BACK:
            theirs = theirs.replace(ours, their)
        assert transformers_name(theirs) == name
        tensors[theirs] = weight
    save_file(tensors, folder / "consolidated.safetensors")
    said = {
        "dim": config.hidden_size, "n_layers": config.num_hidden_layers, "n_heads": config.num_attention_heads,
        "n_kv_heads": config.num_key_value_heads, "head_dim": config.head_dim, "hidden_dim": config.intermediate_size,
        "norm_eps": config.rms_norm_eps, "vocab_size": config.vocab_size, "max_seq_len": 256,
        "model_type": "transformer",
        "rope_theta": config.rope_parameters["rope_theta"], "sliding_window": config.sliding_window, "moe": None,
    }  # fmt: skip
    if config.model_type == "mixtral":
        said["moe"] = {"num_experts": config.num_local_experts, "num_experts_per_tok": config.num_experts_per_tok}
    (folder / "params.json").write_text(json.dumps(said))
    return Tiny(folder, config, made.reference)


@pytest.mark.parametrize("family", ["mistral", "mixtral"])
def test_a_model_in_mistrals_format_answers_as_in_transformers(family: str, tmp_path: Path) -> None:
    made = variant(family, next(iter(FAMILIES[family])))
    theirs = in_their_format(made, tmp_path)
    want = answers(engine(made), 6)
    assert answers(engine(theirs), 6) == want
    named = {"config_format": "mistral", "load_format": "mistral"}
    (tmp_path / "config.json").write_text("{}")  # which then does not count
    assert answers(engine(theirs, **named), 6) == want


@pytest.mark.parametrize(
    ("entries", "says"),
    [
        ({"multimodal": {"whisper": 1}}, "'multimodal' is not there: quintet computes Mistral's dense models"),
        ({"quantization": {"qformat_weight": "fp8_e4m3"}}, "'quantization' is not there"),
        ({"moe": {"num_experts": 4, "num_shared_experts": 1}}, "'num_shared_experts' is not there"),
        ({"moe": 3}, "moe is no object"),
        ({"sliding_window": [None, 4096]}, "sliding_window differs from layer to layer"),
        ({"model_type": "mamba"}, "model_type is 'mamba'"),
        ({"n_layer": 3}, "did you mean 'n_layers'"),
    ],
)
def test_what_is_not_computed_is_refused(entries: dict[str, Any], says: str, tmp_path: Path) -> None:
    (tmp_path / "params.json").write_text(json.dumps({"dim": 8, "n_heads": 2, **entries}))
    with pytest.raises(ValueError, match=re.escape(says)):
        config_of(tmp_path / "params.json")


def test_yarn_has_transformers_names(tmp_path: Path) -> None:
    yarn = {"factor": 4.0, "original_max_position_embeddings": 16, "beta": 32.0, "alpha": 1.0, "apply_scale": False}
    (tmp_path / "params.json").write_text(json.dumps({"n_heads": 2, "rope_theta": 5.0, "yarn": yarn}))
    config = config_of(tmp_path / "params.json")
    assert config["rope_parameters"] == {
        "rope_type": "yarn", "rope_theta": 5.0, "factor": 4.0, "original_max_position_embeddings": 16,
        "beta_fast": 32.0, "beta_slow": 1.0, "attention_factor": 1.0,
    }  # fmt: skip
    assert "rope_theta" not in config and config["num_key_value_heads"] == 2


# --------------------------------------------------------------------------------------------------------- tekken.json

SPECIAL = ("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]",
           "[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]", "[PREFIX]", "[MIDDLE]",
           "[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]")  # fmt: skip


@pytest.fixture
def tekken(tmp_path: Path) -> Path:
    """Every byte, and two words."""
    pieces = [bytes([byte]) for byte in range(256)] + [b"he", b"ll", b"hell", b"hello"]
    vocab = [
        {"rank": rank, "token_bytes": base64.b64encode(piece).decode(), "token_str": None}
        for rank, piece in enumerate(pieces)
    ]
    special = [{"rank": rank, "token_str": name, "is_control": True} for rank, name in enumerate(SPECIAL)]
    size = len(pieces) + len(SPECIAL)
    config = {
        "pattern": r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|[^\s\p{L}\p{N}]+|\s+", "num_vocab_tokens": len(pieces),
        "default_vocab_size": size, "default_num_special_tokens": len(SPECIAL), "version": "v7",
    }  # fmt: skip
    (tmp_path / "tekken.json").write_text(json.dumps({"config": config, "vocab": vocab, "special_tokens": special}))
    return tmp_path


def test_tekkens_tokens_are_read(tekken: Path) -> None:
    first = len(SPECIAL)
    for path in (tekken, tekken / "tekken.json"):
        tokenizer = load_tokenizer(path)
        assert tokenizer.encode("hello", add_special_tokens=False) == [first + 259]
        text = "hell, h\u00e9llo! \U0001f600 12"
        assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=True) == text
        assert tokenizer.bos_token == "<s>" and tokenizer.eos_ids == (2,)
    config = EngineConfig(tokenizer_mode="mistral")
    assert resolve_tokenizer(config, tekken, Environment()) == tekken / "tekken.json"
    with pytest.raises(FileNotFoundError, match=r"tokenizer_mode='mistral', and .* has no tekken.json"):
        resolve_tokenizer(config, tekken.parent, Environment())


def test_tokens_are_mistral_commons_own(tekken: Path) -> None:
    pytest.importorskip("mistral_common")
    from mistral_common.tokens.tokenizers.tekken import Tekkenizer

    theirs, ours = Tekkenizer.from_file(tekken / "tekken.json"), load_tokenizer(tekken)
    for text in ("hello", "hell no", "a  b\n\nc 123", "\u00e9\u4e2d\U0001f600"):
        assert ours.encode(text, add_special_tokens=False) == theirs.encode(text, bos=False, eos=False)
    assert ours.chat_template and "[INST]" in ours.templates


def test_a_damaged_tekken_is_refused(tekken: Path) -> None:
    for content in ("", "{}", "[1]", json.dumps({"config": {}, "vocab": [{"rank": 0}]})):
        (tekken / "tekken.json").write_text(content)
        with pytest.raises(ValueError, match=r"tekken.json cannot be read \(.*; fetch it again"):
            load_tokenizer(tekken)
