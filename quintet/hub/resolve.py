"""Finds a model's folder, locally or on the Hugging Face hub, and reads what its JSON files say."""

import logging
import reprlib
from collections.abc import Callable, Iterable, Mapping
from fnmatch import fnmatch
from hashlib import sha256
from pathlib import Path
from typing import Any

from quintet.common.json_files import read_object
from quintet.common.plugins import load_plugins
from quintet.common.suggestions import nearest_name, refuse_unknown
from quintet.config import GENERATION_DEFAULTS, INSIDE, EngineConfig, Environment, read_environment
from quintet.config.cache_dir import cache_folder
from quintet.gguf.file import is_gguf
from quintet.gguf.file_choice import BESIDE, GGUFQuery, choose, choose_mmproj, parse_query, part_number
from quintet.hub.config_checks import MAX_INT32, check_architectures, check_entries, check_shape
from quintet.hub.downloads import download, exact_patterns, list_files
from quintet.hub.hf_config import HFConfig, Overrides, changed_config, read_config
from quintet.hub.hf_overrides import known_names, merge_overrides
from quintet.hub.legacy_configs import resolved_model_type, with_model_type
from quintet.hub.model_names import HUB_ADDRESS, HUB_ID
from quintet.hub.pooling_task import ENTRIES
from quintet.hub.wrappers import text_entries, text_model_type, why_raw
from quintet.model_loader.ctranslate2 import config_of as ctranslate2_config
from quintet.model_loader.ctranslate2 import is_ctranslate2
from quintet.model_loader.external_loaders import STORE_SCHEMES, STREAMER_FORMATS, fetch
from quintet.model_loader.gguf_config import gguf_entries, read_generation_config, wants_images
from quintet.model_loader.mistral_format import PARAMS, TEKKEN, config_of
from quintet.model_loader.weight_files import PICKLED, PICKLES, has_pickles, patterns_of
from quintet.models import added_for, families
from quintet.models.encoders.checkpoints import obeyed_entries
from quintet.sampling_params import MAX_STOP_IDS, ParameterError, SamplingParams

logger = logging.getLogger(__name__)
# entries of generation_config.json that change a text and are not obeyed -> the value that changes nothing
_NOT_OBEYED: Mapping[str, Any] = {
    **dict.fromkeys(("num_beams", "num_beam_groups", "typical_p", "encoder_repetition_penalty", "guidance_scale"), 1),
    **dict.fromkeys(("no_repeat_ngram_size", "epsilon_cutoff", "eta_cutoff", "min_new_tokens", "min_length"), 0),
    **dict.fromkeys(("penalty_alpha", "diversity_penalty", "top_h"), 0),
    **dict.fromkeys(("bad_words_ids", "suppress_tokens", "begin_suppress_tokens", "sequence_bias", "stop_strings")),
    **dict.fromkeys(("forced_bos_token_id", "forced_eos_token_id", "exponential_decay_length_penalty")),
}

_TEXT_FILES = ("*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken")  # configs, tokenizers, chat templates
_HEADS = ("sparse_linear.pt", "colbert_linear.pt")  # BGE M3's, beside its weights
_WEIGHTS = "*.safetensors"


# --------------------------------------------------------------------------------------------------------- the folder
def resolve_model(config: EngineConfig, environment: Environment | None = None) -> Path:
    """The model's folder, downloaded if need be, or its GGUF file. OSError or ValueError says what is wrong and what
    to do."""
    patterns = (*_TEXT_FILES, *_HEADS, *patterns_of(config.load_format), *["*.py"] * config.trust_remote_code)
    environment = environment or read_environment()
    folder = _resolve(config.model, config.revision, config, patterns, environment)
    if folder.is_dir() and not Path(config.model).expanduser().exists() and not _is_complete(folder, config):
        folder = _published_weights(config.model, config.revision, config, environment) or folder
    if (file := gguf_of(folder, config)) is not None:
        return file
    if not _has_config(folder, config):
        raise FileNotFoundError(_without_config(folder, config.model))
    if not _has_weights(folder, config):
        raise FileNotFoundError(_without_weights(folder, config))
    return folder


