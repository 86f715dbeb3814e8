"""What the user may set: the engine's configuration and the environment, of which this is the only reader."""

import contextlib
import dataclasses
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from quintet.lacking import LACKING as LACKING
from quintet.names import refuse_unknown
from quintet.nested import SpeculativeConfig as SpeculativeConfig
from quintet.nested import StructuredOutputsConfig as StructuredOutputsConfig
from quintet.option import choice, nested
from quintet.option import dotted as dotted
from quintet.option import gathered as gathered
from quintet.option import option as option
from quintet.option import settle as settle
from quintet.values import Parse, count, integer, json_object, one_of, optional, several, share, text, truth

SCHEMES = ("int8", "int4", "w8a8", "w4a8")
BUNDLED = "bundled"  # the model inside the package: the first run needs no download

# The sampling defaults that a generation_config.json may set, under the names of SamplingParams.
GENERATION_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_tokens")


def _processor(value: Any) -> Any:
    """A class, or the dotted name of one."""
    return value if isinstance(value, type) else text(value)


def _token(value: Any) -> str | bool:
    return value if isinstance(value, bool) else text(value)


def _dtype(value: Any) -> str:
    """A name; a torch.dtype is turned into one, without importing torch."""
    names = {"half": "float16", "fp16": "float16", "float": "float32", "fp32": "float32", "bf16": "bfloat16"}
    return str(one_of("auto", "float32", "bfloat16", "float16", **names)(str(value).removeprefix("torch.")))


def _group_size(value: Any) -> int:
    return int(one_of("32", "64", "128")(str(value)))


def _length(value: Any) -> int | str:
    return "auto" if value in ("auto", -1, "-1") else int(count()(value))


