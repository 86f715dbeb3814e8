"""Options for the devices and ranks of a model, and for capturing and compiling its steps."""

from dataclasses import InitVar, dataclass
from typing import Any

from quintet.common.value_parsers import boolean, count, optional, text
from quintet.config.compilation import (
    AttentionConfig,
    CompilationConfig,
    attention_backend,
    level_settings,
    optimization_level,
    sizes,
)
from quintet.config.schema.fields import nested, option


def _backend(value: Any) -> str:
    if value not in ("mp", "uni", "ray", "external_launcher"):
        raise ValueError(
            "must be mp (ranks are processes), uni (one rank), ray (its actors) or external_launcher (a script that "
            f"torchrun starts), not {value!r}"
        )
    return str(value)


AUTO = -1  # tensor_parallel_size, until the platform has settled it


def _ranks(value: Any) -> int:
    return AUTO if value in ("auto", AUTO) else int(count(1, "auto")(value))


@dataclass(frozen=True)
class DeviceOptions:
    """Devices that steps run on, and their parallelism."""

    device: str = option("auto", text, "platform to run on, or auto: `quintet platforms` lists them", group="device")
    tensor_parallel_size: int = option(
        1, _ranks, "devices that share each layer; auto: one rank for each NUMA node of a CPU, or all devices",
        group="device", flags=("-tp",), words=True,
    )  # fmt: skip
    data_parallel_size: int = option(
        1, count(), "engines that share the requests, each a process with its share of this machine and "
        "tensor_parallel_size ranks", group="device", flags=("-dp",),
    )  # fmt: skip
    data_parallel_rank: int | None = option(
        None, optional(count(0)), "run one of those engines alone, by its number from 0: something else starts the "
        "others, and balances between them", group="device", metavar="N", flags=("-dpn",),
    )  # fmt: skip
    data_parallel_size_local: int | None = option(
        None, optional(count()), "how many of those engines this machine has, which share it; if not given, all",
        group="device", metavar="N", flags=("-dpl",),
    )  # fmt: skip
    data_parallel_start_rank: int = option(
        0, count(0), "number of the first of them", group="device", metavar="N", flags=("-dpr",),
    )  # fmt: skip
    data_parallel_hybrid_lb: bool = option(
        False,
        boolean,
        "this server has and balances the engines of this machine alone; other machines have servers of "
        "their own, and something before them balances between those",
        group="device",
        flags=("-dph",),
    )
    data_parallel_external_lb: bool = option(
        False, boolean, "each engine has a server of its own, as data_parallel_rank says by itself", group="device",
        flags=("-dpe",),
    )  # fmt: skip
    pipeline_parallel_size: int = option(
        1, count(), "stages that the layers are shared out over, of tensor_parallel_size ranks each", group="device",
        flags=("-pp",),
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
    join_timeout_seconds: int = option(
        600, count(), "seconds that the ranks of several machines, of torchrun or of Ray have to come; torch's "
        "join_timeout", group="device", metavar="SECONDS",
    )  # fmt: skip
    enforce_eager: bool = option(False, boolean, "run the model without capturing or compiling it", group="device")
    capture_ahead: bool = option(
        False, boolean, "capture steps of every size before serving, on platforms that do (GPUs: up to 512 tokens, and "
        "whatever capture_sizes names); else each when it first comes", group="device",
    )  # fmt: skip
    capture_decode_ahead: bool = option(
        False, boolean, "capture decode steps of requests up to a usual length before serving, on platforms that do; "
        "quintet serve does by default", group="device",
    )  # fmt: skip
    capture_sizes: tuple[int, ...] = option(
        (), sizes, "sizes of steps to capture, in tokens, such as 1 2 4 8, on platforms that capture; the "
        "platform's own if not given", group="device", metavar="N", aliases=("cudagraph_capture_sizes",), nargs="+",
    )  # fmt: skip
    capture_prompts: bool = option(
        True,
        boolean,
        "capture steps with prompts too, on platforms that do; False: decode steps alone",
        group="device",
    )
    max_capture_size: int | None = option(
        None, optional(count()), "most tokens in a step that is captured; if not given, the platform's own (GPUs: 512 "
        "that decode, 8192 with prompts)", group="device", metavar="TOKENS", aliases=("max_cudagraph_capture_size",),
    )  # fmt: skip
    warm_up: bool = option(
        True, boolean, "run a prompt before the engine is ready, on platforms that compile kernels when they are first "
        "called; it leaves nothing behind", group="device",
    )  # fmt: skip
    batch_invariant: bool = option(
        False, boolean, "give a request the same bits whatever else is in the batch, where the platform would not by "
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
        ours=CompilationConfig.to_settings,
    )  # fmt: skip
    attention_config: InitVar[Any] = nested(
        AttentionConfig, None, "vLLM's form of attention_backend", group="device", flags=("-ac",),
        ours=AttentionConfig.to_settings,
    )  # fmt: skip
    optimization_level: InitVar[int | str | None] = option(
        None, optional(optimization_level), "0: as enforce_eager; 1 to 3: the platform's own way", group="device",
        flags=("-O",), metavar="0-3", ours=level_settings,
    )  # fmt: skip

    def _check(self) -> None:
        self._check_engines()
        for name in ("tensor_parallel_size", "pipeline_parallel_size"):
            if self.distributed_executor_backend == "uni" and (value := getattr(self, name)) > 1:
                raise ValueError(
                    f"distributed_executor_backend='uni' is one rank, and {name} is {value}; leave one of them out"
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

    @property
    def num_local_engines(self) -> int:
        """Number of engines that share this machine, started by this process or by others."""
        return self.data_parallel_size_local or self.data_parallel_size

    def _check_engines(self) -> None:
        size, rank, local = self.data_parallel_size, self.data_parallel_rank, self.data_parallel_size_local
        first, hybrid, external = (
            self.data_parallel_start_rank, self.data_parallel_hybrid_lb, self.data_parallel_external_lb,
        )  # fmt: skip
        if rank is not None and rank >= size:
            raise ValueError(
                f"data_parallel_rank {rank} is none of {size} engines (data_parallel_size), which count from 0; leave "
                "it out, and all of them are started"
            )
        if first + (local or size) > size:
            raise ValueError(
                f"data_parallel_start_rank {first}: this machine's {local or size} engines (data_parallel_size_local) "
                f"are not among {size} (data_parallel_size), which count from 0; correct one of them"
            )
        if hybrid and (external or rank is not None):
            raise ValueError(
                "data_parallel_hybrid_lb: one server has all engines of this machine, and data_parallel_"
                f"{'external_lb' if external else 'rank'} is for servers of one engine each; leave one of them out"
            )
        if hybrid and local is None:
            raise ValueError(
                "data_parallel_hybrid_lb: say how many engines this machine has (data_parallel_size_local)"
            )
        if external and rank is None:
            raise ValueError("data_parallel_external_lb: say which engine this one is (data_parallel_rank)")
        if local is not None and local < size and rank is None and not hybrid:
            raise ValueError(
                f"data_parallel_size_local {local}: engines of other machines are not this one's to start or to ask; "
                "set data_parallel_hybrid_lb=True for a server of these alone, start one on each machine, and balance "
                "between them (`quintet router`)"
            )
