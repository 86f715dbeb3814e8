"""The compact form of a tokenizer: the same tokenizer again, and no other for a damaged form."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE, WordLevel, WordPiece

from quintet.tokenizers.compact import compact, restore
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
