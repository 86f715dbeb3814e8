"""`--models PATH`: a YAML file of models with their flags, or a folder of GGUF files and model folders."""

import dataclasses
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

from quintet.common.value_parsers import boolean, list_of, optional, text
from quintet.config import EngineConfig, read_environment, setting_fields
from quintet.router.config import SERVER_FIELDS
from quintet.router.models.config import ModelSpec, keep_alive, memory_size
from quintet.server.config import ServerConfig, check_adapters
from quintet.server.config_file import settings_by_field

MAX_MODELS = 256
_MAX_BYTES = 2**20  # bytes of the file
_MAX_NAME = 256  # characters
_NAME = re.compile(r"[^\s\x00-\x1f*?]+")
_PART = re.compile(r"-(\d{5})-of-\d{5}$")  # of a GGUF file in several parts
_OWN: dict[str, Callable[[Any], Any]] = {
    "name": text, "aliases": list_of(text), "pinned": boolean, "keep_alive": optional(keep_alive),
    "memory": optional(memory_size()),
}  # fmt: skip
REFUSED = ("headless", "root_path", "served_model_name")  # flags of `quintet serve` that --models leaves no meaning
_SHARED = SERVER_FIELDS.union(REFUSED, ("playground",))  # of the server that all models share
# of these, what each engine has as well
_BOTH = {"drain_timeout", "log_format", "log_level", "max_body_bytes", "max_header_bytes",
         "max_queued_bytes", "max_upload_bytes"}  # fmt: skip
_RUNTIME = ("allow_runtime_lora", "lora_cache_dir", "lora_hub_repos")  # an engine's own routes are not reached
_SIZES = ("kv_cache_memory_bytes", "num_pages")


class _Line(NamedTuple):
    """Key and value of the file."""

    key: str
    value: Any
    line: int


def read_models(path: str, engine: dict[str, Any], server: dict[str, Any]) -> list[ModelSpec]:
    """Returns the models of a file or folder. `engine`, `server`: settings of all models that do not set them.

    ValueError has file, line, key and remedy.
    """
    server = {key: value for key, value in server.items() if key in _BOTH or key not in _SHARED}
    place = Path(path)
    if place.is_dir():
        specs = [
            _spec(name, [_Line("model", found, 0)], str(place), (engine, server)) for name, found in _folder(place)
        ]
    else:
        specs = [_spec(name, lines, path, (engine, server)) for name, lines in _entries(path)]
    if not 0 < len(specs) <= MAX_MODELS:
        raise ValueError(f"--models {path}: {len(specs)} models, and 1 to {MAX_MODELS} may be served; "
                         "name models, or put .gguf files or model folders there")  # fmt: skip
    _check_names(specs, path)
    return specs


def _folder(place: Path) -> Iterable[tuple[str, str]]:
    for each in sorted(place.iterdir()):
        stem = each.name[: -len(".gguf")]
        if each.name.startswith(".") or stem.startswith("mmproj"):
            continue
        if each.is_file() and each.suffix == ".gguf":
            part = _PART.search(stem)
            if part is None or int(part[1]) == 1:
                yield _PART.sub("", stem), str(each)
        elif each.is_dir() and ((each / "config.json").is_file() or any(each.glob("*.gguf"))):
            yield each.name, str(each)


def _entries(path: str) -> Iterable[tuple[str, list[_Line]]]:
    """Yields name and settings of each model of a YAML file."""
    import yaml

    try:
        if Path(path).suffix == ".gguf":
            raise ValueError(f"--models {path}: is one model; give it as MODEL, or its folder as --models")
        content = Path(path).read_bytes()
        if len(content) > _MAX_BYTES:
            raise ValueError(f"--models {path}: has {len(content)} bytes, and {_MAX_BYTES} is the most")
        loader = yaml.SafeLoader(content)
        root = loader.get_single_node()
        if isinstance(root, yaml.MappingNode) and [key.value for key, _ in root.value] == ["models"]:
            root = root.value[0][1]
        if isinstance(root, yaml.SequenceNode):
            listed: list[tuple[str | None, Any, int]] = [(None, node, node.start_mark.line + 1) for node in root.value]
        elif isinstance(root, yaml.MappingNode):
            listed = [(str(key.value), node, key.start_mark.line + 1) for key, node in root.value]
        else:
            raise ValueError(
                f"--models {path}: must be a mapping of names to models such as `chat: {{model: bundled}}`, or a list "
                "of them"
            )
        for name, node, line in listed:
            yield _entry(name, line, _lines(loader, node, path), path)
    except (yaml.YAMLError, OSError, RecursionError) as error:
        raise ValueError(f"--models {path}: the file cannot be read: {' '.join(str(error).split())}") from None


