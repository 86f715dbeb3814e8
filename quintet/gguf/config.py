"""A GGUF file's metadata as the config.json that the model was published with, in transformers' names."""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from quintet.gguf import defaults
from quintet.gguf.cursor import Array, format_name
from quintet.gguf.file import GGUFFile, GGUFTensor
from quintet.gguf.names import GEMMA, GPT2, MIXTURE, OLMO2, PERMUTED, PHI3, ArchitectureNames, without_expert_number

Entries = dict[str, Any]

FLOATS = ("F64", "F32", "F16", "BF16")
DTYPES = {"F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float32"}
COMMON: Mapping[str, str] = {
    "context_length": "max_position_embeddings",
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
}


class GGUFModel:
    """Metadata and tensors of all files of a model."""

    def __init__(self, files: Sequence[GGUFFile]) -> None:
        self.path, self.metadata = files[0].path, files[0].metadata
        self.tensors: dict[str, tuple[GGUFFile, GGUFTensor]] = {
            name: (f, each) for f in files for name, each in f.tensors.items()
        }
        name = self.metadata.get("general.architecture")
        if name not in ARCHITECTURES:
            raise ValueError(
                f"{self.path} is of architecture {str(name)[:60]!r}, which quintet does not read from GGUF; it reads "
                f"{', '.join(sorted(ARCHITECTURES))}: use the model's original files, if its family is supported"
            )
        self.architecture = ARCHITECTURES[str(name)]
        self.prefix = str(name)

    def get(self, key: str, default: Any = None) -> Any:
        """Returns an entry of the architecture; a list of equal numbers, one for each layer, becomes the number."""
        value = self.metadata.get(f"{self.prefix}.{key}", default)
        if not isinstance(value, Array) or value.of_strings:
            return value
        found = set(value)
        if len(found) > 1:
            raise ValueError(
                f"{self.path}: {self.prefix}.{key} differs from layer to layer, which quintet does not read"
            )
        return found.pop() if found else default

    def required_number(self, key: str, default: int | None = None) -> int:
        """A number that the model cannot do without."""
        value = self.get(key, default)
        if type(value) is not int or value < 1:
            raise ValueError(f"{self.path}: {self.prefix}.{key} is {_format_value(value)}, not a whole number from 1")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise ValueError(f"{self.path}: {self.prefix}.{key} is {_format_value(value)}, not a number")
        return float(value)

    def has(self, name: str) -> bool:
        return name in self.tensors

    def shape(self, name: str, axes: int = 1) -> tuple[int, ...]:
        """ValueError if there is no such tensor, or if it has fewer axes."""
        if name not in self.tensors:
            raise ValueError(f"{self.path} holds no tensor {name}: it is another sort of file, or not whole")
        found = self.tensors[name][1].shape
        if len(found) < axes:
            raise ValueError(f"{self.path}: {name} is {list(found)}, and it is to have {axes} axes; fetch it again")
        return found

    @property
    def heads(self) -> int:
        return self.required_number("attention.head_count")

    @property
    def kv_heads(self) -> int:
        return self.required_number("attention.head_count_kv", self.heads)

    @property
    def has_query_bias(self) -> bool:
        """True if queries have a bias."""
        return self.has("blk.0.attn_q.bias") or self.has("blk.0.attn_qkv.bias")

    @property
    def head_dim(self) -> int:
        default = max(1, self.required_number("embedding_length") // self.heads)
        return self.required_number("attention.key_length", default)

    @property
    def window(self) -> int | None:
        """Tokens that are looked back at; None for all of them, as 0 says too."""
        return self.required_number("attention.sliding_window") if self.get("attention.sliding_window") else None

    @functools.cached_property
    def rotary_dim(self) -> int:
        """Features of a head that are turned."""
        return self.required_number("rope.dimension_count", self.head_dim)


def _format_value(value: Any) -> str:
    """A text in quotes, without line ends; others as they are."""
    return format_name(value) if isinstance(value, str) else str(value)[:40]


@dataclass(frozen=True)
class Architecture:
    """Mapping of one of GGUF's architectures to one of our families."""

    kind: Callable[[GGUFModel], str]  # model_type
    names: ArchitectureNames
    entries: Callable[[GGUFModel], Entries] = lambda model: {}
    common: Mapping[str, str] = field(default_factory=lambda: COMMON)
    dtype: str | None = None  # where float16 does not reach as far as the activations


def config(model: GGUFModel) -> Entries:
    """Returns the entries of config.json. ValueError names what the file lacks, or what of it is not understood."""
    entries = _shape(model) | model.architecture.entries(model)
    entries |= _tokens(model) | {"dtype": _dtype(model)}
    types = _types(model)
    if types:
        entries["quantization_config"] = {"quant_method": "gguf", "types": types}
    return entries


def _shape(model: GGUFModel) -> Entries:
    architecture = model.architecture
    entries: Entries = {}
    for key, name in architecture.common.items():
        default = model.heads if key == "attention.head_count_kv" else None
        entries[name] = model.number(key) if key.endswith("epsilon") else model.required_number(key, default)
    entries["model_type"] = architecture.kind(model)
    entries["vocab_size"] = model.shape("token_embd.weight")[0]
    entries["tie_word_embeddings"] = not model.has("output.weight")
    if architecture.common is COMMON:
        entries["head_dim"] = model.head_dim
        if model.get("attention.value_length", model.head_dim) != model.head_dim:
            raise ValueError(f"{model.path}: keys and values are of different lengths, which quintet does not read")
    return entries


def _tokens(model: GGUFModel) -> Entries:
    """The ids that a text begins, is padded and ends with."""
    entries: Entries = {}
    for name, key in (("bos_token_id", "bos"), ("pad_token_id", "padding")):
        entries[name] = model.metadata.get(f"tokenizer.ggml.{key}_token_id")
    return entries | {"eos_token_id": generation(model)["eos_token_id"] or None}


def generation(model: GGUFModel) -> Entries:
    """Returns the entries of generation_config.json."""
    try:
        return defaults.generation(model.metadata)
    except ValueError as error:
        raise ValueError(f"{model.path}: {error}") from None


def _types(model: GGUFModel) -> dict[str, str]:
    """Returns the GGUF type of each module with a weight that is not in floats."""
    found: dict[str, str] = {}
    for name, (_, each) in model.tensors.items():
        base, _, last = name.rpartition(".")
        if last != "weight" or each.kind.name in FLOATS:
            continue
        for module in model.architecture.names.modules(base):
            if found.setdefault(without_expert_number(module), each.kind.name) != each.kind.name:
                raise ValueError(f"{model.path}: {name} is of another type than the other experts of its layer")
    return found


def _dtype(model: GGUFModel) -> str:
    """Returns the first of bfloat16, float16 and float32 that a matrix is in; quantized ones compute in bfloat16."""
    kinds = {each.kind.name for _, each in model.tensors.values() if len(each.shape) > 1}
    wanted = {DTYPES.get(kind, "bfloat16") for kind in kinds}
    one = next((each for each in ("bfloat16", "float16", "float32") if each in wanted), "bfloat16")
    return model.architecture.dtype or one


# ------------------------------------------------------------------------------------------------- rotary positions


def _rope(model: GGUFModel, partial: bool = False, base: float = 1e4) -> Entries:
    """rope_parameters; ValueError where part of each head is turned in a family that turns all of it."""
    entries: Entries = {"rope_type": "default", "rope_theta": model.number("rope.freq_base", base)}
    if partial:
        entries["partial_rotary_factor"] = model.rotary_dim / model.head_dim
    elif model.rotary_dim != model.head_dim:
        raise ValueError(f"{model.path}: {model.rotary_dim} of {model.head_dim} features are turned, not all of them")
    kind = model.get("rope.scaling.type", "linear" if model.get("rope.scale_linear") else "none")
    if kind == "linear":
        factor = model.number("rope.scaling.factor", model.get("rope.scale_linear", 1.0))
        return entries | ({"rope_type": "linear", "factor": factor} if factor != 1 else {})
    if kind == "yarn":
        return entries | _yarn(model)
    if kind not in ("none", "longrope"):
        raise ValueError(f"{model.path}: rope.scaling.type is {str(kind)[:40]!r}, which quintet does not read")
    return entries | _divisors(model)


def _yarn(model: GGUFModel) -> Entries:
    entries: Entries = {
        "rope_type": "yarn",
        "factor": model.number("rope.scaling.factor"),
        "original_max_position_embeddings": model.required_number("rope.scaling.original_context_length"),
    }
    for key, name in (("beta_fast", "beta_fast"), ("beta_slow", "beta_slow"), ("attn_factor", "attention_factor")):
        if model.get(f"rope.scaling.yarn_{key}") is not None:
            entries[name] = model.number(f"rope.scaling.yarn_{key}")
    return entries


def _divisors(model: GGUFModel) -> Entries:
    """A divisor for each frequency: Llama 3's, which the file has computed, and those of LongRoPE."""
    one, long, short = (_numbers(model, name) for name in ("rope_freqs", "rope_factors_long", "rope_factors_short"))
    if one is not None:
        long = short = one
    if long is None or short is None:
        return {}
    length = model.required_number("context_length")
    return {
        "rope_type": "longrope",
        "long_factor": long,
        "short_factor": short,
        "attention_factor": model.number("rope.scaling.attn_factor", 1.0),
        "original_max_position_embeddings": model.required_number("rope.scaling.original_context_length", length),
    }


def _numbers(model: GGUFModel, name: str) -> list[float] | None:
    if not model.has(f"{name}.weight"):
        return None
    file, each = model.tensors[f"{name}.weight"]
    if each.kind.name != "F32" or each.shape != (model.rotary_dim // 2,):
        raise ValueError(
            f"{model.path}: {name}.weight is {list(each.shape)} of {each.kind.name}, not [{model.rotary_dim // 2}] of "
            "F32"
        )
    return file.floats(each)


# ----------------------------------------------------------------------------------------------------- architectures


def _llama(model: GGUFModel) -> Entries:
    entries: Entries = {"rope_parameters": _rope(model), "attention_bias": model.has_query_bias}
    entries["mlp_bias"] = model.has("blk.0.ffn_up.bias")
    entries["sliding_window"] = model.window
    return entries | (_experts(model, "num_local_experts") if _mixtral(model) else {})


def _llama_kind(model: GGUFModel) -> str:
    """llama.cpp has all of them in one architecture; windows are ours, which it passes over."""
    if _mixtral(model):
        return "mixtral"
    return "mistral" if model.window else "llama"


def _mixtral(model: GGUFModel) -> bool:
    return bool(model.get("expert_count", 0))


def _experts(model: GGUFModel, name: str = "num_experts") -> Entries:
    return {
        name: model.required_number("expert_count"),
        "num_experts_per_tok": model.required_number("expert_used_count"),
    }


def _qwen2(model: GGUFModel) -> Entries:
    return {"rope_parameters": _rope(model), "use_sliding_window": False}


def _qwen3(model: GGUFModel) -> Entries:
    return _qwen2(model) | {"attention_bias": model.has_query_bias}


def _qwen2_moe(model: GGUFModel) -> Entries:
    shared = model.shape("blk.0.ffn_gate_shexp.weight")[0]
    entries = {"shared_expert_intermediate_size": shared, "qkv_bias": model.has_query_bias}
    return _qwen2(model) | entries | _qwen_experts(model, renormalized=False)


def _qwen3_moe(model: GGUFModel) -> Entries:
    return _qwen3(model) | _qwen_experts(model, renormalized=True)


def _qwen_experts(model: GGUFModel, renormalized: bool) -> Entries:
    """Experts as llama.cpp computes them: the weights are renormalized or not by the architecture alone."""
    both = model.has("blk.0.ffn_gate_up_exps.weight")
    name = "blk.0.ffn_gate_up_exps.weight" if both else "blk.0.ffn_gate_exps.weight"
    width = model.shape(name, axes=3)[1] // (2 if both else 1)
    entries = {"moe_intermediate_size": width, "norm_topk_prob": renormalized}
    return {**_experts(model), **entries, "decoder_sparse_step": 1, "mlp_only_layers": []}


def _gemma2(model: GGUFModel) -> Entries:
    return {
        "rope_parameters": _rope(model),
        "query_pre_attn_scalar": _query_scale(model, 46),
        "sliding_window": model.required_number("attention.sliding_window", 4096),
        "attn_logit_softcapping": model.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": model.number("final_logit_softcapping", 30.0),
    }


def _gemma3(model: GGUFModel) -> Entries:
    local = model.number("rope.freq_base_swa", 10000.0)
    window, capped = model.window, model.get("final_logit_softcapping")
    kinds = ["full_attention" if not window or not (i + 1) % 6 else "sliding_attention" for i in range(_layers(model))]
    return {
        "rope_parameters": {
            "full_attention": _rope(model, base=1e6),
            "sliding_attention": {"rope_type": "default", "rope_theta": local},
        },
        "query_pre_attn_scalar": _query_scale(model, 62),
        "layer_types": kinds,
        "sliding_window": window or 4096,
        "final_logit_softcapping": None if capped is None else model.number("final_logit_softcapping"),
    }


def _layers(model: GGUFModel) -> int:
    return min(model.required_number("block_count"), len(model.tensors))


def _query_scale(model: GGUFModel, deepest: int) -> float:
    """Returns the number that scores are divided by the root of: no entry has it, and the deepest Gemma has its own."""
    whole = model.required_number("block_count") == deepest
    return model.required_number("embedding_length") // model.heads if whole else model.head_dim


def _phi3(model: GGUFModel) -> Entries:
    length = model.required_number("context_length")
    return {
        "rope_parameters": _rope(model, partial=True),
        "original_max_position_embeddings": model.required_number("rope.scaling.original_context_length", length),
        "sliding_window": model.window,
    }


def _granite(model: GGUFModel) -> Entries:
    return _llama(model) | {
        "attention_multiplier": model.number("attention.scale", model.head_dim**-0.5),
        "embedding_multiplier": model.number("embedding_scale", 1.0),
        "residual_multiplier": model.number("residual_scale", 1.0),
        "logits_scaling": model.number("logit_scale", 1.0),
    }


def _smollm3(model: GGUFModel) -> Entries:
    return _llama(model) | {"use_sliding_window": False, "no_rope_layer_interval": 4}


def _olmo2(model: GGUFModel) -> Entries:
    if model.get("attention.sliding_window"):
        raise ValueError(f"{model.path} is of OLMo 3, whose windows quintet does not read from GGUF")
    return {"rope_parameters": _rope(model), "attention_bias": False}


def _olmoe(model: GGUFModel) -> Entries:
    return {"rope_parameters": _rope(model), "norm_topk_prob": False, **_experts(model)}


def _gpt2(model: GGUFModel) -> Entries:
    return {"activation_function": "gelu_new"}


_GPT2 = {
    "context_length": "n_positions", "block_count": "n_layer", "embedding_length": "n_embd",
    "feed_forward_length": "n_inner", "attention.head_count": "n_head",
    "attention.layer_norm_epsilon": "layer_norm_epsilon",
}  # fmt: skip

ARCHITECTURES: Mapping[str, Architecture] = {
    "gemma2": Architecture(lambda _: "gemma2", GEMMA, _gemma2, dtype="bfloat16"),
    "gemma3": Architecture(lambda _: "gemma3_text", GEMMA, _gemma3, dtype="bfloat16"),
    "gpt2": Architecture(lambda _: "gpt2", GPT2, _gpt2, _GPT2),
    "granite": Architecture(lambda _: "granite", PERMUTED, _granite),
    "llama": Architecture(_llama_kind, PERMUTED, _llama),
    "olmo2": Architecture(lambda _: "olmo2", OLMO2, _olmo2),
    "olmoe": Architecture(lambda _: "olmoe", MIXTURE, _olmoe),
    "phi3": Architecture(lambda _: "phi3", PHI3, _phi3),
    "qwen2": Architecture(lambda _: "qwen2", MIXTURE, _qwen2),
    "qwen2moe": Architecture(lambda _: "qwen2_moe", MIXTURE, _qwen2_moe),
    "qwen3": Architecture(lambda _: "qwen3", MIXTURE, _qwen3),
    "qwen3moe": Architecture(lambda _: "qwen3_moe", MIXTURE, _qwen3_moe),
    "smollm3": Architecture(lambda _: "smollm3", PERMUTED, _smollm3),
}
