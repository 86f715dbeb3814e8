"""Reads a tokenizer's files without transformers, where its class would add nothing to what tokenizer.json says.

Importing transformers takes seconds. Its classes take tokenizer.json as it is, or build one kind of tokenizer from
the vocabulary in it; the second is the same where the file describes that kind. All else is left to transformers.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")

# Classes that take the file as it is, for these types of models; others have a class of their own, or a known mistake.
_AS_IT_IS = ("PreTrainedTokenizerFast", "TokenizersBackend")
_GENERIC = (
    "", "gemma2", "gemma3_text", "gpt2", "granite", "llama", "olmo2", "opt", "phi3", "qwen3", "smollm3",
)  # fmt: skip
_QWEN = ("Qwen2Tokenizer", "Qwen2TokenizerFast")
_QWEN_MODELS = ("qwen2", "qwen3")
_QWEN_TOKENS = dict.fromkeys(("unk_token", "eos_token", "pad_token"), "<|endoftext|>")
_QWEN_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# Entries of tokenizer_config.json that change the tokenizer itself.
_INVOLVED = ("auto_map", "fast_tokenizer_files", "fix_mistral_regex", "split_special_tokens", "init_inputs")


@dataclass(frozen=True)
class Files:
    """What a folder says of its tokenizer."""

    backend: Backend
    named: dict[str, str]  # "bos_token" -> "<s>", those that there are
    chat_template: str | None


class NotPlain(Exception):
    """An entry that transformers shall judge."""


def read_files(folder: Path) -> Files | None:
    """The tokenizer in the folder; None where transformers would perhaps make another, or refuse it."""
    try:
        return _read(folder)
    except (NotPlain, OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _expect(plain: bool) -> None:
    if not plain:
        raise NotPlain


def _read(folder: Path) -> Files:
    config = _json(folder / "tokenizer_config.json")
    _expect(not any(config.get(name) for name in _INVOLVED) and not (folder / "additional_chat_templates").exists())
    text = (folder / "tokenizer.json").read_text(encoding="utf-8")
    described = json.loads(text)
    named = _defaults(config.get("tokenizer_class"), _model_type(folder), described, config)
    listed = config.get("added_tokens_decoder")
    if listed is None:
        _expect(not (folder / "added_tokens.json").exists())
        config |= _legacy(folder)
    named |= {name: _content(config[name]) for name in NAMED if name in config}
    try:
        backend = Backend.from_str(text)
    except Exception as error:  # what tokenizers raises for a damaged file
        raise NotPlain from error
    named = {name: named[name] for name in NAMED if named.get(name) is not None}
    _check_tokens(backend, named, listed or {}, config)
    return Files(backend, named, _chat_template(folder, config))


def _json(file: Path) -> dict[str, Any]:
    content = json.loads(file.read_text(encoding="utf-8"))
    _expect(isinstance(content, dict))
    return dict(content)


def _model_type(folder: Path) -> str:
    """Of the model that the tokenizer lies beside; transformers chooses the class by both."""
    file = folder / "config.json"
    return str(_json(file).get("model_type", "")) if file.exists() else ""


def _defaults(cls: Any, model_type: str, described: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """The names that the class gives to tokens by itself. NotPlain if it would not make the file's tokenizer."""
    if cls in _AS_IT_IS and model_type in _GENERIC:
        return {}
    _expect(cls in _QWEN and model_type in _QWEN_MODELS and not config.get("add_prefix_space"))
    _check_qwen(described)
    return dict(_QWEN_TOKENS)


def _check_qwen(described: Mapping[str, Any]) -> None:
    """Whether the file describes just what the class would build of the vocabulary."""
    model, before = described["model"], described["pre_tokenizer"]
    _expect(model["type"] == "BPE" and not any(model.get(name) for name in ("dropout", "unk_token", "ignore_merges")))
    _expect(not any(model.get(name) for name in ("continuing_subword_prefix", "end_of_word_suffix")))
    _expect(not model.get("fuse_unk") and not model.get("byte_fallback"))
    _expect(described["normalizer"] == {"type": "NFC"} and described["decoder"]["type"] == "ByteLevel")
    _expect(
        before["type"] == "Sequence" and [each["type"] for each in before["pretokenizers"]] == ["Split", "ByteLevel"]
    )
    split, level = before["pretokenizers"]
    _expect(split["pattern"] == {"Regex": _QWEN_SPLIT} and split["behavior"] == "Isolated" and not split["invert"])
    _expect(not level["add_prefix_space"] and not level["use_regex"])
    _expect(described["post_processor"] is not None)
    size = len(model["vocab"])  # its added tokens come after the vocabulary, one by one
    _expect([each["id"] for each in described["added_tokens"]] == [*range(size, size + len(described["added_tokens"]))])


def _legacy(folder: Path) -> dict[str, Any]:
    """Named tokens as files had them before tokenizer_config.json listed the added ones; they come first."""
    file = folder / "special_tokens_map.json"
    return _json(file) if file.exists() else {}


def _content(token: Any) -> str | None:
    if isinstance(token, dict):
        token = token["content"]
    _expect(token is None or isinstance(token, str))
    return None if token is None else str(token)


def _check_tokens(
    backend: Backend, named: Mapping[str, str], listed: Mapping[str, Any], config: Mapping[str, Any]
) -> None:
    """Whether the file knows every token that the configuration names; transformers would add what is missing."""
    known = backend.get_added_tokens_decoder()
    for token_id, flags in listed.items():
        _expect(repr(known.get(int(token_id))) == repr(AddedToken(**flags)))
    special = {token.content for token in known.values() if token.special}
    further: list[Any] = []
    for name in ("additional_special_tokens", "extra_special_tokens"):
        value = config.get(name) or []
        _expect(isinstance(value, list))
        further += value
    _expect({*named.values(), *map(_content, further)} <= special)
    others = [name for name in config if name.endswith("_token") and name not in NAMED]  # names of the model's own
    _expect(all(isinstance(config[name], bool) for name in others))


def _chat_template(folder: Path, config: Mapping[str, Any]) -> str | None:
    """Of its own file, or of the configuration."""
    file = folder / "chat_template.jinja"
    template = file.read_text(encoding="utf-8") if file.exists() else config.get("chat_template")
    _expect(template is None or isinstance(template, str))  # several, each with a name
    return template
