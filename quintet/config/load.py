"""Options to find and load a model: replacements for its files, their format, and which files are left out."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from quintet.common.value_parsers import json_object, list_of, one_of, optional, text
from quintet.config.schema.fields import choice_field, option

# What packages of others read, and its options
READERS: Mapping[str, tuple[str, ...]] = {
    "runai_streamer": (), "runai_streamer_sharded": (), "fastsafetensors": (), "tensorizer": ("tensorizer_uri",),
}  # fmt: skip
PATH = "str | PathLike[str]"  # for type checkers


def _overrides(value: Any) -> Any:
    return value if callable(value) else json_object(value)


def _patterns(value: Any) -> tuple[str, ...]:
    return (text(value),) if isinstance(value, str) else tuple(list_of(text)(value))


def _tokenizer_mode(value: Any) -> str:
    if value == "slow":
        raise ValueError("is 'slow', and tokenizers are fast here, which give the same tokens; leave it out")
    return str(one_of("auto", "mistral", hf="auto")(value))


def _class_path(value: Any) -> str:
    parts = str(value).replace(":", ".").split(".")
    if len(parts) < 2 or not all(part.isidentifier() for part in parts):
        raise ValueError(f"must be package.module.Class, not {str(value)[:80]!r}")
    return str(value)


@dataclass(frozen=True)
class LoadingOptions:
    """Options to load a model's files."""

    hf_config_path: str | None = option(
        None, optional(text), "folder or hub id whose config.json and generation_config.json count instead of the "
        "model's own", group="model", accepts=f"{PATH} | None",
    )  # fmt: skip
    hf_overrides: dict[str, Any] | Callable[[Any], Any] | None = option(
        None, optional(_overrides), "entries that replace those of the model's config.json; in Python also a function "
        "from transformers' config to the one that counts", group="model",
        accepts="Mapping[str, Any] | str | Callable[[Any], Any] | None",
    )  # fmt: skip
    config_format: str = choice_field(
        "auto",
        "auto",
        "hf",
        "mistral",
        help="of the model's configuration: config.json (hf), or params.json (mistral)",
        group="model",
    )
    tokenizer_mode: str = option(
        "auto", _tokenizer_mode, "whose files the tokenizer is read from: transformers' (hf), or Mistral's tekken.json",
        group="model",
        choices=("auto", "hf", "mistral"),
    )  # fmt: skip
    code_revision: str | None = option(
        None, optional(text), "branch, tag or commit of the code that comes with a model on the hub", group="model"
    )
    ignore_patterns: tuple[str, ...] = option(
        (), _patterns, "files of a hub id that are not downloaded, such as original/**/*", group="model",
        accepts="Sequence[str] | str",
    )  # fmt: skip
    load_format: str = choice_field(
        "auto", "auto", "safetensors", "pt", "npcache", "gguf", "bitsandbytes", "dummy", "mistral", "sharded_state",
        *READERS,
        help="of the weights. auto: safetensors, GGUF, or pt where there is neither; pt: what torch.save "
        "wrote (*.bin), read without running it; npcache: the same, kept as arrays beside; dummy: random weights; "
        "bitsandbytes: as quantization=bitsandbytes; mistral: consolidated*.safetensors; sharded_state: what "
        "save_sharded_state() wrote (runai_streamer_sharded: the same, streamed); the others: by the package of that "
        "name", group="model",
    )  # fmt: skip
    safetensors_load_strategy: str | None = option(
        None, optional(one_of("lazy", "eager", "prefetch")), "how safetensors are read: lazy, by memory map (the "
        "default); eager, each file at once; prefetch, by memory map after reading it into the system's cache",
        group="model", choices=("lazy", "eager", "prefetch"),
    )  # fmt: skip
    model_loader_extra_config: dict[str, Any] | None = option(
        None, optional(json_object), "options of what reads the load_format", group="model"
    )
    weights_cache: str | None = option(
        "auto", optional(text), "folder that keeps packed weights, so that the next start has them at once; may be "
        "deleted at any time. auto: ~/.cache/quintet/weights, for GGUF files of 64 MiB and more; none: no such folder",
        group="model", metavar="FOLDER", accepts=f"{PATH} | None",
    )  # fmt: skip

    worker_extension_cls: str | None = option(
        None, optional(_class_path), "package.module.Class of an installed package: collective_rpc() calls its methods "
        "on every rank", group="model", metavar="CLASS",
    )  # fmt: skip

    def _check(self) -> None:
        if self.safetensors_load_strategy is not None and self.load_format not in ("auto", "safetensors", "mistral"):
            raise ValueError(
                f"safetensors_load_strategy={self.safetensors_load_strategy!r} is for safetensors, and not for "
                f"load_format={self.load_format!r}; leave one of them out"
            )
        known = READERS.get(self.load_format, ())
        if unknown := [name for name in self.model_loader_extra_config or {} if name not in known]:
            raise ValueError(
                f"model_loader_extra_config has {', '.join(unknown)}, and what reads load_format={self.load_format!r} "
                f"has {', '.join(known) or 'no options'}; leave it out"
            )
