"""User settings: the engine's configuration by concern, and the environment."""

from quintet.config.device import AUTO
from quintet.config.engine import EngineConfig
from quintet.config.expert_parallel import EPLBConfig
from quintet.config.kv_events import KVEventsConfig
from quintet.config.kv_transfer import KVTransferConfig
from quintet.config.model import (
    BUNDLED,
    BUNDLED_EMBED,
    BUNDLED_VISION,
    GENERATION_DEFAULTS,
    INSIDE,
    ONLINE,
    SCHEMES,
    WRITTEN,
)
from quintet.config.observability import ProfilerConfig
from quintet.config.pooler import PoolerConfig
from quintet.config.schema.environment import Environment, all_variables, read_environment, unchanged_environment
from quintet.config.schema.fields import flatten_nested, normalize_fields, option, setting_fields, unflatten_nested
from quintet.config.schema.unsupported import UNSUPPORTED, unsupported_reason
from quintet.config.speculative import SpeculativeConfig
from quintet.config.structured_outputs import ReasoningConfig, StructuredOutputsConfig

VllmConfig = EngineConfig  # vLLM's name, for annotations: settings are flat here

__all__ = [
    "AUTO",
    "BUNDLED",
    "BUNDLED_EMBED",
    "BUNDLED_VISION",
    "GENERATION_DEFAULTS",
    "INSIDE",
    "UNSUPPORTED",
    "ONLINE",
    "SCHEMES",
    "WRITTEN",
    "EPLBConfig",
    "EngineConfig",
    "Environment",
    "KVEventsConfig",
    "KVTransferConfig",
    "PoolerConfig",
    "ProfilerConfig",
    "ReasoningConfig",
    "SpeculativeConfig",
    "StructuredOutputsConfig",
    "VllmConfig",
    "all_variables",
    "flatten_nested",
    "unflatten_nested",
    "unsupported_reason",
    "option",
    "read_environment",
    "setting_fields",
    "normalize_fields",
    "unchanged_environment",
]
