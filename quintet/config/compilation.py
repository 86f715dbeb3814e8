"""vLLM's compilation and attention configs, read into settings of ours; entries without meaning here are refused."""

from dataclasses import dataclass
from typing import Any, ClassVar

from quintet.common.value_parsers import count, list_of, one_of, optional, text
from quintet.config.schema.fields import Nested, option

# vLLM's names of attentions that are providers here
_BACKENDS = {"triton_attn": "triton", "torch_sdpa": "torch"}


def sizes(value: Any) -> tuple[int, ...]:
    """Whole numbers in order, from a list or from text such as "1,2,4" or "[1, 2, 4]"."""
    if isinstance(value, str):
        value = [word for word in value.strip(" []").split(",") if word]
    return tuple(sorted(set(list_of(count())(value))))


def attention_backend(value: Any) -> str:
    """The name of a provider of the op `paged_attention`, or auto."""
    name = text(value).lower()
    return _BACKENDS.get(name, name)


def optimization_level(value: Any) -> int:
    return int(one_of("0", "1", "2", "3")(str(value).removeprefix("O")))


def _mode(value: Any) -> int:
    word = str(value).lower()
    if word in ("1", "2", "stock_torch_compile", "dynamo_trace_once"):
        raise ValueError(f"{value} asks for torch.compile, which no platform uses; 3 compiles as the platform does")
    return int(one_of("0", "3", none="0", vllm_compile="3")(word))


def _captured(value: Any) -> str:
    word = str(value).upper()
    if word in ("PIECEWISE", "FULL_AND_PIECEWISE"):
        raise ValueError(f"{word} captures pieces of steps, and steps are captured whole here; use FULL")
    return str(one_of("NONE", "FULL_DECODE_ONLY", "FULL")(word))


@dataclass(frozen=True)
class CompilationConfig(Nested):
    """vLLM's `compilation_config`, as far as it says something here; a number alone is its mode."""

    name: ClassVar[str] = "compilation_config"
    plain: ClassVar[str] = "mode"

    mode: int | None = option(None, optional(_mode), "0: enforce_eager; 3: the platform's own way", group="device")
    level: int | None = option(None, optional(_mode), "the older name of mode", group="device")
    cudagraph_mode: str | None = option(
        None, optional(_captured), "NONE: enforce_eager; FULL: the platform's own way; FULL_DECODE_ONLY: without "
        "capture_prompts", group="device",
    )  # fmt: skip
    cudagraph_capture_sizes: tuple[int, ...] | None = option(None, optional(sizes), "capture_sizes", group="device")
    max_cudagraph_capture_size: int | None = option(None, optional(count(0)), "max_capture_size", group="device")
    cache_dir: str | None = option(
        None, lambda value: text(value) if value else None, "compilation_cache_dir", group="device"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if None not in (self.level, self.mode) and self.level != self.mode:
            raise ValueError(f"{self.name}.mode={self.mode} and level={self.level} are one setting; give one of them")

    def to_settings(self) -> dict[str, Any]:
        """Our settings that it stands for."""
        captures = self.cudagraph_mode in ("FULL", "FULL_DECODE_ONLY")
        found = {
            "compilation_cache_dir": self.cache_dir or None,
            "capture_sizes": self.cudagraph_capture_sizes or None,
            "max_capture_size": self.max_cudagraph_capture_size or None,
            "capture_prompts": self.cudagraph_mode == "FULL" if captures else None,
            "enforce_eager": self._eager() or (False if captures else None),
        }
        return {name: value for name, value in found.items() if value is not None}

    def _eager(self) -> bool:
        """Without torch.compile (mode 0) vLLM still captures whole steps, if cudagraph_mode asks for it."""
        if self.cudagraph_mode is None and 0 in (self.mode, self.level):
            return True
        return (
            self.cudagraph_mode == "NONE" or () == self.cudagraph_capture_sizes or self.max_cudagraph_capture_size == 0
        )


@dataclass(frozen=True)
class AttentionConfig(Nested):
    """vLLM's `attention_config`, as far as it says something here."""

    name: ClassVar[str] = "attention_config"

    backend: str | None = option(None, optional(attention_backend), "attention_backend", group="device")

    def to_settings(self) -> dict[str, Any]:
        """Our setting that it stands for."""
        return {"attention_backend": self.backend} if self.backend else {}


def level_settings(level: int) -> dict[str, Any]:
    """Returns our settings for an optimization level: 0 is enforce_eager, higher ones are the platform's one way."""
    return {} if level else {"enforce_eager": True}
