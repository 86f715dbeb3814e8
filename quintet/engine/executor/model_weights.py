"""Weights of a model as an engine's settings and its device have them read and kept."""

from dataclasses import replace
from pathlib import Path

from quintet.config import EngineConfig
from quintet.interface.platform import Capabilities
from quintet.model_loader.sharded_state import FORMATS as SHARDED
from quintet.model_loader.weight_files import WeightFiles, weights_of
from quintet.model_loader.weights_cache import AUTO, OFF, CacheEntry, cache_entry


def weights_for(config: EngineConfig, path: Path, facts: Capabilities) -> WeightFiles:
    """Returns a model's weights, as the settings have them read; ValueError where this device cannot."""
    weights = weights_of(config, path)
    if weights.load_format not in SHARDED:
        return weights
    if not facts.layout_key:
        raise ValueError(f"load_format={weights.load_format!r}: this device's weights do not lie in the host's memory")
    return replace(weights, options={"placing": facts.layout_key})


def weights_cache_for(config: EngineConfig, facts: Capabilities, weights: WeightFiles) -> CacheEntry | None:
    """Returns where packed weights are kept. Not by default if weights change while they are written: EPLB moves them,
    calculate_kv_scales sets some."""
    if config.load_format in ("dummy", *SHARDED):
        return None
    changing = config.enable_eplb or config.calculate_kv_scales
    setting = OFF if changing and config.weights_cache == AUTO else config.weights_cache
    return cache_entry(setting, facts.layout_key, weights.folder)
