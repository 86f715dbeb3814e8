"""The compact form of a tokenizer: the same tokenizer again, and no other for a damaged form."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE, WordLevel, WordPiece

from quintet.gguf.file import read_metadata
from quintet.gguf.tokenizer import build
from quintet.gguf.vocabulary import read_vocabulary
from quintet.tokenizers.compact import compact, compact_model, restore
from quintet.tokenizers.tokenizer import load_tokenizer

VOCABULARY = {"a": 0, "b": 1, "ab": 2, "</s>": 3, " ": 4, "<unk>": 5}


def make(model: Any) -> Tokenizer:
    made = Tokenizer(model)
    made.normalizer, made.pre_tokenizer = normalizers.NFC(), pre_tokenizers.Split(" ", "isolated")
    made.decoder = decoders.Fuse()
    made.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 3)])
    made.add_special_tokens([AddedToken("</s>", special=True, normalized=False, rstrip=True)])
    made.add_tokens([AddedToken("<new>", single_word=True), AddedToken("a b", lstrip=True)])
    return made


@pytest.mark.parametrize(
    "parameters",
    [
        {},
        {"unk_token": "<unk>", "fuse_unk": True},
        {"ignore_merges": True, "dropout": 0.5},
        {"byte_fallback": True, "continuing_subword_prefix": "", "end_of_word_suffix": ""},
    ],
)
def test_the_form_makes_the_same_tokenizer(parameters: dict[str, Any]) -> None:
    made = make(BPE(VOCABULARY, [("a", "b")], **parameters))
    form = compact(made.to_str())
    assert form is not None
    again = restore(json.loads(json.dumps(form)))
    assert again.to_str() == made.to_str()
    assert again.encode("a</s> <new> ab a b").ids[-1] == 3


@pytest.mark.parametrize("name", ["bpe", "spm", "gemma4"])
def test_the_form_of_a_models_arguments_is_that_of_its_description(name: str) -> None:
    file = Path(__file__).parents[1] / f"data/quantized/gguf/tokenizers/{name}.gguf"
    made, model = build(read_vocabulary(read_metadata(file)))
    assert model is not None
    form, described = compact_model(made, model), compact(made.to_str())
    assert described is not None
    defaults = {"fuse_unk": False, "byte_fallback": False, "ignore_merges": False}
    assert {**form, "parameters": {**defaults, **form["parameters"]}} == described
    assert restore(json.loads(json.dumps(form))).to_str() == made.to_str()


def test_other_models_and_ids_with_gaps_have_no_form() -> None:
    assert compact(make(WordLevel(VOCABULARY, unk_token="a")).to_str()) is None
    assert compact(make(WordPiece(VOCABULARY, unk_token="a")).to_str()) is None
    assert compact(make(BPE({**VOCABULARY, "gap": 9}, [])).to_str()) is None


@pytest.mark.parametrize(
    "damage",
    [
        {"merges": "AAAA"},
        {"merges": "no base64!"},
        {"merges": "/////////38="},
        {"merges": "AwAAAAAAAAA="},  # of two tokens that make no third
        {"tokens": ["a"]},
        {"tokens": 7},
        {"tokens": None},
        {"parameters": {"unk_token": 3}},
        {"added": [{"content": 3}]},
        {"rest": {}},
        {"rest": []},
    ],
)
def test_a_damaged_form_is_made_anew(damage: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    make(BPE(VOCABULARY, [("a", "b")])).save(str(tmp_path / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>", "pad_token": "<pad>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    want = load_tokenizer(tmp_path).backend.to_str()
    (file,) = (tmp_path / "cache").rglob("*.reading")
    whole = file.read_bytes()
    (reading,) = (content := json.loads(whole)).values()
    assert isinstance(reading["backend"], dict)
    reading["backend"] |= damage
    file.write_text(json.dumps(content))
    assert load_tokenizer(tmp_path).backend.to_str() == want
    assert file.read_bytes() == whole
