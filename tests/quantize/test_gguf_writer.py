"""GGUF files that we write: blocks, names, metadata and tokens, as the package gguf and transformers read them."""

import math
import shutil
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from tokenizers import Regex, Tokenizer, pre_tokenizers
from tokenizers.models import BPE
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

import quintet
from quintet.hub.resolve import load_model_config
from quintet.quantize import ggml_blocks as ggml
from quintet.quantize import gguf_tokenizer as gguf_tokens
from quintet.quantize.config import QuantizeConfig
from quintet.quantize.gguf_presets import PRESETS
from quintet.quantize.gguf_writer import _divisors
from quintet.quantize.quantize import QuantizeResult, quantize
from quintet_tools.checkpoints.tiny import PLAIN, make

BUNDLED_FOLDER = Path(quintet.__file__).parent / "bundled"
SIZES = {
    **PLAIN, "vocab_size": 2048, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "num_hidden_layers": 2,
}  # fmt: skip
KINDS = gguf.GGMLQuantizationType


def written(model: str | Path, place: Path, scheme: str, **settings: Any) -> QuantizeResult:
    return quantize(str(model), QuantizeConfig(output=str(place), scheme=scheme, **settings), progress=False)


def original(family: str, folder: Path, **settings: Any) -> Path:
    """A random model with the bundled one's tokenizer."""
    shutil.copytree(make(family, {**SIZES, **settings}).folder, folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copyfile(BUNDLED_FOLDER / name, folder / name)
    return folder


def values_of(field: gguf.ReaderField) -> Any:
    return field.contents()


@pytest.mark.parametrize(
    ("kind", "error", "older"), [("Q4_K", 0.08, "Q4_1"), ("Q5_K", 0.04, "Q5_1"), ("Q6_K", 0.02, "Q5_1")]
)
def test_blocks_are_what_the_package_reads(kind: str, error: float, older: str) -> None:
    """And their errors are below those of the older type of as many bits or fewer."""
    x = torch.randn(6, 512, generator=torch.Generator().manual_seed(1)) * torch.logspace(-3, 3, 6)[:, None]
    x[2, 256:] = 0.0
    x[3, :256] = x[3, :256].abs() + 5
    got = gguf.quants.dequantize(ggml.encoded(x, kind).numpy(), KINDS[kind])
    off = np.linalg.norm(got - x.numpy(), axis=1) / x.norm(dim=1).numpy()
    assert off.max() < error
    plain = gguf.quants.dequantize(gguf.quants.quantize(x.numpy(), KINDS[older]), KINDS[older])
    assert np.linalg.norm(got - x.numpy()) < np.linalg.norm(plain - x.numpy())


@pytest.mark.parametrize(
    ("family", "settings"),
    [("llama", {}), ("llama", {"tie_word_embeddings": True}), ("qwen2", {}), ("qwen3", {"head_dim": 128})],
)
def test_transformers_reads_the_same_model(family: str, settings: dict[str, Any], tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    folder = original(family, tmp_path / "model", **settings)
    done = written(folder, tmp_path / "out" / "made.gguf", "F32")
    assert done.folder == tmp_path / "out" / "made.gguf"
    ids = torch.arange(3, 40)[None]
    with torch.no_grad():
        want = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()(ids).logits
        again = AutoModelForCausalLM.from_pretrained(done.folder.parent, gguf_file="made.gguf", dtype=torch.float32)
        torch.testing.assert_close(again.eval()(ids).logits, want, rtol=0, atol=1e-4)


def test_metadata_and_tokens_of_the_bundled_model(tmp_path: Path) -> None:
    """Spaces are SentencePiece's; what merges first has the highest score."""
    done = written("bundled", tmp_path / "out", "Q8_0")
    (file,) = (tmp_path / "out").iterdir()
    assert file.name == "out-Q8_0.gguf"
    assert done.bytes_after == file.stat().st_size < 0.6 * done.bytes_before
    fields = gguf.GGUFReader(file).fields
    said = {name: values_of(fields[name]) for name in fields if name.startswith(("llama.", "tokenizer.", "general."))}
    assert (said["general.architecture"], said["llama.block_count"], said["llama.attention.head_count_kv"]) == (
        "llama", 6, 2,
    )  # fmt: skip
    tokens, kinds = said["tokenizer.ggml.tokens"], said["tokenizer.ggml.token_type"]
    assert (said["tokenizer.ggml.model"], len(tokens), said["tokenizer.ggml.add_bos_token"]) == ("llama", 2048, True)
    assert (tokens[0], kinds[0], said["tokenizer.ggml.bos_token_id"]) == ("<s>", 3, 0)
    assert kinds[tokens.index("<0x0A>")] == 6
    assert ",\u2581" in tokens and not any(" " in each for each in tokens)
    scores = dict(zip(tokens, said["tokenizer.ggml.scores"], strict=True))
    assert scores[",\u2581"] == 0.0 > scores["th"]
    assert "<|assistant|>" in said["tokenizer.chat_template"]
    written("bundled", tmp_path / "out", "Q4_0", overwrite=True)
    assert [each.name for each in (tmp_path / "out").iterdir()] == ["out-Q4_0.gguf"]


@pytest.mark.parametrize("scheme", ["Q4_K_M", "Q4_0"])
def test_which_tensor_has_which_type(scheme: str) -> None:
    of = PRESETS[scheme].type_of
    found = {
        "token_embd.weight": of("token_embd.weight", (2048, 512), False, 16),
        "tied": of("token_embd.weight", (2048, 512), True, 16),
        "norm": of("blk.0.attn_norm.weight", (512,), False, 16),
        "bias": of("blk.0.attn_q.bias", (512,), False, 16),
        "first": of("blk.0.ffn_down.weight", (512, 512), False, 16),
        "second": of("blk.2.attn_v.weight", (512, 512), False, 16),
        "short": of("blk.2.attn_q.weight", (512, 160), False, 16),
        "odd": of("blk.2.attn_q.weight", (512, 40), False, 16),
    }
    plain = {"norm": "F32", "bias": "F32", "tied": "Q6_K", "odd": "F16"}
    if scheme == "Q4_K_M":
        assert found == {
            **plain, "token_embd.weight": "Q4_K", "first": "Q6_K", "second": "Q4_K", "short": "Q5_0",
        }  # fmt: skip
    else:
        assert found == {**plain, **dict.fromkeys(["token_embd.weight", "first", "second", "short"], "Q4_0")}


def test_divisors_are_those_of_llama_3() -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    scaled = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    rope = {**scaled, "original_max_position_embeddings": 8192, "rope_theta": 500000.0}
    sizes = {"hidden_size": 256, "num_attention_heads": 2, "head_dim": 128, "max_position_embeddings": 131072}
    config = LlamaConfig(**sizes, rope_parameters=rope)
    plain = LlamaConfig(**sizes, rope_parameters={"rope_type": "default", "rope_theta": 500000.0})
    want = LlamaRotaryEmbedding(plain).inv_freq / LlamaRotaryEmbedding(config).inv_freq
    torch.testing.assert_close(_divisors(config), want, rtol=1e-4, atol=0)


QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@pytest.mark.parametrize(
    ("pattern", "name"),
    [(QWEN2, "qwen2"), (QWEN2.replace(r"\p{N}| ?", r"\p{N}{1,3}| ?"), "llama-bpe"), (None, "gpt-2"), (r"\w+", None)],
)
def test_how_words_are_cut_has_a_name(pattern: str | None, name: str | None) -> None:
    """By the expressions of the published tokenizer.json."""
    backend = Tokenizer(BPE())
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated")] if pattern else []
    splits.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pattern is None))
    backend.pre_tokenizer = pre_tokenizers.Sequence(splits)
    if name is not None:
        assert gguf_tokens.words(backend) == name
        return
    with pytest.raises(ValueError, match="no name for"):
        gguf_tokens.words(backend)


