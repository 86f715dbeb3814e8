"""Reads the files of Sentence Transformers beside a checkpoint: modules.json, and a folder for each module."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quintet.common.json_files import read_object
from quintet.hub.config_checks import MAX_INT32

# their names of how token embeddings become one -> ours
_MODES = {
    **dict.fromkeys(("cls", "cls_token"), "CLS"),
    **dict.fromkeys(("mean", "mean_tokens"), "MEAN"),
    "lasttoken": "LAST",
    **dict.fromkeys(("max", "max_tokens"), "MAX"),
    **dict.fromkeys(("mean_sqrt_len_tokens", "mean_sqrt_len"), "ROOT"),  # the sum over the root of how many there are
    "weightedmean": "WEIGHTED",  # a mean in which later tokens count more: by their number
}
MODULES, LARGEST = "modules.json", 64  # of them
LENGTHS = ("sentence_bert_config.json", "sentence_roberta_config.json", "sentence_distilbert_config.json",
           "sentence_camembert_config.json", "sentence_albert_config.json", "sentence_xlm-roberta_config.json",
           "sentence_xlnet_config.json")  # fmt: skip


@dataclass(frozen=True)
class SentenceTransformersConfig:
    """Modules behind the model; the defaults are those of a folder without modules.json."""

    pooling: str | None = None  # CLS, LAST, MEAN, MAX, ROOT or WEIGHTED
    pools_tokens: bool = False  # no pooling: the modules are of each token (late interaction)
    normalize: bool | None = None
    dense: tuple[Path, ...] = ()  # folders of products behind the pooling, in order
    max_length: int | None = None  # tokens
    prompts: Mapping[str, str] = field(default_factory=dict)  # by name: put before a text
    default_prompt: str | None = None  # its name
    lower: bool = False  # texts are brought to lower case first


def read_sentence(folder: Path) -> SentenceTransformersConfig:
    """ValueError names the module that is not computed here, or what is wrong with a file."""
    listed = folder / MODULES if folder.is_dir() else None
    if listed is None or not listed.is_file():
        return SentenceTransformersConfig()
    found, dense, pooling, normalize = _modules(listed), [], None, False
    for path, kind in found:
        if kind == "Transformer":
            continue
        if kind == "Pooling":
            pooling = _pooling(path / "config.json")
        elif kind == "Dense":
            dense.append(path)
        elif kind == "Normalize":
            normalize = True
        else:
            raise ValueError(
                f"{listed} has a module {kind!r}, which is not computed here; Transformer, Pooling, "
                "Dense and Normalize are"
            )
    settings = next((read_object(folder / each) for each in LENGTHS if (folder / each).is_file()), {})
    beside = folder / "config_sentence_transformers.json"
    config = read_object(beside) if beside.is_file() else {}
    prompts, default = config.get("prompts") or {}, config.get("default_prompt_name")
    if not isinstance(prompts, dict) or not all(isinstance(each, str) for each in prompts.values()):
        raise ValueError(f"{beside}: prompts are texts by name, not {type(prompts).__name__}; correct it")
    length = settings.get("max_seq_length", _tokenizers_length(folder))
    if length is not None and (type(length) is not int or length < 1):
        raise ValueError(f"{folder}: max_seq_length is {length!r}, not a number of tokens; correct it")
    tokens = pooling is None
    return SentenceTransformersConfig(
        pooling, tokens, normalize or tokens, tuple(dense), length, prompts,
        default if default in prompts else None, bool(settings.get("do_lower_case")),
    )  # fmt: skip


def _tokenizers_length(folder: Path) -> int | None:
    """Returns the length that newer releases keep there; None for a number beyond any text, which means no limit."""
    file = folder / "tokenizer_config.json"
    config = read_object(file).get("model_max_length") if file.is_file() else None
    return config if type(config) is int and 0 < config <= MAX_INT32 else None


def _modules(listed: Path) -> list[tuple[Path, str]]:
    """(folder, the class's own name) of each, in order. A path may not leave the folder."""
    try:
        content = json.loads(listed.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{listed} is not JSON: {error}; was the download cut short?") from None
    if not isinstance(content, list) or len(content) > LARGEST or not all(isinstance(each, dict) for each in content):
        raise ValueError(f"{listed} must hold a list of modules; fetch it again")
    found = []
    for each in content:
        path, kind = each.get("path", ""), each.get("type")
        if not isinstance(path, str) or not isinstance(kind, str):
            raise ValueError(f"{listed}: a module has a path and a type; fetch it again")
        inside = (listed.parent / path).resolve()
        if not inside.is_relative_to(listed.parent.resolve()):
            raise ValueError(f"{listed}: the module {path!r} lies outside of the folder; correct it")
        found.append((listed.parent / path, kind.rpartition(".")[2]))
    return found


def _pooling(file: Path) -> str:
    """The one way of pooling that a module's config asks for."""
    config = read_object(file)
    mode = config.get("pooling_mode")
    modes: list[Any] = [name.removeprefix("pooling_mode_") for name, on in config.items()
                        if name.startswith("pooling_mode_") and on is True]  # fmt: skip
    modes += [mode] if isinstance(mode, str) else list(mode or ())
    if config.get("include_prompt") is False:
        raise ValueError(f"{file}: include_prompt=false leaves the prompt out of the mean, which is not computed here")
    if len(modes) != 1 or modes[0] not in _MODES:
        shown = ", ".join(map(str, modes)) or "nothing"
        raise ValueError(f"{file} asks for {shown}; one of {', '.join(sorted(_MODES))} is computed here")
    return _MODES[modes[0]]