def gguf_of(path: Path, config: EngineConfig) -> Path | None:
    """The GGUF file that a path means: itself, or the only model in a folder that holds no other weights."""
    load_format = config.load_format
    other = load_format not in ("auto", "gguf", "bitsandbytes", "dummy")
    if path.is_file() and other:
        raise ValueError(f"load_format={load_format!r}, and {path} is a GGUF file; leave load_format out")
    if path.is_file():
        return path
    if other or _is_complete(path, config):
        return None
    files = sorted(path.glob("*.gguf"))
    found = [each for each in files if part_number(each.name) == 1 and not BESIDE.search(each.name)] or files
    if len(found) > 1:
        names = ", ".join(each.name for each in found[:8])
        raise ValueError(
            f"{path} holds {len(found)} GGUF models ({names}); give the path of one of them as the model, or "
            f"{path}:QUANTIZATION; `quintet serve --models {path}` serves all"
        )
    if not found and load_format == "gguf":
        raise FileNotFoundError(f"load_format='gguf', and {path} holds no GGUF file; give a model that does")
    return found[0] if found else None


def _is_complete(folder: Path, config: EngineConfig) -> bool:
    """Returns whether the folder has all that a model needs, in the layout that is asked for or ours."""
    named = bool((config.model_loader_extra_config or {}).get("tensorizer_uri"))
    weights = named or config.load_format == "dummy" or any(map(_is_not_empty(folder), patterns_of(config.load_format)))
    return weights and _has_config(folder, config) and config.load_format != "gguf"


def _has_config(folder: Path, config: EngineConfig) -> bool:
    """Returns whether there is a configuration of the model, in the config_format that may be read."""
    names = {"auto": ("config.json", PARAMS), "hf": ("config.json",), "mistral": (PARAMS,)}[config.config_format]
    return config.hf_config_path is not None or any((folder / name).is_file() for name in names)


def _has_weights(folder: Path, config: EngineConfig) -> bool:
    if config.load_format not in PICKLES and _is_complete(folder, config):
        return True
    return config.load_format in ("auto", *PICKLES) and has_pickles(folder)


def _is_not_empty(folder: Path) -> Callable[[str], bool]:
    return lambda pattern: any(folder.glob(pattern))


def _published_weights(name: str, revision: str | None, config: EngineConfig, environment: Environment) -> Path | None:
    """The GGUF file that a hub id means by itself, or the folder with what torch.save wrote; None if it has neither."""
    if config.load_format not in ("auto", "gguf") or name in INSIDE:
        return None
    files = list_files(name, revision, config, environment)
    if any(map(_is_gguf, files)):
        return _download_gguf(GGUFQuery(name), files, revision, config, environment)
    pickled = config.load_format == "auto" and any(fnmatch(file, each) for file in files for each in PICKLED)
    return download(name, revision, config, (*_TEXT_FILES, *PICKLED), environment) if pickled else None


def _is_gguf(name: str) -> bool:
    return name.endswith(".gguf")


def _one_of(wanted: GGUFQuery, revision: str | None, config: EngineConfig, environment: Environment) -> Path:
    """The GGUF file of a folder or a hub id that a name asks for."""
    folder = Path(wanted.repository).expanduser()
    if folder.is_dir():
        there = [each.relative_to(folder).as_posix() for each in folder.rglob("*.gguf")]
        return folder / choose(there, wanted)[0]
    if wanted.quantization is not None and "/" not in wanted.repository:
        raise FileNotFoundError(
            f"no file or folder {wanted.repository}:{wanted.quantization} here, and names of Ollama's library are not "
            "known; give OWNER/REPOSITORY:QUANTIZATION of the Hugging Face hub (such as Qwen/Qwen3-0.6B-GGUF:Q8_0), or "
            "a .gguf file"
        )
    _check_id(wanted.repository)
    return _download_gguf(
        wanted, list_files(wanted.repository, revision, config, environment), revision, config, environment
    )


