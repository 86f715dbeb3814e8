"""The engine's configuration: the settings of every concern in one flat object, made from names that people know."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quintet.common.suggestions import refuse_unknown
from quintet.config.cache import MemoryOptions
from quintet.config.device import DeviceOptions
from quintet.config.expert_parallel import ExpertOptions
from quintet.config.kv_connectors import split_connectors
from quintet.config.kv_events import KVEventsConfig
from quintet.config.kv_transfer import KVTransferConfig
from quintet.config.load import LoadingOptions
from quintet.config.lora import LoRAOptions
from quintet.config.media.ec_transfer import ECTransferConfig
from quintet.config.media.options import MediaOptions
from quintet.config.model import ModelOptions
from quintet.config.multi_node import NodeOptions
from quintet.config.observability import ObservabilityOptions, ProfilerConfig
from quintet.config.pooler import PoolerConfig, PoolingOptions
from quintet.config.sampling import SamplingOptions
from quintet.config.scheduler import SchedulingOptions
from quintet.config.schema.docs import documented
from quintet.config.schema.fields import (
    apply_init_only,
    flatten_nested,
    nested,
    normalize_fields,
    setting_fields,
    unflatten_nested,
)
from quintet.config.schema.unsupported import unsupported_reason
from quintet.config.speculative import SpeculativeConfig
from quintet.config.structured_outputs import ReasoningConfig, StructuredOutputsConfig


# The fields of the last base come first: the model's. Bases hold fields and their checks, and nothing else.
@documented
@dataclass(frozen=True)
class EngineConfig(
    ObservabilityOptions,
    SamplingOptions,
    SchedulingOptions,
    LoRAOptions,
    MemoryOptions,
    ExpertOptions,
    NodeOptions,
    DeviceOptions,
    LoadingOptions,
    PoolingOptions,
    MediaOptions,
    ModelOptions,
):
    """Everything that fixes an engine: which model, on what, with how much memory, and how requests share it.

    Values are checked and brought to one form when it is made; a change is a new object (`replace`). vLLM's names
    hold wherever the meaning is the same. A new concern is a module beside this one.
    """

    speculative_config: SpeculativeConfig | None = nested(
        SpeculativeConfig, None, "guess tokens ahead and let one step of the model check them, such as "
        '{"method": "ngram", "num_speculative_tokens": 4}', group="scheduling", flags=("-sc",),
    )  # fmt: skip
    pooler_config: PoolerConfig | None = nested(
        PoolerConfig, None, "how hidden states become numbers, such as "
        '{"pooling_type": "MEAN", "normalize": true}', group="model",
        aliases=("override_pooler_config",),
    )  # fmt: skip
    structured_outputs_config: StructuredOutputsConfig = nested(
        StructuredOutputsConfig, StructuredOutputsConfig(), "how answers are held to a schema or a grammar",
        group="sampling",
    )  # fmt: skip
    reasoning_config: ReasoningConfig = nested(
        ReasoningConfig, ReasoningConfig(), "how thoughts are marked that thinking_token_budget bounds, such as "
        '{"reasoning_end_str": "Time is up.</think>"}', group="sampling",
    )  # fmt: skip
    profiler_config: ProfilerConfig = nested(
        ProfilerConfig, ProfilerConfig(), "let a caller have traces written, such as "
        '{"profiler": "torch", "torch_profiler_dir": "traces"}', group="observability",
    )  # fmt: skip

    kv_events_config: KVEventsConfig = nested(
        KVEventsConfig, KVEventsConfig(), "tell others over ZeroMQ which pages are cached, such as "
        '{"enable_kv_cache_events": true, "topic": "kv"}', group="observability",
    )  # fmt: skip

    kv_transfer_config: KVTransferConfig = nested(
        KVTransferConfig, KVTransferConfig(), "give pages to other engines, or take theirs, such as "
        '{"kv_connector": "TCPConnector", "kv_role": "kv_both"}', group="memory",
    )  # fmt: skip
    ec_transfer_config: ECTransferConfig = nested(
        ECTransferConfig, ECTransferConfig(), "let engines share rows of encoders of media, such as "
        '{"ec_connector": "ECExampleConnector", "ec_role": "ec_both", "ec_connector_extra_config": '
        '{"shared_storage_path": "/mnt/rows"}}', group="memory",
    )  # fmt: skip

    def __post_init__(self, compilation_config: Any, attention_config: Any, optimization_level: Any) -> None:
        normalize_fields(self)
        self._take_overridden_length()
        apply_init_only(self, {"compilation_config": compilation_config, "attention_config": attention_config})
        apply_init_only(self, {"optimization_level": optimization_level})
        for concern in (
            *(
                ModelOptions,
                LoadingOptions,
                DeviceOptions,
                NodeOptions,
                ExpertOptions,
                MemoryOptions,
                SchedulingOptions,
                LoRAOptions,
            ),
        ):
            concern._check(self)
        if self.load_format == "bitsandbytes" and self.quantization not in (None, "bitsandbytes"):
            raise ValueError(
                f"load_format='bitsandbytes' is of quantization='bitsandbytes', not {self.quantization!r}; leave it out"
            )
        if self.code_revision not in (None, self.revision):
            raise ValueError(
                f"code_revision={self.code_revision!r}: code that comes with a model is that of its revision here; "
                "give revision instead, or leave it out"
            )

    def _take_overridden_length(self) -> None:
        """vLLM takes max_model_len among hf_overrides, too."""
        if not isinstance(self.hf_overrides, Mapping) or "max_model_len" not in self.hf_overrides:
            return
        overrides = dict(self.hf_overrides)
        length = overrides.pop("max_model_len")
        if self.max_model_len not in (None, length):
            raise ValueError(
                f"hf_overrides has max_model_len {length!r}, and max_model_len is {self.max_model_len!r}; give one"
            )
        object.__setattr__(self, "max_model_len", length)
        object.__setattr__(self, "hf_overrides", overrides or None)
        normalize_fields(self)

    def replace(self, **changes: Any) -> "EngineConfig":
        """A new one with these fields changed, checked again."""
        return EngineConfig(**{**self._fields(), **by_field_name(changes)})

    def _fields(self) -> dict[str, Any]:
        return {each.name: getattr(self, each.name) for each in dataclasses.fields(self)}

    @classmethod
    def from_kwargs(cls, **kwargs: Any) -> "EngineConfig":
        """Builds a config from known names, vLLM's among them; ValueError names the nearest, or what to use instead."""
        return cls(**by_field_name(kwargs))


