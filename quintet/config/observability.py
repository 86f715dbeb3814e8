"""Observability options: statistics in the log, and the profiler: whether traces may be written, where, how long."""

import os
from dataclasses import dataclass
from typing import Any, ClassVar

from quintet.common.value_parsers import boolean, count, one_of, optional, text
from quintet.config.schema.fields import Nested, option

MIB = 2**20


def _profiler(value: Any) -> str:
    """vLLM's other choice is named for a device, and marks ranges for a program of its maker's."""
    if value != "torch" and isinstance(value, str):
        raise ValueError(f"{value!r} is not there; use 'torch', which writes files that any browser shows")
    return str(one_of("torch")(value))


def _folder(value: Any) -> str:
    """Absolute: what a relative one means would depend on the process."""
    if not value:
        return ""
    if "://" in text(value):
        raise ValueError(f"must be a folder of this machine, not {value!r}")
    return os.path.abspath(os.path.expanduser(text(value)))


@dataclass(frozen=True)
class ProfilerConfig(Nested):
    """Traces of the engine's steps and kernels; vLLM's names, and bounds of our own. Off where `profiler` is none."""

    name: ClassVar[str] = "profiler_config"

    profiler: str | None = option(
        None, optional(_profiler), "torch: allow traces; none: refuse them", group="observability", choices=("torch",)
    )
    torch_profiler_dir: str = option("", _folder, "folder of the traces", group="observability", metavar="FOLDER")
    torch_profiler_with_stack: bool = option(
        False, boolean, "lines of Python in them, where torch's profiler runs (vLLM's default is true)",
        group="observability",
    )  # fmt: skip
    torch_profiler_with_flops: bool = option(
        False, boolean, "operations of products, where torch's profiler runs", group="observability"
    )
    torch_profiler_record_shapes: bool = option(False, boolean, "shapes of what each op takes", group="observability")
    torch_profiler_with_memory: bool = option(
        False, boolean, "what is allocated, where torch's profiler runs", group="observability"
    )
    torch_profiler_use_gzip: bool = option(True, boolean, "compress the files", group="observability")
    delay_iterations: int = option(0, count(0), "steps before a trace begins", group="observability", metavar="STEPS")
    max_iterations: int = option(
        0, count(0), "most steps of a trace; 0: as many as time and bytes allow", group="observability", metavar="STEPS"
    )
    max_seconds: int = option(300, count(), "most seconds of a trace", group="observability", metavar="SECONDS")
    max_bytes: int = option(
        256 * MIB, count(2**16), "most bytes of a trace before it is compressed", group="observability", metavar="BYTES"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.profiler and not self.torch_profiler_dir:
            raise ValueError(f"{self.name}.torch_profiler_dir must be given: the folder where traces are written")
        if self.torch_profiler_dir and not self.profiler:
            raise ValueError(f"{self.name}.torch_profiler_dir is of no use without profiler='torch'; give that too")


@dataclass(frozen=True)
class ObservabilityOptions:
    """Logs and figures."""

    disable_log_stats: bool = option(False, boolean, "log no statistics", group="observability")