def _download_gguf(
    wanted: GGUFQuery, files: Iterable[str], revision: str | None, config: EngineConfig, environment: Environment
) -> Path:
    parts, there = choose(files := list(files), wanted), files if config.mmproj is None and wants_images(config) else []
    parts += [each] if (each := choose_mmproj(there, parts[0])) else []
    logger.info("%s: %s", wanted.repository, ", ".join(parts))
    return download(wanted.repository, revision, config, exact_patterns(parts), environment) / parts[0]


def resolve_config(config: EngineConfig, model: Path, environment: Environment | None = None) -> Path:
    """Returns the path of the model's configuration: beside its weights, or in what hf_config_path names."""
    if config.hf_config_path is None:
        return _config_in(model, config)
    folder = _resolve(config.hf_config_path, config.revision, config, _TEXT_FILES, environment)
    if folder.is_dir() and not _has_config(folder, config.replace(hf_config_path=None)):
        raise FileNotFoundError(f"hf_config_path: {_without_config(folder, config.hf_config_path)}")
    return _config_in(folder, config)


def _config_in(folder: Path, config: EngineConfig) -> Path:
    """The folder, or Mistral's file in it where that counts."""
    own = folder.is_dir() and not (folder / "config.json").is_file() and config.config_format == "auto"
    return folder / PARAMS if (own and (folder / PARAMS).is_file()) or config.config_format == "mistral" else folder


def resolve_tokenizer(config: EngineConfig, model: Path, environment: Environment | None = None) -> Path:
    """The tokenizer's folder: the model's own unless the configuration names another."""
    if config.tokenizer is None and config.tokenizer_revision in (None, config.revision):
        return _tokenizer_in(model, config)
    name = config.tokenizer or config.model
    return _tokenizer_in(_resolve(name, config.tokenizer_revision, config, _TEXT_FILES, environment), config)


def _tokenizer_in(folder: Path, config: EngineConfig) -> Path:
    """The folder, or Mistral's file in it where that was asked for."""
    if config.tokenizer_mode != "mistral":
        return folder
    if not (folder / TEKKEN).is_file():
        raise FileNotFoundError(f"tokenizer_mode='mistral', and {folder} has no {TEKKEN}; leave it out")
    return folder / TEKKEN


def _resolve(
    name: str, revision: str | None, config: EngineConfig, patterns: Iterable[str], environment: Environment | None
) -> Path:
    local = Path(__file__).parents[1] / name if name in INSIDE else Path(name).expanduser()
    if local.is_dir():
        return local
    if name.startswith(STORE_SCHEMES):
        return _fetch_from_store(name, config, patterns)
    if name in INSIDE:
        raise FileNotFoundError(f"the model {name!r} is missing from {local}: the installation is not whole; reinstall")
    if local.is_file():
        if is_gguf(local):
            return local
        raise ValueError(
            f"model {name!r} is a file, and none of GGUF or whisper.cpp; give the folder that holds its config.json "
            "and *.safetensors"
        )
    if name.startswith(("/", "./", "../", "~")) and name.endswith(".gguf"):
        raise FileNotFoundError(f"no file {name!r} here; check the path")
    environment, wanted = environment or read_environment(), parse_query(name)
    if wanted != GGUFQuery(name):
        return _one_of(wanted, revision, config, environment)
    _check_id(name)
    return download(name, revision, config, patterns, environment)


def _fetch_from_store(address: str, config: EngineConfig, patterns: Iterable[str]) -> Path:
    """The folder where its files were put."""
    if config.load_format not in STREAMER_FORMATS:
        raise ValueError(
            f"{address} is in a store, which load_format='runai_streamer' reads, or 'runai_streamer_sharded'; give one"
        )
    kept = Path(config.download_dir).expanduser() if config.download_dir else cache_folder("stores")
    folder = kept / sha256(address.encode()).hexdigest()[:32]
    fetch(address, folder, patterns)
    return folder