_NEVER_NONE = ("max_num_seqs", "page_size", "gpu_memory_utilization")  # None: the default
# settings of vLLM's scripts that ask for what is so here anyway
_HARMLESS: Mapping[str, tuple[Any, ...]] = {
    "enable_sleep_mode": (True, False),
    "task": ("generate", "auto", None),
    "quantization_config": ({}, None),
}


def _asks_for_nothing(name: str, value: Any) -> bool:
    """True if the setting changes nothing: it is turned off and not there, or is always so."""
    if name in _HARMLESS:
        return value in _HARMLESS[name]
    off = not any(value.values()) if isinstance(value, Mapping) else not value
    return off and "." not in name and unsupported_reason(name) is not None


def by_field_name(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Values by the names of EngineConfig's fields. ValueError: an unknown name, or a setting that is given twice."""
    return split_connectors(_by_field(unflatten_nested(flatten_nested(EngineConfig, kwargs))))


def _by_field(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Aliases to field names; refuses names that are unknown, or given twice under two names."""
    aliases = {alias: each.name for each in setting_fields(EngineConfig) for alias in each.metadata["aliases"]}
    known = {each.name for each in setting_fields(EngineConfig)} | set(aliases)
    kwargs = {name: value for name, value in kwargs.items() if not _asks_for_nothing(name, value)}
    for name in kwargs:
        if reason := unsupported_reason(name):
            raise ValueError(f"{name} is not there: {reason}")
    refuse_unknown("engine argument", kwargs, known)
    named: dict[str, Any] = {}
    for name, value in kwargs.items():
        target = aliases.get(name, name)
        if value is None and target in _NEVER_NONE:
            continue
        if target in named:
            other = next(alias for alias in (target, *aliases) if alias in kwargs and alias != name)
            raise ValueError(f"{name} and {other} are the same setting; give one of them")
        named[target] = value
    return named
