"""PEFT's adapter_config.json: the entries that change results, and refusals of what is not supported."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quintet.common.json_files import read_object
from quintet.lora.errors import AdapterError, shown
from quintet.lora.name_patterns import ModulePatterns, PatternError

CONFIG, WEIGHTS, _PICKLED = "adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"
MAX_CONFIG = 2**20  # bytes
MAX_RANK = 2**20  # a number that is no rank of anything
EXPERTS = "experts"  # the module that parameters are of where target_parameters names no module

# Initializations that leave the base model's weights as they are; PEFT compares some without regard to case.
_KEEP_BASE = ("gaussian", "eva", "loftq", "orthogonal", "mica", "true", "false")
_CHANGE_BASE = ("pissa", "olora", "corda", "lora_ga")  # or begin with it
_MERGE = "merge the adapter into its base model with PEFT (merge_and_unload) and load the result"
# Entry -> what it is. Each is refused where it is set: with it, W + scaling * B A is not what the model computes.
_REFUSED = {
    "layer_replication": "repeated layers",
    "alora_invocation_tokens": "activated LoRA, which begins at a token of the prompt",
    "trainable_token_indices": "trained rows of the token embedding",
    "megatron_config": "parallel layers of Megatron",
    "use_qalora": "quantization-aware LoRA",
    "use_bdlora": "block-diagonal LoRA",
    "arrow_config": "routing among adapters",
    "kasa_config": "KaSA, which changes the base weights",
    "monteclora_config": "Monte Carlo LoRA",
}
# Entries that look like a variant of LoRA, and change training or nothing that a served model computes.
_HARMLESS = {"use_rslora", "use_dora", "eva_config", "corda_config", "loftq_config", "lora_ga_config", "velora_config"}
_HARMLESS |= {"runtime_config"}


@dataclass(frozen=True)
class PeftLoraConfig:
    """Entries of adapter_config.json that change results, checked."""

    place: Path
    rank: int
    alpha: float
    use_rslora: bool
    use_dora: bool
    lora_bias: bool
    fan_in_fan_out: bool  # changes nothing of A and B; a hint at how the base weight is stored
    ensure_weight_tying: bool
    base_model: str
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]
    target_parameters: Mapping[str, Sequence[str]]  # by the end of a module's name: its parameters that have LoRA
    _ranks: ModulePatterns[int]
    _alphas: ModulePatterns[float]

    def rank_of(self, module: str) -> int:
        """Rank that a module has by `r` and `rank_pattern`."""
        return self.rank if (rank := self._find("rank_pattern", self._ranks, module)) is None else rank

    def scaling_of(self, module: str, rank: int) -> float:
        """Factor of B A of a module: alpha / rank, or alpha / sqrt(rank) with use_rslora."""
        alpha = self._find("alpha_pattern", self._alphas, module)
        return (self.alpha if alpha is None else alpha) / (math.sqrt(rank) if self.use_rslora else rank)

    def parameters_of(self, module: str) -> list[str]:
        """Parameters of a module that have LoRA of their own, in the order in which PEFT wraps them."""
        parts, found = module.split("."), set[str]()
        for at in range(len(parts)):
            found.update(self.target_parameters.get(".".join(parts[at:]), ()))
        return sorted(found, key=lambda name: (name == "down_proj", name))  # as transformers' experts declare them

    def canonical(self) -> bytes:
        """Bytes that differ between two configurations if results can. The first pattern that matches counts, so their
        order does too."""
        entries = [
            ["r", self.rank], ["lora_alpha", self.alpha], ["use_rslora", self.use_rslora], ["use_dora", self.use_dora],
            ["lora_bias", self.lora_bias], ["rank_pattern", list(self.rank_pattern.items())],
            ["alpha_pattern", list(self.alpha_pattern.items())],
            *([["target_parameters", sorted(self.target_parameters.items())]] if self.target_parameters else []),
        ]  # fmt: skip
        return json.dumps(entries).encode()

    def _find(self, entry: str, patterns: ModulePatterns[Any], module: str) -> Any:
        try:
            return patterns.find(module)
        except PatternError as error:
            raise AdapterError(self.place, f"entry {entry}: {error}") from None


def read_peft_config(folder: Path) -> PeftLoraConfig:
    """Reads and checks adapter_config.json. AdapterError names the entry that is wrong or not supported."""
    file = folder / CONFIG
    if not file.is_file():
        raise AdapterError(folder, _without_config(folder))
    if (size := file.stat().st_size) > MAX_CONFIG:
        raise AdapterError(file, f"has {size} bytes, more than the {MAX_CONFIG} of any adapter; fetch it again")
    try:
        entries = read_object(file)
    except ValueError as error:
        raise AdapterError(folder, str(error).replace(str(file), file.name)) from None
    return parse_peft_config(entries, file)


def weights_file(folder: Path) -> Path:
    """Returns the file of an adapter's tensors. AdapterError if it has none that is read."""
    file = folder / WEIGHTS
    if file.is_file():
        return file
    if (folder / _PICKLED).is_file():
        raise AdapterError(
            folder, f"has {_PICKLED}, which would be unpickled and could run code, and no {WEIGHTS}; "
            "where you trust it, convert it: load it with PEFT (PeftModel.from_pretrained), then call save_pretrained",
        )  # fmt: skip
    raise AdapterError(folder, f"has no {WEIGHTS}; give the folder that PEFT's save_pretrained wrote")


