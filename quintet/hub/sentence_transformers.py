"""Reads the files of Sentence Transformers beside a checkpoint: modules.json, and a folder for each module.

Each key of these files is obeyed, or refused by name if it changes the result.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from quintet.common.json_files import read_object
from quintet.common.suggestions import refuse_unknown
from quintet.gguf.file import is_gguf
from quintet.gguf.pooling import dense_sizes
from quintet.hub.sentence_settings import SentenceSettings, read_settings
from quintet.model_loader.gguf_weights import model_of

# their names of how token embeddings become one -> ours
_MODES = {
    **dict.fromkeys(("cls", "cls_token"), "CLS"),
    **dict.fromkeys(("mean", "mean_tokens"), "MEAN"),
    "lasttoken": "LAST",
    **dict.fromkeys(("max", "max_tokens"), "MAX"),
    **dict.fromkeys(("mean_sqrt_len_tokens", "mean_sqrt_len"), "ROOT"),  # the sum over the root of how many there are
    **dict.fromkeys(("weightedmean", "weightedmean_tokens"), "WEIGHTED"),  # a mean by the tokens' positions
}
MODULES, LARGEST = "modules.json", 64  # of them
_OF_TEXTS, _OF_TOKENS = "sentence_embedding", "token_embeddings"
_NAMES = ("module_input_name", "module_output_name")
# modules that are computed here -> the keys of their config.json
_KEYS: Mapping[str, tuple[str, ...]] = {
    "Pooling": ("embedding_dimension", "word_embedding_dimension", "pooling_mode", "include_prompt",
                *(f"pooling_mode_{mode}" for mode in _MODES)),
    "Dense": ("in_features", "out_features", "bias", "activation_function", "use_residual", *_NAMES),
    "LayerNorm": ("dimension",),
    "Normalize": _NAMES,
    "Dropout": ("dropout",),
    "MultiVectorMask": ("skiplist_words", "skiplist_tasks", "keep_only_token_ids"),
}  # fmt: skip
GGUF = "gguf"  # package of a module in a GGUF file: "tensor" of its config is the tensor's name
_PACKAGES = ("sentence_transformers", "pylate")
_OWN_TRUNKS = ("custom_st.Transformer",)  # code of Jina Embeddings v3, whose model is here


class SentenceModule(NamedTuple):
    """One entry of modules.json."""

    kind: str  # the class's own name
    folder: Path  # or the GGUF file
    package: str
    config: Mapping[str, Any]


@dataclass(frozen=True)
class SentenceTransformersConfig:
    """Modules behind the model; the defaults are those of a folder without modules.json."""

    pooling: str | None = None  # CLS, LAST, MEAN, MAX, ROOT or WEIGHTED
    pools_tokens: bool = False  # no pooling: the modules are of each token (late interaction)
    normalize: bool | None = None  # as the last module
    modules: tuple[SentenceModule, ...] = ()  # Dense, LayerNorm and Normalize behind the pooling, in order
    settings: SentenceSettings = field(default_factory=SentenceSettings)


def read_sentence(folder: Path) -> SentenceTransformersConfig:
    """Reads an embedding model's files. ValueError names the module that is not computed here, or what is wrong with a
    file."""
    if is_gguf(folder):
        return SentenceTransformersConfig(modules=_gguf_modules(folder))
    if not has_modules(folder):
        return SentenceTransformersConfig()
    listed = folder / MODULES
    settings, modules = read_settings(folder), _modules(listed)
    first = modules.pop(0).kind if modules else "nothing"
    if first != "Transformer":
        raise ValueError(f"{listed} begins with {first}; only models that begin with a Transformer are computed here")
    pooling = None
    if modules and modules[0].kind == "Pooling":
        pooling = _pooling(modules[0])
        del modules[0]
    for kind in (each.kind for each in modules):
        if kind in ("Transformer", "Pooling") or (kind == "MultiVectorMask" and pooling is not None):
            raise ValueError(f"{listed}: {kind} is not computed here at its place: a Transformer comes first, Pooling, "
                             "if there is one, second, and MultiVectorMask is for models without it")  # fmt: skip
    behind = [each for each in modules if _is_computed(each, pooling is None)]
    words = tuple(word for each in modules if each.kind == "MultiVectorMask" for word in _skiplist(each))
    if pooling is None:
        settings = replace(settings, skiplist_words=words if _masked(modules) else settings.skiplist_words)
    normalize = pooling is None and settings.model_type != "MultiVectorEncoder"  # PyLate's encode() does it
    while behind and behind[-1].kind == "Normalize":
        normalize = True
        behind.pop()
    return SentenceTransformersConfig(pooling, pooling is None, normalize, tuple(behind), settings)


def _gguf_modules(file: Path) -> tuple[SentenceModule, ...]:
    """Returns the products behind the pooling of a GGUF file."""
    plain = {"bias": False, "activation_function": "torch.nn.Identity"}
    return tuple(
        SentenceModule("Dense", file, GGUF, {**plain, "tensor": name, "out_features": outputs, "in_features": inputs})
        for name, (outputs, inputs) in dense_sizes(model_of(file)).items()
    )


def read_cross_encoder(folder: Path) -> SentenceTransformersConfig:
    """Reads a classifier's files, as a CrossEncoder is saved: a Transformer and nothing behind it."""
    if not has_modules(folder):
        return SentenceTransformersConfig()
    kinds = [each.kind for each in _modules(folder / MODULES)]
    if kinds != ["Transformer"]:
        raise ValueError(f"{folder / MODULES} lists {', '.join(kinds)}; of a classifier, Transformer alone is computed")
    return SentenceTransformersConfig(settings=read_settings(folder, "sequence-classification"))


