"""On what a model runs, and what the device does with its steps before they run."""

from dataclasses import InitVar, dataclass
from typing import Any

from quintet.settings.compilation import (
    AttentionConfig,
    CompilationConfig,
    attention_backend,
    level_ours,
    optimization_level,
    sizes,
)
from quintet.settings.option import nested, option
from quintet.values import count, optional, text, truth


def _backend(value: Any) -> str:
    if value not in ("mp", "uni", "ray", "external_launcher"):
        raise ValueError(
            "must be mp (ranks are processes), uni (one rank), ray (its actors) or external_launcher (a script that "
            f"torchrun starts), not {value!r}"
        )
    return str(value)


def _one_stage(value: Any) -> int:
    if count()(value) != 1:
        raise ValueError(
            f"{value} is not there: layers are not passed on from device to device; share each out "
            "(tensor_parallel_size), or the requests (data_parallel_size)"
        )
    return 1


def _whole_experts(value: Any) -> bool:
    if truth(value):
        raise ValueError(
            "is not there: each expert is shared out over the ranks (tensor_parallel_size), and none is one rank's; "
            "leave it out"
        )
    return False


@dataclass(frozen=True)
class DeviceOptions:
    """Where steps run, and how."""

    device: str = option("auto", text, "platform to run on, or auto: `quintet platforms` lists them", group="device")
    tensor_parallel_size: int = option(1, count(), "devices that share each layer", group="device", flags=("-tp",))
    data_parallel_size: int = option(
        1, count(), "engines that share the requests, each a process with its share of this machine and "
        "tensor_parallel_size ranks", group="device", flags=("-dp",),
    )  # fmt: skip
    data_parallel_rank: int | None = option(
        None, optional(count(0)), "run one of those engines alone, by its number from 0: something else starts the "
        "others, and balances between them", group="device", metavar="N", flags=("-dpn",),
    )  # fmt: skip
    pipeline_parallel_size: int = option(
        1, _one_stage, "1: layers are not passed on from device to device yet", group="device", flags=("-pp",),
    )  # fmt: skip
    enable_expert_parallel: bool = option(
        False, _whole_experts, "no: no expert is one rank's yet", group="device", flags=("-ep",),
    )  # fmt: skip
    distributed_executor_backend: str | None = option(
        None, optional(_backend), "how several ranks run: mp, processes of this machine, uni, one rank, ray, actors "
        "of a cluster, or external_launcher, the processes of a script that torchrun starts; if not given, the "
        "platform's own way", group="device", metavar="NAME",
    )  # fmt: skip
    distributed_timeout_seconds: int = option(
        300, count(), "seconds that ranks which are processes wait for one another, until all are given up",
        group="device", metavar="SECONDS",
    )  # fmt: skip
    enforce_eager: bool = option(False, truth, "run the model without capturing or compiling it", group="device")
    capture_ahead: bool = option(
        False, truth, "capture steps of every size before serving, on platforms that do; else each when it first comes",
        group="device",
    )  # fmt: skip
    capture_sizes: tuple[int, ...] = option(
        (), sizes, "sizes of steps to capture, in tokens, such as 1 2 4 8, on platforms that capture; the "
        "platform's own if not given", group="device", metavar="N", aliases=("cudagraph_capture_sizes",), nargs="+",
    )  # fmt: skip
    capture_prompts: bool = option(
        True, truth, "capture steps with prompts too, on platforms that do; False: decode steps alone", group="device",
    )  # fmt: skip
    max_capture_size: int | None = option(
        None, optional(count()), "most tokens in a step that is captured", group="device",
        metavar="TOKENS", aliases=("max_cudagraph_capture_size",),
    )  # fmt: skip
    batch_invariant: bool = option(
        False, truth, "give a request the same bits whatever else is in the batch, where the platform would not by "
        "itself: slower there; as VLLM_BATCH_INVARIANT=1 asks for", group="device",
    )  # fmt: skip
    compilation_cache_dir: str = option(
        "auto", text, "where a platform that compiles keeps what it compiled, for the next start: a folder, auto "
        "(~/.cache/quintet) or none", group="device", metavar="FOLDER",
    )  # fmt: skip
    attention_backend: str = option(
        "auto", attention_backend, "provider of paged attention; auto: the platform's first that serves (`quintet "
        "explain` shows them)", group="device", metavar="NAME",
    )  # fmt: skip

    # vLLM's ways to say the same: taken in, and gone when the configuration is made
    compilation_config: InitVar[Any] = nested(
        CompilationConfig, None, "vLLM's form of the settings above", group="device", flags=("-cc",),
        ours=CompilationConfig.ours,
    )  # fmt: skip
    attention_config: InitVar[Any] = nested(
        AttentionConfig, None, "vLLM's form of attention_backend", group="device", flags=("-ac",),
        ours=AttentionConfig.ours,
    )  # fmt: skip
    optimization_level: InitVar[int | str | None] = option(
        None, optional(optimization_level), "0: as enforce_eager; 1 to 3: the platform's own way", group="device",
        flags=("-O",), metavar="0-3", ours=level_ours,
    )  # fmt: skip

    def _check(self) -> None:
        if self.data_parallel_rank is not None and self.data_parallel_rank >= self.data_parallel_size:
            raise ValueError(
                f"data_parallel_rank {self.data_parallel_rank} is none of {self.data_parallel_size} engines "
                "(data_parallel_size), which count from 0; leave it out, and all of them are started"
            )
        if self.distributed_executor_backend == "uni" and self.tensor_parallel_size > 1:
            raise ValueError(
                "distributed_executor_backend='uni' is one rank, and tensor_parallel_size is "
                f"{self.tensor_parallel_size}; leave one of them out"
            )
        for name in ("capture_ahead", "capture_sizes", "max_capture_size"):
            if self.enforce_eager and (value := getattr(self, name)):
                raise ValueError(
                    f"enforce_eager=True captures nothing, so {name}={value} means nothing; give one of them"
                )
        if self.capture_sizes and self.max_capture_size not in (None, self.capture_sizes[-1]):
            raise ValueError(
                f"capture_sizes ends at {self.capture_sizes[-1]} and max_capture_size is {self.max_capture_size}; give "
                "one of them"
            )