@pytest.mark.parametrize(
    ("family", "settings", "says"),
    [
        ("granite", {}, "models of type granite are not written to GGUF"),
        ("llama", {"method": "awq", "calibration": "x"}, "method is not for GGUF files"),
        ("llama", {"group_size": 32}, "group_size is not for GGUF files"),
    ],
)
def test_what_is_not_written(family: str, settings: dict[str, Any], says: str, tmp_path: Path) -> None:
    folder = original(family, tmp_path / "model")
    with pytest.raises(ValueError, match=says):
        written(folder, tmp_path / "made.gguf", "Q8_0", **settings)
    assert list(tmp_path.iterdir()) == [folder]


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ValueError, match="pip install"):
        written("bundled", tmp_path / "made.gguf", "Q8_0")


YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({}, {}),
        ({"attention_factor": 0.5, "beta_fast": 16.0, "beta_slow": 2.0}, {"attention_factor": 0.5, "beta_fast": 16.0}),
        (
            {"mscale": 2.0, "mscale_all_dim": 1.0},
            {"attention_factor": (1 + 0.2 * math.log(4)) / (1 + 0.1 * math.log(4))},
        ),
    ],
)
def test_all_that_yarn_says_is_read_back(more: dict[str, Any], said: dict[str, Any], tmp_path: Path) -> None:
    folder = original("llama", tmp_path / "model", rope_parameters={**YARN, **more}, max_position_embeddings=256)
    rope = load_model_config(written(folder, tmp_path / "out" / "made.gguf", "F32").folder).rope_parameters
    assert {name: rope[name] for name in YARN} == YARN
    assert {name: rope[name] for name in said} == pytest.approx(said)
    want = LlamaConfig(head_dim=16, rope_parameters={**YARN, **more})
    torch.testing.assert_close(turning(LlamaConfig(head_dim=16, rope_parameters=rope)), turning(want))


def turning(config: Any) -> torch.Tensor:
    """Frequencies, and behind them attention's factor, by transformers."""
    frequencies, factor = ROPE_INIT_FUNCTIONS["yarn"](config, torch.device("cpu"))
    return torch.cat([frequencies, torch.tensor([factor])])


def test_a_window_of_all_layers_is_read_back(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = original("mistral", tmp_path / "model", sliding_window=8)
    config = load_model_config(written(folder, tmp_path / "out" / "made.gguf", "F32").folder)
    assert (config.model_type, config.sliding_window) == ("mistral", 8)
    assert "llama.cpp computes no windows in this architecture" in caplog.text


def test_a_window_that_reaches_as_far_as_the_context_is_none(tmp_path: Path) -> None:
    folder = original("mistral", tmp_path / "model", sliding_window=128, max_position_embeddings=128)
    config = load_model_config(written(folder, tmp_path / "out" / "made.gguf", "F32").folder)
    assert config.model_type == "llama"


@pytest.mark.parametrize(
    ("family", "settings", "why"),
    [
        ("qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}, "qwen2 with windows"),
        ("llama", {"rope_parameters": {**YARN, "truncate": False}}, "YaRN whose range is not rounded"),
    ],
)
def test_what_gguf_has_no_word_for_is_refused(family: str, settings: Any, why: str, tmp_path: Path) -> None:
    folder = original(family, tmp_path / "model", **settings)
    with pytest.raises(ValueError, match=why):
        written(folder, tmp_path / "out" / "made.gguf", "F32")
    assert not (tmp_path / "out" / "made.gguf").exists()
