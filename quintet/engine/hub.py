"""Finds a model's folder, locally or on the Hugging Face hub, and reads what its JSON files say."""

import logging
import re
import reprlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from quintet.config import BUNDLED, GENERATION_DEFAULTS, EngineConfig, Environment, read_environment
from quintet.engine.config_checks import MOST, check_architectures, check_entries, check_shape
from quintet.engine.downloads import download, exactly, listed
from quintet.engine.gguf_source import model_of
from quintet.engine.json_object import read_object
from quintet.engine.model_config import ModelConfig, read_config
from quintet.engine.plugins import load_plugins
from quintet.gguf.choice import Asked, asked, choose
from quintet.gguf.config import config as gguf_config
from quintet.gguf.config import generation
from quintet.gguf.file import SPLIT, is_gguf
from quintet.names import nearest, refuse_unknown
from quintet.sampling_params import MAX_STOP_IDS, ParameterError, SamplingParams

logger = logging.getLogger(__name__)

_TEXT_FILES = ("*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken")  # configs, tokenizers, chat templates
_WEIGHTS = "*.safetensors"
_PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")

# What a rotary embedding's parameters may hold, over all the kinds there are.
_ROPE_KEYS = (
    "attention_factor", "beta_fast", "beta_slow", "factor", "full_attention", "high_freq_factor", "long_factor",
    "long_mscale", "low_freq_factor", "mscale", "mscale_all_dim", "original_max_position_embeddings",
    "partial_rotary_factor", "rope_theta", "rope_type", "short_factor", "short_mscale", "sliding_attention",
    "truncate", "type",
)  # fmt: skip
_ROPE_FIELDS = ("rope_parameters", "rope_scaling")  # transformers' name since 5.0, and before


# --------------------------------------------------------------------------------------------------------- the folder


def resolve_model(config: EngineConfig, environment: Environment | None = None) -> Path:
    """The model's folder, downloaded if need be, or its GGUF file. OSError or ValueError says what is wrong and what
    to do."""
    weights = config.load_format != "dummy"
    patterns = (*_TEXT_FILES, _WEIGHTS) if weights else _TEXT_FILES
    environment = environment or read_environment()
    folder = _resolve(config.model, config.revision, config, patterns, environment)
    if folder.is_dir() and not Path(config.model).expanduser().exists() and not _whole(folder, config.load_format):
        folder = _published(config.model, config.revision, config, environment) or folder
    if (file := gguf_of(folder, config.load_format)) is not None:
        return file
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(_without_config(folder, config.model))
    if weights and not any(folder.glob(_WEIGHTS)):
        raise FileNotFoundError(_without_weights(folder, config.model))
    return folder


def gguf_of(path: Path, load_format: str) -> Path | None:
    """The GGUF file that a path means: itself, or the only model in a folder that holds no other weights."""
    if path.is_file() and load_format == "safetensors":
        raise ValueError(f"load_format='safetensors', and {path} is a GGUF file; leave load_format out")
    if path.is_file():
        return path
    if load_format == "safetensors" or _whole(path, load_format):
        return None
    found = [each for each in sorted(path.glob("*.gguf")) if _begins(each.name)]
    if len(found) > 1:
        names = ", ".join(each.name for each in found[:8])
        raise ValueError(
            f"{path} holds {len(found)} GGUF models ({names}); give the path of one of them as the model, or "
            f"{path}:QUANTIZATION"
        )
    if not found and load_format == "gguf":
        raise FileNotFoundError(f"load_format='gguf', and {path} holds no GGUF file; give a model that does")
    return found[0] if found else None


def _whole(folder: Path, load_format: str) -> bool:
    """Whether all is there that a model needs, in the layout that is asked for or ours."""
    weights = load_format == "dummy" or any(folder.glob(_WEIGHTS))
    return weights and (folder / "config.json").is_file() and load_format != "gguf"


def _published(name: str, revision: str | None, config: EngineConfig, environment: Environment) -> Path | None:
    """The GGUF file that a hub id means by itself; None where it has none."""
    if config.load_format == "safetensors" or name == BUNDLED:
        return None
    files = listed(name, revision, config, environment)
    return _fetched(Asked(name), files, revision, config, environment) if any(map(_is_gguf, files)) else None


def _is_gguf(name: str) -> bool:
    return name.endswith(".gguf")


def _one_of(wanted: Asked, revision: str | None, config: EngineConfig, environment: Environment) -> Path:
    """The GGUF file of a folder or a hub id that a name asks for."""
    folder = Path(wanted.repository).expanduser()
    if folder.is_dir():
        there = [each.relative_to(folder).as_posix() for each in folder.rglob("*.gguf")]
        return folder / choose(there, wanted)[0]
    _check_id(wanted.repository)
    return _fetched(wanted, listed(wanted.repository, revision, config, environment), revision, config, environment)


def _fetched(
    wanted: Asked, files: Iterable[str], revision: str | None, config: EngineConfig, environment: Environment
) -> Path:
    parts = choose(files, wanted)
    logger.info("%s: %s", wanted.repository, ", ".join(parts))
    return download(wanted.repository, revision, config, exactly(parts), environment) / parts[0]


