"""Environment variables that quintet reads, and their types; only this module reads them."""

import contextlib
import dataclasses
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from quintet.common.suggestions import refuse_unknown
from quintet.common.value_parsers import Parse, boolean, one_of, text
from quintet.config.engine import EngineConfig

_PREFIX = "QUINTET_"


def _seconds(value: str) -> float:
    try:
        number = float(value)
    except ValueError:
        number = 0.0
    if not 0 < number <= 3600:
        raise ValueError(f"must be seconds, a number over 0 and up to 3600, not {value!r}")
    return number


def _variable(name: str, default: Any, parse: Parse, help: str, secret: bool = False, bare: bool = False) -> Any:
    """`bare`: an empty one counts as set."""
    metadata = {"variable": name, "parse": parse, "help": help, "secret": secret, "bare": bare}
    return field(default=default, metadata=metadata, repr=not secret)


@dataclass(frozen=True)
class Environment:
    """Every environment variable that quintet looks at. Flags and arguments come before them."""

    device: str | None = _variable("QUINTET_DEVICE", None, text, "platform to run on where no device is given")
    log_level: str | None = _variable(
        "QUINTET_LOG_LEVEL", None,
        lambda value: one_of("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")(value.upper()),
        "what the command line logs; DEBUG also shows where an error came from",
    )  # fmt: skip
    hf_home: str | None = _variable("HF_HOME", None, text, "where the Hugging Face libraries keep downloads")
    hf_hub_offline: bool = _variable("HF_HUB_OFFLINE", False, boolean, "use downloaded models alone, ask no network")
    model_folders: str | None = _variable(
        "QUINTET_MODEL_FOLDERS", None, text, "folders of GGUF files for `quintet list` and `quintet rm`, with : between"
    )
    use_modelscope: bool = _variable(
        "QUINTET_USE_MODELSCOPE", False, boolean, "download models from ModelScope instead of the Hugging Face hub"
    )
    cpu_isa: str | None = _variable(
        "QUINTET_CPU_ISA", None, text, "instruction set of CPU kernels, if not the processor's best: avx512, "
        "avx2_vnni, avx2 or baseline",
    )  # fmt: skip
    cpu_bind: bool = _variable(
        "QUINTET_CPU_BIND",
        True,
        boolean,
        "keep each CPU worker on a core of its own where all the cores of a machine, "
        "or of a NUMA node, are used; 0: the system moves them",
    )
    cache_home: str | None = _variable("XDG_CACHE_HOME", None, text, "where caches are kept, instead of ~/.cache")
    jax_platforms: str | None = _variable("JAX_PLATFORMS", None, text, "devices that JAX may open (the tpu platform)")
    cc: str | None = _variable("CC", None, text, "C compiler that Triton builds its launcher with, if not gcc or clang")
    xla_flags: str | None = _variable("XLA_FLAGS", None, text, "XLA's own settings (the tpu platform)")
    rocr_visible_devices: str | None = _variable(
        "ROCR_VISIBLE_DEVICES",
        None,
        str,
        "numbers or GPU-... of the GPUs that there are, or none (the rocm platform)",
        bare=True,
    )
    hip_visible_devices: str | None = _variable(
        "HIP_VISIBLE_DEVICES", None, text, "which of those a program may open (the rocm platform)"
    )
    cuda_visible_devices: str | None = _variable(
        "CUDA_VISIBLE_DEVICES", None, text, "the same where HIP_VISIBLE_DEVICES is not set, and CUDA's own"
    )
    ze_affinity_mask: str | None = _variable(
        "ZE_AFFINITY_MASK", None, text, "numbers of the GPUs that Level Zero shows (the xpu platform)"
    )
    ze_flat_device_hierarchy: str | None = _variable(
        "ZE_FLAT_DEVICE_HIERARCHY",
        None,
        text,
        "COMPOSITE: a GPU's tiles are one device to Level Zero (the xpu platform)",
    )
    ranks_key: str | None = _variable(
        "QUINTET_RANKS_KEY", None, text, "the key that ranks on several machines prove to know, the same on all",
        secret=True,
    )  # fmt: skip
    ranks_key_file: str | None = _variable(
        "QUINTET_RANKS_KEY_FILE", None, text, "a file that holds that key; where there is neither, ranks.key in "
        "~/.cache/quintet, made for this user alone",
    )  # fmt: skip
    rank: str | None = _variable("RANK", None, text, "which rank this is (distributed_executor_backend)")
    ray_address: str | None = _variable("RAY_ADDRESS", None, text, "the Ray cluster to join, which Ray reads itself")
    world_size: str | None = _variable("WORLD_SIZE", None, text, "how many there are: torchrun sets these variables")
    local_world_size: str | None = _variable("LOCAL_WORLD_SIZE", None, text, "how many of them are this machine's")
    master_addr: str | None = _variable("MASTER_ADDR", None, text, "address of the machine of rank 0")
    master_port: str | None = _variable("MASTER_PORT", None, text, "port there")
    agent_store: str | None = _variable(
        "TORCHELASTIC_USE_AGENT_STORE", None, text, "True: the launcher listens there, and not rank 0"
    )
    restart_count: str | None = _variable(
        "TORCHELASTIC_RESTART_COUNT", None, text, "how often the launcher has started all ranks anew"
    )
    api_key: str | None = _variable(
        "QUINTET_API_KEY", None, text, "a key that requests to `quintet serve` must bring", secret=True
    )
    admin_api_key: str | None = _variable(
        "QUINTET_ADMIN_API_KEY", None, text, "the key of `quintet serve`'s administrator", secret=True
    )
    allow_runtime_lora: bool = _variable(
        "QUINTET_ALLOW_RUNTIME_LORA_UPDATING", False, boolean, "as --allow-runtime-lora: adapters are loaded over HTTP"
    )
    vllm_allow_runtime_lora: bool = _variable(
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING", False, boolean, "the same; vLLM's name"
    )
    lora_cache_dir: str | None = _variable(
        "VLLM_LORA_RESOLVER_CACHE_DIR", None, text, "as --lora-cache-dir where adapters may be loaded over HTTP; "
        "vLLM's name",
    )  # fmt: skip
    image_fetch_timeout: float = _variable(
        "VLLM_IMAGE_FETCH_TIMEOUT", 5.0, _seconds, "seconds in which an image is fetched from its URL; vLLM's name"
    )
    video_fetch_timeout: float = _variable("VLLM_VIDEO_FETCH_TIMEOUT", 30.0, _seconds, "the same for videos")
    audio_fetch_timeout: float = _variable("VLLM_AUDIO_FETCH_TIMEOUT", 10.0, _seconds, "the same for audio")
    kv_transfer_key: str | None = _variable(
        "QUINTET_KV_TRANSFER_KEY", None, text, "the key that engines share which give each other pages", secret=True
    )
    openai_api_key: str | None = _variable(
        "OPENAI_API_KEY", None, text, "the key that the commands with --url show to a server", secret=True
    )

    @classmethod
    def descriptions(cls) -> dict[str, str]:
        """Variable -> what it is for."""
        return {each.metadata["variable"]: each.metadata["help"] for each in dataclasses.fields(cls)}

    def variables(self) -> dict[str, Any]:
        """Variable -> its value here, without secrets. Tokens of the hub are left to the library that uses them."""
        shown = [each for each in dataclasses.fields(self) if not each.metadata["secret"]]
        return {each.metadata["variable"]: getattr(self, each.name) for each in shown}

    def apply(self, config: EngineConfig) -> EngineConfig:
        """The configuration with what the environment settles and the user did not."""
        if self.device is not None and config.device == "auto":
            return config.replace(device=self.device)
        return config


@contextlib.contextmanager
def unchanged_environment() -> Iterator[None]:
    """Restores the environment variables after the block, which is usually a library's import."""
    before = dict(os.environ)
    try:
        yield
    finally:
        for name in set(os.environ) - set(before):
            del os.environ[name]
        os.environ.update(before)


def all_variables() -> dict[str, str]:
    """The environment as it is now, for a process that is to have just this one."""
    return dict(os.environ)


def read_environment(environ: Mapping[str, str] = os.environ) -> Environment:
    """Reads the variables above; an unknown QUINTET_* is refused with the nearest. An empty one counts as not set, but
    for those with which it means none."""
    fields = {each.metadata["variable"]: each for each in dataclasses.fields(Environment)}
    ours = [name for name in environ if name.startswith(_PREFIX)]
    refuse_unknown("environment variable", ours, [name for name in fields if name.startswith(_PREFIX)])
    values: dict[str, Any] = {}
    for name, each in fields.items():
        if environ.get(name, "").strip() or (each.metadata["bare"] and name in environ):
            try:
                values[each.name] = each.metadata["parse"](environ[name].strip())
            except ValueError as error:
                raise ValueError(f"environment variable {name} {error}") from None
    return Environment(**values)