def _check_id(name: str) -> None:
    if name.endswith(".gguf") and "/" not in name:
        raise FileNotFoundError(f"no file {name!r} here; check the path, or name one on the hub as owner/repo:quant")
    if (address := HUB_ADDRESS.match(name)) is not None:
        raise FileNotFoundError(f"{name!r} is an address of the hub; give its model alone: {name[address.end() :]!r}")
    if name.startswith((".", "/", "~", "\\")) or not HUB_ID.fullmatch(name) or "--" in name or ".." in name:
        raise FileNotFoundError(
            f"no folder {name!r} here, and it is no hub id such as 'Qwen/Qwen3-0.6B'; check the path, or use 'bundled'"
        )


def _without_config(folder: Path, name: str) -> str:
    if (folder / "adapter_config.json").is_file():
        return f"{name!r} is an adapter, not a model: merge it into its base model and save that"
    inner = sorted(path.parent.name for path in folder.glob("*/config.json"))
    hint = f"; there is one in {', '.join(inner[:3])}" if inner else ""
    return f"{name!r} has no config.json, so it is not a model in the Hugging Face layout{hint}"


def _without_weights(folder: Path, config: EngineConfig) -> str:
    name = config.model
    if (folder / "config.json").is_file() and (why := why_raw(read_object(folder / "config.json"))) is not None:
        return f"{name!r} cannot be run: {why}"
    there = ", only what torch.save wrote, which load_format='pt' reads" if has_pickles(folder) else ""
    wanted = ", ".join(patterns_of(config.load_format))
    return f"{name!r} has no {wanted} weights{there}; load_format='dummy' runs without weights"


# --------------------------------------------------------------------------------------------------- what its files say


def load_model_config(
    path: Path, overrides: Overrides = None, pooling: bool = False, mmproj: str | None = None
) -> HFConfig:
    """The model's configuration with the user's entries merged in. Never runs code from the folder. With `pooling`, its
    classes need not be such that generate text. `mmproj`: the encoder of a GGUF model."""
    load_plugins()
    file = path if path.is_file() else path / "config.json"
    own = path.name == PARAMS
    raw = config_of(path) if own else gguf_entries(path, mmproj) if path.is_file() else read_object(file)
    if path.is_dir() and "model_type" not in raw and is_ctranslate2(path):
        raw = ctranslate2_config(path)
    if (why := why_raw(raw)) is not None:
        raise ValueError(f"{file}: {why}")
    raw = with_model_type(raw)
    if callable(overrides):
        return _changed(raw, file, overrides, pooling)
    overrides = overrides or {}
    kind = overrides.get("model_type", raw.get("model_type"))
    if not isinstance(kind, str):
        found = "names no model_type" if kind is None else f"has model_type {reprlib.repr(kind)}, which is no name"
        raise ValueError(f"{file} {found}; supported: {', '.join(families())}")
    raw = text_entries(kind, raw)
    kind = overrides.get("model_type", raw["model_type"])
    architectures = {**raw, **overrides}.get("architectures")
    _check_kind(text_model_type(kind, raw, file), architectures, "model_type" in overrides)
    kind = resolved_model_type(kind, {**raw, **overrides})
    check_entries(raw, str(file))
    check_entries(overrides, "hf_overrides")
    if "model_type" not in overrides and not pooling:
        check_architectures(kind, architectures, str(file))
    config = read_config(kind, raw, file)
    if overrides:
        refuse_unknown("entry of hf_overrides", overrides, {*raw, *known_names(config), *(ENTRIES if pooling else ())})
        config = read_config(kind, merge_overrides(raw, overrides, config.to_dict()), file)
    check_shape(config.get_text_config(), str(file))
    return config


def _changed(raw: dict[str, Any], file: Path, change: Callable[[Any], Any], numbers: bool) -> HFConfig:
    """Returns the config that a user's function makes of transformers'; it is checked, and the entries of the file."""
    check_entries(raw, str(file))
    config = changed_config(raw, file, change)
    _check_kind(config.get_text_config().model_type, config.architectures, True)
    check_entries(config.to_dict(), "hf_overrides")
    if not numbers:
        check_architectures(config.model_type, config.architectures, "hf_overrides")
    check_shape(config.get_text_config(), "hf_overrides")
    return config


