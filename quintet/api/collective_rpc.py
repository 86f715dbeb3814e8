"""LLM.collective_rpc: vLLM's call of a worker's method by name: our own methods, and those of an extension."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from quintet.engine.weight_transfer.updates import call_workers
from quintet.model_loader.sharded_state import PATTERN

if TYPE_CHECKING:
    from quintet.engine.client import EngineClient


def save_sharded_state(client: "EngineClient", path: str, pattern: str | None = None, max_size: Any = None) -> None:
    """Writes the weights; each rank writes one file, whatever max_size is. ValueError for another pattern of names."""
    if pattern not in (None, PATTERN):
        raise ValueError(f"save_sharded_state: pattern is {PATTERN!r}, not {pattern!r}; leave it out")
    client.save_sharded_state(path)


def _update_config(client: "EngineClient", overrides: Any) -> None:
    """Sets the load format of later reload_weights(), by {"load_config": {"load_format": FORMAT}}. ValueError for other
    settings of a running engine."""
    load = overrides.get("load_config") if isinstance(overrides, Mapping) else None
    if not isinstance(load, Mapping) or set(load) != {"load_format"} or len(overrides) != 1:
        raise ValueError(
            f"collective_rpc: update_config takes {{'load_config': {{'load_format': ...}}}} alone, not "
            f"{repr(overrides)[:200]}; for other settings start another engine"
        )
    client.reload_format = client.config.replace(load_format=load["load_format"]).load_format


_METHODS: Mapping[str, Callable[..., Any]] = {
    "reload_weights": lambda client, weights_path=None: client.reload_weights(weights_path),
    "save_sharded_state": save_sharded_state,
    "sleep": lambda client, level=1: client.engine.sleep(level) and None,
    "wake_up": lambda client, tags=None: client.wake_up(tags),
    "update_config": _update_config,
}


def collective_rpc(client: "EngineClient", method: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """Calls a method on all ranks -> its result for each. ValueError says why it cannot be called."""
    if not isinstance(method, str) or method not in _METHODS:
        if not callable(method) and not isinstance(method, str):
            raise ValueError(f"collective_rpc: method is a name or a function, not a {type(method).__name__}")
        return call_workers(client.engine.controls, method, args, kwargs)
    try:
        result = _METHODS[method](client, *args, **kwargs)
    except TypeError as error:
        raise ValueError(f"collective_rpc: {method}: {str(error).replace('<lambda>()', method)}") from None
    return [result] * client.config.tensor_parallel_size * client.config.pipeline_parallel_size
