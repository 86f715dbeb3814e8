"""Model families: one file each, and the file's name is its registry entry. Others come from installed packages."""

import functools
import importlib
import pkgutil
from collections.abc import Iterable, Mapping
from typing import Any

from quintet.common.plugins import entry_points

GROUP = "quintet.models"  # entry points: model_type or architecture = package.module:Class

_ALIASES = {  # model_type in config.json -> file, where they differ
    "PanguEmbedded": "llama",
    "TeleFLM": "granite",
    "bailing_moe_v2": "bailing_moe",
    "bert-generation": "bert",
    "blenderbot": "bart",
    "blenderbot-small": "bart",
    "camembert": "roberta",
    "cwm": "ministral",
    "deberta-v2": "deberta_v2",
    "deepseek_ocr2_text": "deepseek_v2",
    "falcon_mamba": "mamba",
    "gemma3_text": "gemma3",
    "gemma3n_text": "gemma3n",
    "gemma4_text": "gemma4",
    "gemma4_unified_text": "gemma4",
    "internlm": "llama",
    "glm4v_moe_text": "glm4_moe",
    "glm4v_text": "glm4",
    "glm_ocr_text": "glm4",
    "paddleocr_vl_text": "ernie4_5",
    "glm4_moe_lite": "deepseek_v3",
    "glm_moe_dsa": "deepseek_v32",
    "glm5_next_text": "glm5_next",
    "granite4_vision_text": "granite",
    "granite_docling_text": "granite",
    "internlm3": "llama",
    "hunyuan_vl_text": "hunyuan_v1_dense",
    "iquestcoder": "llama",
    "kimi_k2": "deepseek_v3",
    "llama4_text": "llama4",
    "llama_bidirec": "llama",
    "m2m_100": "bart",
    "marian": "bart",
    "mbart": "bart",
    "megatron-bert": "megatron_bert",
    "minimax_m3_text": "minimax_m3_vl_text",
    "mistral_large4_text": "mistral_large4",
    "modernbert-decoder": "modernbert_decoder",
    "mvp": "bart",
    "nemotron-nas": "nemotron_nas",
    "new": "gte",
    "openai-gpt": "openai_gpt",
    "nomic_bert_moe": "nomic_bert",
    "orion": "stablelm",
    "param2moe": "bailing_moe",
    "pegasus": "bart",
    "phi4_multimodal": "phi3",
    "plbart": "bart",
    "sarvam_mla": "deepseek_v3",
    "sarvam_moe": "bailing_moe",
    "siglip2_text_model": "clip_text_model",
    "siglip_text_model": "clip_text_model",
    "telechat3": "llama",
    "xlm-roberta": "roberta",
    "xlm-roberta-flash": "jina_embeddings_v3",
    "qwen2_vl_text": "qwen2",
    "qwen2_5_vl_text": "qwen2",
    "qwen2_5_omni_text": "qwen2",
    "qwen3_vl_text": "qwen3",
    "qwen3_vl_moe_text": "qwen3_moe",
    "qwen3_omni_moe_text": "qwen3_moe",
    "qwen3_5": "qwen3_next",
    "qwen4_exp": "qwen4_exp_text",
    "qwen3_5_moe": "qwen3_next",
    "qwen3_5_moe_text": "qwen3_next",
    "qwen3_5_text": "qwen3_next",
}
_REGISTERED: dict[str, str | type] = {}  # by model_type or architecture: what a program adds


def register(name: str, model: str | type) -> None:
    """Adds a family by its model_type or by the name of an architecture, or replaces one.

    `model` is a class that is called with (config, build) like those of the files here, or "package.module:Class". Its
    attribute `config_class`, a subclass of transformers' PretrainedConfig, reads config.json where transformers does
    not know the model_type.
    """
    _REGISTERED[name] = model


@functools.cache
def _plugged() -> dict[str, str]:
    """Models of installed packages (entry points), by the same names; a program's own registrations take precedence."""
    return {point.name: point.value for point in entry_points(group=GROUP)}


def added() -> Mapping[str, str | type]:
    """Returns the models that packages and programs have added, by model_type or architecture."""
    return {**_plugged(), **_REGISTERED}


def families() -> list[str]:
    """The model types that can be loaded, and architectures that were added, sorted."""
    files = {m.name for m in pkgutil.iter_modules(__path__) if not m.ispkg}
    dashed = {file for kind, file in _ALIASES.items() if "-" in kind and kind.replace("-", "_") == file}
    return sorted({*(files - dashed), *_ALIASES, *added()})


def built_in(kind: str) -> str | None:
    """The file here that a model type is built from; None for what a package has added."""
    return None if kind in added() else _ALIASES.get(kind, kind)


def added_for(kind: str, architectures: Iterable[str] | None) -> str | None:
    """The name under which something was added for a model: its architecture's comes before its type's."""
    return next((name for name in (*(architectures or ()), kind) if name in added()), None)


def added_class(kind: str, architectures: Iterable[str] | None) -> type | None:
    """Returns the class that was added for a model, by its architecture or type; None where none was."""
    name = added_for(kind, architectures)
    return None if name is None else load_class(name, added()[name])


def model_class(config: Any, overrides: Mapping[str, str] | None = None, backend: bool = False) -> type:
    """The class of a transformers config's family, a platform's own first; ValueError with what there is, if none.
    With `backend`, the one that runs any model by transformers' own code."""
    if backend:
        made: type = importlib.import_module("quintet.models.transformers").backend_class(config)
        return made
    kind, overrides = config.model_type, overrides or {}
    if kind in overrides:
        return load_class(kind, overrides[kind])
    own = added_class(kind, getattr(config, "architectures", None))
    if own is None and kind not in families():
        raise ValueError(
            f"model type {kind!r} is not supported; docs/models.md has a list; "
            "a package can add it with quintet.models.register()"
        )
    return own or built_in_class(kind)


def built_in_class(kind: str) -> type:
    """Returns the class of a model type's file here: the one model that the file defines."""
    module = importlib.import_module(f"{__name__}.{_ALIASES.get(kind, kind)}")
    base = importlib.import_module("quintet.layers.decoder").ModelBase
    own = [each for each in vars(module).values() if getattr(each, "__module__", None) == module.__name__]
    (model,) = (each for each in own if isinstance(each, type) and issubclass(each, base))
    return model


def load_class(name: str, model: str | type) -> type:
    """Returns a class, or imports "package.module:Class"; ValueError names what was added and cannot be imported."""
    if isinstance(model, type):
        return model
    module, _, attribute = model.partition(":")
    if not attribute:
        raise ValueError(f'model {name!r} comes from {model!r}, which names no class; write "package.module:Class"')
    try:
        found: type = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"model {name!r} comes from {model!r}, which cannot be loaded: {error}") from error
    return found