def _begins(name: str) -> bool:
    """Whether a file is a model, or the first that one was split into."""
    split = SPLIT.fullmatch(name)
    return split is None or int(split[2]) == 1


def resolve_tokenizer(config: EngineConfig, model: Path, environment: Environment | None = None) -> Path:
    """The tokenizer's folder: the model's own unless the configuration names another."""
    if config.tokenizer is None and config.tokenizer_revision in (None, config.revision):
        return model
    name = config.tokenizer or config.model
    return _resolve(name, config.tokenizer_revision, config, _TEXT_FILES, environment)


def _resolve(
    name: str, revision: str | None, config: EngineConfig, patterns: Iterable[str], environment: Environment | None
) -> Path:
    local = Path(__file__).parents[1] / BUNDLED if name == BUNDLED else Path(name).expanduser()
    if local.is_dir():
        return local
    if name == BUNDLED:
        raise FileNotFoundError(f"the bundled model is missing from {local}: the installation is not whole; reinstall")
    if local.is_file():
        if is_gguf(local):
            return local
        raise ValueError(
            f"model {name!r} is a file, and no GGUF file; give the folder that holds its config.json and *.safetensors"
        )
    environment, wanted = environment or read_environment(), asked(name)
    if wanted != Asked(name):
        return _one_of(wanted, revision, config, environment)
    _check_id(name)
    return download(name, revision, config, patterns, environment)


def _check_id(name: str) -> None:
    if name.startswith((".", "/", "~", "\\")) or not _HUB_ID.fullmatch(name) or "--" in name or ".." in name:
        raise FileNotFoundError(
            f"no folder {name!r} here, and it is no hub id such as 'Qwen/Qwen3-0.6B'; check the path, or use 'bundled'"
        )


def _without_config(folder: Path, name: str) -> str:
    if (folder / "adapter_config.json").is_file():
        return f"{name!r} is an adapter, not a model: merge it into its base model and save that"
    inner = sorted(path.parent.name for path in folder.glob("*/config.json"))
    hint = f"; there is one in {', '.join(inner[:3])}" if inner else ""
    return f"{name!r} has no config.json, so it is not a model in the Hugging Face layout{hint}"


def _without_weights(folder: Path, name: str) -> str:
    pickled = sorted(path.name for pattern in _PICKLED for path in folder.glob(pattern))
    what = f", only pickled ones ({', '.join(pickled[:3])})" if pickled else ""
    return (
        f"{name!r} has no *.safetensors weights{what}. A pickle runs code when it is read, so quintet reads none. "
        "To convert, where you trust the file: "
        f"AutoModelForCausalLM.from_pretrained({name!r}).save_pretrained('converted'), then use model 'converted'. "
        "load_format='dummy' runs without weights"
    )


# --------------------------------------------------------------------------------------------------- what its files say


def load_model_config(path: Path, overrides: Mapping[str, Any] | None = None) -> ModelConfig:
    """The model's configuration with the user's entries merged in. Never runs code from the folder."""
    from quintet.models import added_for, families

    load_plugins()
    file, overrides = path if path.is_file() else path / "config.json", overrides or {}
    raw = gguf_config(model_of(path)) if path.is_file() else read_object(file)
    kind = overrides.get("model_type", raw.get("model_type"))
    if not isinstance(kind, str):
        raise ValueError(f"{file} names no model_type; supported: {', '.join(families())}")
    supported, architectures = families(), {**raw, **overrides}.get("architectures")
    if kind not in supported and not (isinstance(architectures, list) and added_for(kind, architectures)):
        match = nearest(kind, supported) if "model_type" in overrides else None  # in a file nobody misspelt it
        hint = f" (the nearest is {match!r})" if match else ""
        raise ValueError(f"model type {reprlib.repr(kind)} is not supported{hint}; supported: {', '.join(supported)}")
    check_entries(raw, str(file))
    check_entries(overrides, "hf_overrides")
    if "model_type" not in overrides:
        check_architectures(kind, architectures, str(file))
    config = read_config(kind, raw, file)
    if overrides:
        refuse_unknown("entry of hf_overrides", overrides, {*raw, *_known(config)})
        config = read_config(kind, _merge(raw, overrides, config.to_dict()), file)
    check_shape(config.get_text_config(), str(file))
    return config


def _known(config: ModelConfig) -> set[str]:
    names = set(vars(config))
    if "rope_parameters" in names:
        names |= {"rope_scaling", "rope_theta", "partial_rotary_factor"}
    return names