@dataclass(frozen=True)
class EngineConfig:
    """Everything that fixes an engine: which model, on what, with how much memory, and how requests share it.

    Values are checked and brought to one form when it is made; a change is a new object (`replace`). vLLM's names
    hold wherever the meaning is the same.
    """

    model: str = option(BUNDLED, text, "folder, Hugging Face hub id, or 'bundled'", group="model", flags=("-m",))
    tokenizer: str | None = option(None, optional(text), "folder or hub id, if not the model's own", group="model")
    skip_tokenizer_init: bool = option(
        False, truth, "load no tokenizer: prompts and outputs are token ids alone", group="model"
    )
    revision: str | None = option(None, optional(text), "branch, tag or commit of the model on the hub", group="model")
    tokenizer_revision: str | None = option(
        None, optional(text), "branch, tag or commit of the tokenizer on the hub", group="model"
    )
    download_dir: str | None = option(
        None, optional(text), "where downloads are kept; the hub's own cache if not given", group="model"
    )
    hf_token: str | bool | None = option(
        None,
        optional(_token),
        "the hub's access token; the stored one or HF_TOKEN if not given",
        group="model",
        repr=False,
    )
    hf_overrides: dict[str, Any] | None = option(
        None, optional(json_object), "entries that replace those of the model's config.json", group="model"
    )
    load_format: str = choice(
        "auto", "auto", "safetensors", "dummy", help="dummy: random weights, none are read", group="model"
    )
    dtype: str = option(
        "auto", _dtype, "of weights and activations; auto: what the model was saved in, if the device can",
        group="model", choices=("auto", "float32", "bfloat16", "float16"),
    )  # fmt: skip
    quantization: str | None = option(
        None, optional(one_of(*SCHEMES)), "quantize the weights of a bfloat16, float16 or float32 checkpoint while it "
        "is loaded: int8, int4, or w8a8, w4a8 with activations in int8 too", group="model", choices=SCHEMES,
    )  # fmt: skip
    quantization_group_size: int | None = option(
        None, optional(_group_size), "weights in a row that share a scale: 32, 64 or 128; the scheme's own "
        "if not given", group="model", metavar="WEIGHTS",
    )  # fmt: skip
    trust_remote_code: bool = option(False, truth, "refused: a model's repository never runs code here", group="model")
    generation_config: str = option(
        "auto", text, "where sampling defaults come from: auto (the model's generation_config.json), quintet (none), "
        "or a folder", group="model",
    )  # fmt: skip
    override_generation_config: dict[str, Any] | None = option(
        None, optional(json_object), "sampling defaults that replace those of the generation config", group="model"
    )

    enable_prompt_embeds: bool = option(
        False, truth, "let a request bring embeddings in the place of prompt tokens", group="model"
    )

    device: str = option("auto", text, "platform to run on, or auto: `quintet platforms` lists them", group="device")
    tensor_parallel_size: int = option(1, count(), "devices that share each layer", group="device", flags=("-tp",))
    enforce_eager: bool = option(False, truth, "run the model without capturing or compiling it", group="device")
    capture_ahead: bool = option(
        False, truth, "capture every decode step before serving, on platforms that do; else each when it first comes",
        group="device",
    )  # fmt: skip
    compilation_cache_dir: str = option(
        "auto", text, "where a platform that compiles keeps what it compiled, for the next start: a folder, auto "
        "(~/.cache/quintet) or none", group="device", metavar="FOLDER",
    )  # fmt: skip

    max_model_len: int | str | None = option(
        None, optional(_length), "tokens of prompt and output together (4k, 4K), or auto: as many as fit; "
        "the model's own length if not given", group="memory", metavar="TOKENS",
    )  # fmt: skip
    gpu_memory_utilization: float = option(
        0.9,
        share,
        "share of the device's memory (a CPU's: the host's) that may be used",
        group="memory",
        metavar="SHARE",
    )
    kv_cache_memory_bytes: int | None = option(
        None, optional(count()), "memory of the KV cache (2G), instead of a share of the device's", group="memory",
        metavar="BYTES",
    )  # fmt: skip
    num_pages: int | None = option(
        None, optional(count(2)), "pages of the KV cache, instead of what fits; page 0 holds nothing", group="memory",
        aliases=("num_gpu_blocks_override",),
    )  # fmt: skip
    page_size: int = option(16, count(), "tokens in one page of the KV cache", group="memory", aliases=("block_size",))
    kv_cache_dtype: str = choice(
        "auto", "auto", "int8", "fp8", fp8_e4m3="fp8", help="of the KV cache; auto: the weights'; int8: half of 16 "
        "bits and a scale for each head of each token; fp8 (e4m3): half, without a scale", group="memory",
    )  # fmt: skip
    enable_prefix_caching: bool = option(
        True, truth, "keep pages of finished requests for prompts that begin alike", group="memory"
    )

    max_num_seqs: int = option(256, count(), "most requests in one step", group="scheduling")
    max_num_batched_tokens: int = option(2048, count(), "most tokens in one step", group="scheduling")
    enable_chunked_prefill: bool = option(True, truth, "let a long prompt take several steps", group="scheduling")
    scheduling_policy: str = choice(
        "fcfs", "fcfs", "priority", help="who goes first: first come, or the lowest priority number", group="scheduling"
    )

    speculative_config: SpeculativeConfig | None = nested(
        SpeculativeConfig, None, "guess tokens ahead and let one step of the model check them, such as "
        '{"method": "ngram", "num_speculative_tokens": 4}', group="scheduling",
    )  # fmt: skip

    seed: int = option(0, integer, "of the random numbers of requests that bring no seed", group="sampling")
    max_logprobs: int = option(
        20, count(0, -1), "most logprobs that a request may ask for; -1: the whole vocabulary", group="sampling"
    )
    logprobs_mode: str = choice(
        "raw_logprobs", "raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits",
        help="what logprobs are: of the model's own scores, or after penalties, temperature and cuts", group="sampling",
    )  # fmt: skip
    logits_processors: tuple[Any, ...] = option(
        (), several(_processor), "classes that edit logits, by dotted name or entry point", group="sampling"
    )
    structured_outputs_config: StructuredOutputsConfig = nested(
        StructuredOutputsConfig, StructuredOutputsConfig(), "how answers are held to a schema or a grammar",
        group="sampling",
    )  # fmt: skip
    disable_log_stats: bool = option(False, truth, "log no statistics", group="sampling")

    def __post_init__(self) -> None:
        settle(self)
        self._refuse_what_is_not_there()
        self._refuse_contradictions()

    def _refuse_what_is_not_there(self) -> None:
        if self.trust_remote_code:
            raise ValueError(
                "trust_remote_code=True: quintet never runs code that comes with a model, since whoever can write to "
                "its repository could run anything here; leave it out, the supported families are built in"
            )

    def _refuse_contradictions(self) -> None:
        if self.generation_config == "vllm":  # the same opt-out under the name people know
            object.__setattr__(self, "generation_config", "quintet")
        if self.num_pages is not None and self.kv_cache_memory_bytes is not None:
            raise ValueError("num_pages and kv_cache_memory_bytes both fix the KV cache's size; give one of them")
        if self.capture_ahead and self.enforce_eager:
            raise ValueError(
                "enforce_eager=True captures nothing, so capture_ahead=True means nothing; give one of them"
            )
        if self.quantization_group_size is not None and self.quantization in (None, "w8a8"):
            raise ValueError(
                f"quantization_group_size means nothing with quantization={self.quantization!r}, where no weights "
                "share a scale in groups; leave it out, or set quantization to int8, int4 or w4a8"
            )
        if self.skip_tokenizer_init and self.tokenizer is not None:
            raise ValueError("skip_tokenizer_init=True loads no tokenizer, so tokenizer must not be given")
        if self.override_generation_config:
            names = ("max_new_tokens", *GENERATION_DEFAULTS)
            refuse_unknown("entry of override_generation_config", self.override_generation_config, names)

    def replace(self, **changes: Any) -> "EngineConfig":
        """A new one with these fields changed, checked again."""
        return EngineConfig(**{**self._fields(), **_by_field(gathered(dotted(EngineConfig, changes)))})

    def _fields(self) -> dict[str, Any]:
        return {each.name: getattr(self, each.name) for each in dataclasses.fields(self)}

    @classmethod
    def from_kwargs(cls, **kwargs: Any) -> "EngineConfig":
        """From names that people know, vLLM's among them; ValueError names the nearest, or what to use instead."""
        return cls(**_by_field(gathered(dotted(cls, kwargs))))