def has_modules(folder: Path) -> bool:
    """Returns whether Sentence Transformers wrote the folder."""
    return folder.is_dir() and (folder / MODULES).is_file()


def _modules(listed: Path) -> list[SentenceModule]:
    """Reads the modules in order, with their configs. A path may not leave the folder."""
    try:
        content = json.loads(listed.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{listed} is not JSON: {error}; was the download cut short?") from None
    if not isinstance(content, list) or len(content) > LARGEST or not all(isinstance(each, dict) for each in content):
        raise ValueError(f"{listed} must hold a list of modules; fetch it again")
    return [_module(entry, listed) for entry in content]


def _module(entry: Mapping[str, Any], listed: Path) -> SentenceModule:
    path, full_name = entry.get("path", ""), entry.get("type")
    if not isinstance(path, str) or not isinstance(full_name, str):
        raise ValueError(f"{listed}: a module has a path and a type; fetch it again")
    folder, root = (listed.parent / path).resolve(), listed.parent.resolve()
    if not folder.is_relative_to(root):
        raise ValueError(f"{listed}: the module {path!r} lies outside of the folder; correct it")
    package, kind = full_name.partition(".")[0], full_name.rpartition(".")[2]
    known = kind == "Transformer" or kind in _KEYS
    if not known or (package not in _PACKAGES and full_name not in _OWN_TRUNKS):
        name = kind if package in _PACKAGES else full_name
        raise ValueError(
            f"{listed} has a module {name!r}, which is not computed here; Transformer, {', '.join(_KEYS)} are"
        )
    if kind == "Transformer":
        if folder != root:
            raise ValueError(f"{listed}: the Transformer is in {path!r}; move its files beside modules.json, path ''")
        return SentenceModule(kind, listed.parent, package, {})
    file = listed.parent / path / "config.json"
    config = read_object(file) if folder != root and file.is_file() else {}
    refuse_unknown(f"key of {file}", config, _KEYS[kind])
    return SentenceModule(kind, listed.parent / path, package, config)


def _is_computed(module: SentenceModule, of_tokens: bool) -> bool:
    """Returns whether the module changes embeddings. ValueError where it is not of what the model gives."""
    kind, wanted = module.kind, _OF_TOKENS if of_tokens else _OF_TEXTS
    if kind in ("Dropout", "MultiVectorMask"):  # Dropout is for training
        return False
    default = wanted if kind == "Dense" and of_tokens else _OF_TEXTS
    source = module.config.get(_NAMES[0]) or default
    if module.package == "pylate" and source == _OF_TEXTS:  # PyLate's Dense is of tokens, and saves its parent's names
        source = wanted
    names = {source, module.config.get(_NAMES[1]) or source} - ({_OF_TEXTS} if module.package == "pylate" else set())
    if names - {wanted}:
        raise ValueError(
            f"{module.folder}: {kind} takes or gives {', '.join(sorted(names - {wanted}))}, and at its place {wanted} "
            "is computed here"
        )
    return True


def _masked(modules: list[SentenceModule]) -> bool:
    return any(each.kind == "MultiVectorMask" for each in modules)


def _skiplist(module: SentenceModule) -> list[str]:
    """Returns the tokens of documents that count for no score."""
    config = module.config
    if config.get("keep_only_token_ids"):
        raise ValueError(f"{module.folder}: keep_only_token_ids is for images, which are not computed here")
    if config.get("skiplist_tasks") not in (None, "document", ["document"]):
        raise ValueError(f"{module.folder}: skiplist_tasks is {config['skiplist_tasks']!r}; 'document' is computed")
    words = config.get("skiplist_words") or []
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        raise ValueError(f"{module.folder}: skiplist_words is {words!r}, not a list of tokens; correct it")
    return words


def _pooling(module: SentenceModule) -> str:
    """The one way of pooling that a module's config asks for."""
    config, file = module.config, module.folder / "config.json"
    mode = config.get("pooling_mode")  # newer releases; it takes precedence over the older flags
    modes: list[Any] = [mode] if isinstance(mode, str) else list(mode or ())
    if mode is None:
        flags = [name.removeprefix("pooling_mode_") for name in config if name.startswith("pooling_mode_")]
        modes = [flag for flag in flags if config[f"pooling_mode_{flag}"] is True] or ["mean"]
    if config.get("include_prompt") is False:
        raise ValueError(f"{file}: include_prompt=false leaves the prompt out of the mean, which is not computed here")
    if len(modes) != 1 or modes[0] not in _MODES:
        shown = ", ".join(map(str, modes)) or "nothing"
        raise ValueError(f"{file} asks for {shown}; one of {', '.join(sorted(_MODES))} is computed here")
    return _MODES[modes[0]]