def _check_kind(kind: str, architectures: Any, given: bool) -> None:
    """ValueError if no family builds a type; names the nearest if a user gave it (`given`): files have no typos."""
    supported = families()
    if kind not in supported and not (isinstance(architectures, list) and added_for(kind, architectures)):
        match = nearest_name(kind, supported) if given else None
        hint = f" (the nearest is {match!r})" if match else ""
        raise ValueError(f"model type {reprlib.repr(kind)} is not supported{hint}; docs/models.md has a list")


def load_generation_config(
    path: Path, mode: str = "auto", overrides: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Sampling defaults under SamplingParams' names, and "eos_token_id": the list of every id that ends a text.

    `mode` is EngineConfig.generation_config. "quintet" takes no defaults; what ends a text is the model's matter
    and stays. ValueError names what no request could be served with.
    """
    path = path.parent if path.name == PARAMS else path
    own, other_file = path / "generation_config.json", None if mode in ("auto", "quintet") else _generation_file(mode)
    model = read_generation_config(path)
    chosen = read_object(other_file) if other_file else model if mode == "auto" else {}
    replaced = _sampling_names(overrides or {})
    defaults = {
        name: value for name, value in _sampling_names(chosen).items() if name in GENERATION_DEFAULTS
    } | replaced
    _check_defaults(defaults, replaced, other_file or own)
    if defaults:
        shown = ", ".join(f"{name}={value}" for name, value in defaults.items())
        logger.info("sampling defaults from the generation config: %s (generation_config='quintet' opts out)", shown)
    if passed_over := _passed_over(chosen):
        logger.warning("%s: not obeyed here: %s; set what you need in each request", other_file or own, passed_over)
    sources = [(other_file or own, chosen), (path if path.is_file() else own, model), (path / "config.json", {})]
    file, entries = next((each for each in sources if each[1].get("eos_token_id") is not None), sources[-1])
    if not entries and file.is_file():
        entries = read_object(file)
        entries = {**(text if isinstance(text := entries.get("text_config"), dict) else {}), **entries}
    return {**defaults, "eos_token_id": _eos_ids(entries.get("eos_token_id"), file)}


def _passed_over(entries: Mapping[str, Any]) -> str:
    """Returns the entries by which transformers would generate other text, and which are not obeyed here."""
    obeyed = obeyed_entries(entries)
    return ", ".join(f"{name}={reprlib.repr(entries[name])}" for name, plain in _NOT_OBEYED.items()
                     if entries.get(name) not in (None, plain, []) and name not in obeyed)  # fmt: skip


def _check_defaults(defaults: Mapping[str, Any], replaced: Mapping[str, Any], file: Path) -> None:
    try:
        SamplingParams(**defaults)
    except ParameterError as error:
        if error.parameter in replaced:
            raise ValueError(f"override_generation_config: {error}; correct it") from None
        raise ValueError(
            f"{file}: {error}; correct it, or take no sampling defaults from it with generation_config='quintet'"
        ) from None


def _eos_ids(value: Any, file: Path) -> list[int]:
    """The ids of an eos_token_id: one, a list of them, or none."""
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if len(ids) > MAX_STOP_IDS or not all(type(each) is int and 0 <= each <= MAX_INT32 for each in ids):
        raise ValueError(
            f"{file}: eos_token_id is {reprlib.repr(value)}, not a token id from 0 to {MAX_INT32} or a list of such; "
            "correct "
            "it, or leave it out where the tokenizer names the token"
        )
    return list(ids)


def _sampling_names(entries: Mapping[str, Any]) -> dict[str, Any]:
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


def separate_quantization_config(folder: Path) -> dict[str, Any] | None:
    """Returns ModelOpt's quantization config of a checkpoint, for a config.json that has none."""
    file = folder / "hf_quant_config.json"
    return {"quant_method": "modelopt", **read_object(file)} if file.is_file() else None
