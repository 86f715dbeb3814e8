"""Names of models: which words name one, and the name of a model in the API."""

import os
import re
from pathlib import Path, PurePath

from quintet.config import INSIDE, EngineConfig
from quintet.gguf.file import SPLIT, is_gguf

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
HUB_ADDRESS = re.compile(r"(?:https?://)?(?:huggingface\.co|hf\.co)/|hf://")
_TAGGED = re.compile(r"(?:[A-Za-z0-9][\w.-]*/)?[A-Za-z0-9][\w.-]*:[A-Za-z0-9][\w.-]*")  # owner/name:Q4_K_M, qwen3:0.6b
_CACHED = re.compile(r"models--([^/]+)--([^/]+)/snapshots/[^/]+$")


def is_local(name: str) -> bool:
    """Returns whether a name is a path: of something that is there, or written as one."""
    return name.startswith(("/", "./", "../", "~")) or "://" in name or os.path.exists(name)


def is_model_name(word: str) -> bool:
    """Returns whether a word names a model, without asking the network.

    True for a file or folder that exists, a path that ends with .gguf, `owner/name`, `owner/name:TAG`, `name:TAG` and
    the bundled models. Text with a space is none, unless it is a path.
    """
    return is_only_model_name(word) or has_form_of_model_name(word)


def is_only_model_name(word: str) -> bool:
    """Returns whether a word names a model and can hardly be a text: a path, an address or a bundled model."""
    if word in INSIDE or (word.endswith(".gguf") and " " not in word) or os.path.exists(os.path.expanduser(word)):
        return bool(word)
    return HUB_ADDRESS.match(word) is not None and " " not in word


def has_form_of_model_name(word: str) -> bool:
    """Returns whether a word has the form `owner/name`, `owner/name:TAG` or `name:TAG`, as "and/or" and "12:30" do."""
    return _TAGGED.fullmatch(word) is not None or ("/" in word and HUB_ID.fullmatch(word) is not None)


def served_name(model: str) -> str:
    """Returns the name of a model in the API: of a path its last part, without .gguf; a hub id stays as it is."""
    if model in INSIDE or not is_local(model):
        return model
    path = model.rstrip("/")
    if cached := _CACHED.search(path):  # a folder of the hub's cache
        return f"{cached[1]}/{cached[2]}"
    name = PurePath(path).name
    split = SPLIT.fullmatch(name)
    return (split[1] if split else name.removesuffix(".gguf")) or model


def tokenizer_file(config: EngineConfig) -> Path | None:
    """Returns the GGUF file that the tokenizer will be read from, where that is known without the engine."""
    file = Path(config.model).expanduser()
    own = config.tokenizer is None and not config.skip_tokenizer_init and config.tokenizer_mode != "mistral"
    return file if own and is_gguf(file) else None