def parse_peft_config(entries: Mapping[str, Any], place: Path) -> PeftLoraConfig:
    """Checks the entries of an adapter_config.json; `place` is what errors name."""
    _refuse(entries, place)
    read = _Entries(entries, place)
    ranks = read.pattern("rank_pattern", lambda entry, value: read.rank(entry, value))
    alphas = read.pattern("alpha_pattern", lambda entry, value: read.number(entry, value))
    base = entries.get("base_model_name_or_path")
    return PeftLoraConfig(
        place=place,
        rank=read.rank("r", entries.get("r", 8)),  # PEFT's defaults
        alpha=read.number("lora_alpha", entries.get("lora_alpha", 8)),
        use_rslora=read.flag("use_rslora"),
        use_dora=read.flag("use_dora"),
        lora_bias=read.flag("lora_bias"),
        fan_in_fan_out=read.flag("fan_in_fan_out"),
        ensure_weight_tying=read.flag("ensure_weight_tying"),
        base_model=base if isinstance(base, str) else "",
        rank_pattern=ranks,
        alpha_pattern=alphas,
        target_parameters=read.parameters("target_parameters"),
        _ranks=read.patterns("rank_pattern", ranks),
        _alphas=read.patterns("alpha_pattern", alphas),
    )


@dataclass(frozen=True)
class _Entries:
    entries: Mapping[str, Any]
    place: Path

    def rank(self, entry: str, value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MAX_RANK:
            raise AdapterError(self.place, f"entry {entry} is {shown(value)}; a rank is an integer from 1 on")
        return value

    def number(self, entry: str, value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= 1e9:  # NaN too
            raise AdapterError(self.place, f"entry {entry} is {shown(value)}; it must be a number of ordinary size")
        return float(value)

    def flag(self, entry: str) -> bool:
        value = self.entries.get(entry)
        if value is not None and not isinstance(value, bool):
            raise AdapterError(self.place, f"entry {entry} is {shown(value)}; it must be true or false")
        return bool(value)

    def parameters(self, entry: str) -> dict[str, list[str]]:
        """Ends of names of parameters, by the end of their module's name."""
        value = self.entries.get(entry) or []
        if not isinstance(value, list) or not all(isinstance(each, str) and each for each in value):
            raise AdapterError(self.place, f"entry {entry} is {shown(value)}; it must be a list of names")
        found: dict[str, list[str]] = {}
        for target in sorted(value):
            holder, _, name = target.rpartition(".")
            found.setdefault(holder or EXPERTS, []).append(name)
        return found

    def pattern(self, entry: str, check: Any) -> dict[str, Any]:
        value = self.entries.get(entry)
        if value is None:
            return {}
        if not isinstance(value, dict):
            raise AdapterError(self.place, f"entry {entry} is {shown(value)}; it must be an object of patterns")
        return {key: check(f"{entry}[{shown(key)}]", each) for key, each in value.items()}

    def patterns(self, entry: str, values: Mapping[str, Any]) -> ModulePatterns[Any]:
        try:
            return ModulePatterns(values)
        except PatternError as error:
            raise AdapterError(self.place, f"entry {entry}: {error}; write the modules' names out") from None


def _refuse(entries: Mapping[str, Any], place: Path) -> None:
    kind = entries.get("peft_type")
    if not isinstance(kind, str) or kind.upper() != "LORA":
        raise AdapterError(place, f"entry peft_type is {shown(kind)}, and only 'LORA' is supported; {_MERGE}")
    for entry, what in _REFUSED.items():
        if entries.get(entry) not in (None, False, [], {}):
            raise AdapterError(place, f"entry {entry} ({what}) is set, and is not supported; {_MERGE}")
    for entry, value in entries.items():
        variant = entry.startswith("use_") or entry.endswith("_config")
        if variant and entry not in _HARMLESS and entry not in _REFUSED and value not in (None, False, [], {}):
            raise AdapterError(
                place,
                f"entry {shown(entry)} is not known and reads like a variant of LoRA; {_MERGE}, or set it to null",
            )
    _refuse_initialization(entries.get("init_lora_weights"), place)


def _refuse_initialization(value: Any, place: Path) -> None:
    if value is None or isinstance(value, bool):
        return
    name = value.lower() if isinstance(value, str) else ""
    if name.startswith(_CHANGE_BASE):
        raise AdapterError(
            place,
            f"entry init_lora_weights is {shown(value)}: the training changed the base weights too, so that A and B do "
            "not fit the original model; save the adapter again with PEFT's "
            "save_pretrained(folder, path_initial_model_for_weight_conversion=...), which sets the entry to true",
        )
    if name not in _KEEP_BASE:
        raise AdapterError(
            place,
            f"entry init_lora_weights is {shown(value)}, which is not known; if it leaves the base weights "
            "as they are, set it to true",
        )


def _without_config(folder: Path) -> str:
    if not folder.is_dir():
        return "is no folder; give the folder that PEFT's save_pretrained wrote"
    inner = sorted(each.parent.name for each in folder.glob(f"*/{CONFIG}"))[:3]
    if inner:
        return f"has no {CONFIG}, and its folders {', '.join(inner)} have one; give one of these"
    if (folder / "config.json").is_file():
        return f"has no {CONFIG} but a config.json: it is a model, not an adapter; load it as a model"
    return f"has no {CONFIG}; give the folder that PEFT's save_pretrained wrote"