def _by_field(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Aliases to field names; refuses names that are unknown, or given twice under two names."""
    aliases = {alias: each.name for each in dataclasses.fields(EngineConfig) for alias in each.metadata["aliases"]}
    known = {each.name for each in dataclasses.fields(EngineConfig)} | set(aliases)
    for name in kwargs:
        if name in LACKING:
            raise ValueError(f"{name} is not there: {LACKING[name]}")
    refuse_unknown("engine argument", kwargs, known)
    named: dict[str, Any] = {}
    for name, value in kwargs.items():
        target = aliases.get(name, name)
        if target in named:
            other = next(alias for alias in (target, *aliases) if alias in kwargs and alias != name)
            raise ValueError(f"{name} and {other} are the same setting; give one of them")
        named[target] = value
    return named


_PREFIX = "QUINTET_"


def _variable(name: str, default: Any, parse: Parse, help: str, secret: bool = False) -> Any:
    metadata = {"variable": name, "parse": parse, "help": help, "secret": secret}
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
    hf_hub_offline: bool = _variable("HF_HUB_OFFLINE", False, truth, "use downloaded models alone, ask no network")
    cpu_isa: str | None = _variable(
        "QUINTET_CPU_ISA", None, text, "instruction set of CPU kernels, if not the processor's best: avx512, avx2 or "
        "baseline",
    )  # fmt: skip
    cpu_bind: bool = _variable(
        "QUINTET_CPU_BIND", True, truth, "keep each CPU worker on a core of its own where all the cores of a machine, "
        "or of a NUMA node, are used; 0: the system moves them",
    )  # fmt: skip
    cache_home: str | None = _variable("XDG_CACHE_HOME", None, text, "where caches are kept, instead of ~/.cache")
    jax_platforms: str | None = _variable("JAX_PLATFORMS", None, text, "devices that JAX may open (the tpu platform)")
    xla_flags: str | None = _variable("XLA_FLAGS", None, text, "XLA's own settings (the tpu platform)")
    api_key: str | None = _variable(
        "QUINTET_API_KEY", None, text, "a key that requests to `quintet serve` must bring", secret=True
    )
    openai_api_key: str | None = _variable(
        "OPENAI_API_KEY", None, text, "the key that the commands with --url show to a server", secret=True
    )

    @classmethod
    def documented(cls) -> dict[str, str]:
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
    """What runs inside, a library's import as a rule, leaves no variable behind."""
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
    """Reads the variables above; an unknown QUINTET_* is refused with the nearest. An empty one counts as not set."""
    fields = {each.metadata["variable"]: each for each in dataclasses.fields(Environment)}
    ours = [name for name in environ if name.startswith(_PREFIX)]
    refuse_unknown("environment variable", ours, [name for name in fields if name.startswith(_PREFIX)])
    values: dict[str, Any] = {}
    for name, each in fields.items():
        if environ.get(name, "").strip():
            try:
                values[each.name] = each.metadata["parse"](environ[name].strip())
            except ValueError as error:
                raise ValueError(f"environment variable {name} {error}") from None
    return Environment(**values)