def _merge(raw: dict[str, Any], overrides: Mapping[str, Any], known: Mapping[str, Any]) -> dict[str, Any]:
    """Deep: an object is merged entry by entry, anything else is replaced. `known` refuses typos inside objects."""
    merged = dict(raw)
    for name, value in _where_rope_lives(raw, overrides).items():
        old = raw.get(name)
        if name in _ROPE_FIELDS and isinstance(value, Mapping):
            merged[name] = _merge_rope(old if isinstance(old, dict) else {}, value)
        elif isinstance(value, Mapping) and isinstance(known.get(name), Mapping):
            inner = known[name]
            if inner and not all(isinstance(key, int) for key in inner):
                refuse_unknown(f"entry of hf_overrides[{name!r}]", value, {*inner, *(old or {})})
            merged[name] = _merge(old or {}, value, inner)
        else:
            merged[name] = value
    return merged


def _where_rope_lives(raw: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """The overrides under the name that this config.json uses, for of two names transformers would drop one."""
    home = next((name for name in _ROPE_FIELDS if raw.get(name)), None)
    if home is None:
        return dict(overrides)
    moved = {home if name in _ROPE_FIELDS else name: value for name, value in overrides.items()}
    for name in ("rope_theta", "partial_rotary_factor"):
        inner = moved.get(home, raw[home])
        if name in moved and name in raw[home] and isinstance(inner, Mapping):
            moved[home] = {**inner, name: moved.pop(name)}
    return moved


def _merge_rope(old: dict[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """Entries of one kind mean nothing to another, so a change of kind starts afresh, but for the base."""
    refuse_unknown("entry of the rope parameters", new, _ROPE_KEYS)
    kinds = [entries.get("rope_type", entries.get("type")) for entries in (old, new)]
    if kinds[1] is not None and kinds[0] != kinds[1]:
        old = {name: old[name] for name in ("rope_theta", "partial_rotary_factor") if name in old}
    inner = {
        name: _merge_rope(old.get(name) or {}, value) if isinstance(value, Mapping) else value
        for name, value in new.items()
    }
    return {**old, **inner}


def load_generation_config(
    path: Path, mode: str = "auto", overrides: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Sampling defaults under SamplingParams' names, and "eos_token_id": the list of every id that ends a text.

    `mode` is EngineConfig.generation_config. "quintet" takes no defaults; what ends a text is the model's matter
    and stays. ValueError names what no request could be served with.
    """
    own, elsewhere = path / "generation_config.json", None if mode in ("auto", "quintet") else _generation_file(mode)
    model = generation(model_of(path)) if path.is_file() else read_object(own) if own.is_file() else {}
    chosen = read_object(elsewhere) if elsewhere else model if mode == "auto" else {}
    replaced = _renamed(overrides or {})
    defaults = {name: value for name, value in _renamed(chosen).items() if name in GENERATION_DEFAULTS} | replaced
    _check_defaults(defaults, replaced, elsewhere or own)
    if defaults:
        shown = ", ".join(f"{name}={value}" for name, value in defaults.items())
        logger.info("sampling defaults from the generation config: %s (generation_config='quintet' opts out)", shown)
    sources = [(elsewhere or own, chosen), (path if path.is_file() else own, model), (path / "config.json", {})]
    file, said = next((each for each in sources if each[1].get("eos_token_id") is not None), sources[-1])
    if not said and file.is_file():
        said = read_object(file)
    return {**defaults, "eos_token_id": _ends(said.get("eos_token_id"), file)}


def _check_defaults(defaults: Mapping[str, Any], replaced: Mapping[str, Any], file: Path) -> None:
    try:
        SamplingParams(**defaults)
    except ParameterError as error:
        if error.parameter in replaced:
            raise ValueError(f"override_generation_config: {error}; correct it") from None
        raise ValueError(
            f"{file}: {error}; correct it, or take no sampling defaults from it with generation_config='quintet'"
        ) from None


def _ends(said: Any, file: Path) -> list[int]:
    """The ids of an eos_token_id: one, a list of them, or none."""
    ids = [] if said is None else said if isinstance(said, list) else [said]
    if len(ids) > MAX_STOP_IDS or not all(type(each) is int and 0 <= each <= MOST for each in ids):
        raise ValueError(
            f"{file}: eos_token_id is {reprlib.repr(said)}, not a token id from 0 to {MOST} or a list of such; correct "
            "it, or leave it out where the tokenizer names the token"
        )
    return list(ids)


def _renamed(entries: Mapping[str, Any]) -> dict[str, Any]:
    """Transformers' names to ours. A model that says do_sample=false wants to be greedy, whatever else it says."""
    renamed = {"max_tokens" if name == "max_new_tokens" else name: value for name, value in entries.items()}
    if entries.get("do_sample") is False:
        renamed["temperature"] = 0.0
    return {name: value for name, value in renamed.items() if value is not None}


def _generation_file(mode: str) -> Path:
    given = Path(mode).expanduser()
    file = given / "generation_config.json" if given.is_dir() else given
    if not file.is_file():
        raise FileNotFoundError(f"generation_config={mode!r} is not auto, quintet, or a folder with that file")
    return file


def quantization_beside(folder: Path) -> dict[str, Any] | None:
    """What ModelOpt says of a checkpoint's weights, where config.json says nothing."""
    file = folder / "hf_quant_config.json"
    return {"quant_method": "modelopt", **read_object(file)} if file.is_file() else None