def _lines(loader: Any, node: Any, path: str) -> list[_Line]:
    """Returns the settings of one model; a text alone is its `model`."""
    if node.id == "scalar":
        return [_Line("model", node.value, node.start_mark.line + 1)]
    if node.id != "mapping":
        raise ValueError(f"{path}, line {node.start_mark.line + 1}: must be a model or a mapping of its flags")
    keys = [_field(str(key.value)) for key, _ in node.value]
    for key, _ in node.value:
        if keys.count(_field(str(key.value))) > 1:
            raise ValueError(f"{path}, line {key.start_mark.line + 1}: {key.value} is given twice; keep one")
    loader.flatten_mapping(node)  # of `<<: *other`; a key of its own comes later, and counts
    lines = {
        _field(str(key.value)): _Line(
            str(key.value), loader.construct_object(value, deep=True), key.start_mark.line + 1
        )
        for key, value in node.value
    }
    return list(lines.values())


def _entry(name: str | None, line: int, lines: list[_Line], path: str) -> tuple[str, list[_Line]]:
    by_key = {_field(each.key): each.value for each in lines}
    if "model" not in by_key:
        raise ValueError(f"{path}, line {line}: the model {name or ''} has no `model:`; give its folder, GGUF file or "
                         "hub id")  # fmt: skip
    given = by_key.get("name")
    return str(name or given or by_key["model"]), lines


def _spec(name: str, lines: list[_Line], path: str, defaults: tuple[dict[str, Any], dict[str, Any]]) -> ModelSpec:
    """ValueError with the line and the key."""
    own: dict[str, Any] = {}
    given: dict[str, Any] = {}
    places: dict[str, str] = {}  # of each setting
    for each in lines:
        plain = _field(each.key)
        place = f"{path}, line {each.line}, model {name!r}" if each.line else f"{path}, model {name!r}"
        if plain in _SHARED:
            raise ValueError(f"{place}: {each.key} is of the server that all models share; give it as a flag of "
                             "`quintet serve`")  # fmt: skip
        if plain not in _OWN:
            settings = settings_by_field({each.key: each.value}, place, _OWN).settings
            given.update(settings)
            places.update(dict.fromkeys(settings, place))
            continue
        try:
            own[plain] = _OWN[plain](each.value)
        except ValueError as error:
            raise ValueError(f"{place}: {each.key} {error}") from None
    try:
        return _checked(name, own, given, defaults)
    except ValueError as error:
        words = re.findall(r"\w+", str(error))
        place = next((places[word] for word in words if word in places), f"{path}, model {name!r}")
        raise ValueError(f"{place}: {error}") from None


def _checked(
    name: str, own: dict[str, Any], given: dict[str, Any], defaults: tuple[dict[str, Any], dict[str, Any]]
) -> ModelSpec:
    server_names = {each.name for each in setting_fields(ServerConfig)}
    server = {**defaults[1], **{key: given.pop(key) for key in list(given) if key in server_names}}
    engine = {"capture_decode_ahead": True, **defaults[0], **given}
    config = read_environment().apply(EngineConfig.from_kwargs(**engine))
    if config.nnodes > 1:
        raise ValueError("nnodes: a model of --models runs on this machine alone; serve one on several by itself")
    for parser in ("reasoning_parser", "reasoning_parser_plugin"):  # vLLM has them there, too
        if server.get(parser) is None:
            server[parser] = getattr(config.structured_outputs_config, parser)
    if given_names := [name for name in _RUNTIME if server.get(name)]:
        raise ValueError(f"{given_names[0]}: adapters of --models are those of lora_modules; leave it out, or serve "
                         "the model by itself")  # fmt: skip
    sized = any(getattr(config, each, None) is not None for each in _SIZES)
    own.pop("name", None)
    if "gpu_memory_utilization" in given:
        own.setdefault("memory", config.gpu_memory_utilization)
    served = ServerConfig(**server, served_model_name=(name,))
    check_adapters(served, config.enable_lora, (name,))
    return ModelSpec(name, config, served, cache_is_sized=sized, **own)


def _field(key: str) -> str:
    return key.lstrip("-").replace("-", "_")


def _check_names(specs: list[ModelSpec], path: str) -> None:
    taken: dict[str, str] = {}
    for spec in specs:
        if len(spec.name) > _MAX_NAME or not _NAME.fullmatch(spec.name):
            raise ValueError(f"{path}: the name {spec.name[:_MAX_NAME]!r} must be 1 to {_MAX_NAME} characters without "
                             "spaces, * and ?; give another")  # fmt: skip
        for name in (spec.name, *spec.aliases, *(each.name for each in spec.server.lora_modules)):
            if name in taken:
                raise ValueError(f"{path}: {name!r} names both {taken[name]!r} and {spec.name!r}; rename one")
            taken[name] = spec.name


def plain_fields(config: EngineConfig | ServerConfig) -> dict[str, Any]:
    """Returns the settings by field, to be sent to another process."""
    return {each.name: getattr(config, each.name) for each in dataclasses.fields(config)}
