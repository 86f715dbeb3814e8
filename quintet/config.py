"""What the user may set: the engine's configuration by concern, and the environment."""

from quintet.settings.device import AUTO
from quintet.settings.engine import EngineConfig
from quintet.settings.environment import Environment, all_variables, read_environment, unchanged_environment
from quintet.settings.experts import EPLBConfig
from quintet.settings.kv_events import KVEventsConfig
from quintet.settings.kv_transfer import KVTransferConfig
from quintet.settings.lacking import LACKING, lacking
from quintet.settings.model import BUNDLED, BUNDLED_EMBED, GENERATION_DEFAULTS, INSIDE, ONLINE, SCHEMES, WRITTEN
from quintet.settings.option import dotted, gathered, option, settings, settle
from quintet.settings.pooling import PoolerConfig
from quintet.settings.profiling import ProfilerConfig
from quintet.settings.reasoning import ReasoningConfig
from quintet.settings.speculation import SpeculativeConfig
from quintet.settings.structured import StructuredOutputsConfig

__all__ = [
    "AUTO",
    "BUNDLED",
    "BUNDLED_EMBED",
    "GENERATION_DEFAULTS",
    "INSIDE",
    "LACKING",
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
    "all_variables",
    "dotted",
    "gathered",
    "lacking",
    "option",
    "read_environment",
    "settings",
    "settle",
    "unchanged_environment",
]
