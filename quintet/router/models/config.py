"""Settings of a server of several models (`quintet serve --models`), and of each model."""

from dataclasses import dataclass
from typing import Any

from quintet.common.value_parsers import Parse, count, integer, optional, text
from quintet.config import EngineConfig, normalize_fields, option
from quintet.server.config import ServerConfig
from quintet.server.setting_parsers import seconds

NEVER = -1.0  # keep_alive of a model that is not unloaded for being idle


def keep_alive(value: Any) -> float:
    """Seconds; -1: never unloaded."""
    if str(value).strip() in ("-1", "-1.0"):
        return NEVER
    try:
        return float(seconds()(value))
    except ValueError as error:
        raise ValueError(f"{error}, or -1 for never") from None


def memory_size(least: int = 1) -> Parse:
    """Bytes such as 8G; a fraction up to 1.0 is a share of the device's memory."""

    def parse(value: Any) -> int | float:
        try:
            share = float(value) if isinstance(value, str | float) else 0.0
        except ValueError:
            share = 0.0
        if 0.0 < share <= 1.0 and value not in ("1", 1):
            return share
        try:
            number = integer(value)
        except ValueError:
            number = 0
        if number < least:
            raise ValueError(f"must be bytes such as 8G, or a share of the device such as 0.5, not {value!r}")
        return number

    return parse


@dataclass(frozen=True)
class ModelsConfig:
    """Settings of the server that starts engines. Checked when it is made."""

    models: str | None = option(
        None, optional(text), "serve several models, each loaded when a request names it: a YAML file of models and "
        "their flags, or a folder of GGUF files and model folders (docs/models-on-demand.md)", group="models",
        metavar="PATH",
    )  # fmt: skip
    keep_alive: float = option(
        300.0, keep_alive, "seconds after its last request until a model's engine sleeps, if it can, and as many until "
        "it ends; 0: at once, -1: never", group="models", metavar="SECONDS",
    )  # fmt: skip
    memory_budget: int | float | str | None = option(
        None, optional(memory_size()), "bytes, such as 24G, or share, such as 0.5, of the device's memory for all "
        "loaded models together; what is free, up to gpu_memory_utilization, if not given", group="models",
        metavar="SIZE",
    )  # fmt: skip
    load_timeout: float = option(
        600.0, seconds(1.0), "seconds that an engine may take to load its model", group="models", metavar="SECONDS"
    )
    max_waiting_requests: int = option(
        1024, count(), "requests that may wait for a model to load; further ones get HTTP 503", group="models"
    )
    max_wait: float = option(
        600.0, seconds(), "seconds that a request waits for a model to load, then HTTP 503", group="models",
        metavar="SECONDS",
    )  # fmt: skip

    def __post_init__(self) -> None:
        normalize_fields(self)


@dataclass(frozen=True)
class ModelSpec:
    """One model of a server."""

    name: str
    engine: EngineConfig
    server: ServerConfig  # of its engine's process
    aliases: tuple[str, ...] = ()  # further names; * and ? match any characters
    pinned: bool = False  # loaded at the start, and not unloaded to make room
    keep_alive: float | None = None  # None: the server's
    memory: int | float | None = None  # None: as estimated
    cache_is_sized: bool = False  # its settings say how large the KV cache is

    def served_name(self, name: str) -> str | None:
        """Returns the name that the engine knows for one of a request: its model's, or an adapter's; None: neither."""
        if name == self.name or name in self.aliases:
            return self.name
        return next((each.name for each in self.server.lora_modules if each.name == name), None)

    def idle_seconds(self, default: float) -> float:
        """Returns keep_alive. A pinned model without its own stays loaded."""
        if self.keep_alive is not None:
            return self.keep_alive
        return NEVER if self.pinned else default
