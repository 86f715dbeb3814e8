"""Mistral's own format of a model: params.json instead of config.json, and names of tensors that it gives them."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quintet.common.json_files import read_object
from quintet.common.suggestions import refuse_unknown

if TYPE_CHECKING:
    from torch import Tensor  # API processes come here for a file's name, and import no torch

PARAMS = "params.json"
TEKKEN = "tekken.json"
LENGTH = 128_000  # positions, where a file says nothing; vLLM's
MAX_HEADS = 2**16

NAMES = {  # of params.json -> of config.json
    "dim": "hidden_size", "n_layers": "num_hidden_layers", "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads", "head_dim": "head_dim", "hidden_dim": "intermediate_size",
    "norm_eps": "rms_norm_eps", "vocab_size": "vocab_size", "rope_theta": "rope_theta",
    "sliding_window": "sliding_window", "tied_embeddings": "tie_word_embeddings",
    "max_position_embeddings": "max_position_embeddings", "max_seq_len": "max_position_embeddings",
    "activation": "hidden_act", "dtype": "dtype",
}  # fmt: skip
FIXED_ENTRIES = {"model_type": ("transformer",), "use_biases": (False,), "causal": (True,), "use_cache": (True, False)}
YARN = {
    "factor": "factor", "original_max_position_embeddings": "original_max_position_embeddings",
    "beta": "beta_fast", "alpha": "beta_slow",
}  # fmt: skip
GROWTH = {"original_max_position_embeddings": "original_max_position_embeddings", "beta": "llama_4_scaling_beta"}
TOWERS = ("vision_encoder",)  # parts beside the text model, which runs alone
EXPERTS = {"num_experts": "num_local_experts", "num_experts_per_tok": "num_experts_per_tok"}
_REFUSED = "quintet computes Mistral's dense models and mixtures of experts; use the model in transformers' layout"
UNSUPPORTED_PARAMS = dict.fromkeys(
    ("multimodal", "quantization", "qk_nope_head_dim", "q_lora_rank", "kv_lora_rank", "lora",
     "v_head_dim", "qk_rope_head_dim", "num_shared_experts", "first_k_dense_replace"), _REFUSED,
)  # fmt: skip

PLACES = (  # Mistral's names of tensors -> transformers'
    (r"^tok_embeddings\.", "model.embed_tokens."),
    (r"^norm\.", "model.norm."),
    (r"^output\.", "lm_head."),
    (r"^layers\.", "model.layers."),
    (r"\.attention_norm\.", ".input_layernorm."),
    (r"\.ffn_norm\.", ".post_attention_layernorm."),
    (r"\.attention\.w([qkvo])\.", r".self_attn.\1_proj."),
    (r"\.feed_forward\.(gate|experts)\.", r".block_sparse_moe.\1."),
    (r"\.feed_forward\.w1\.", ".mlp.gate_proj."),
    (r"\.feed_forward\.w2\.", ".mlp.down_proj."),
    (r"\.feed_forward\.w3\.", ".mlp.up_proj."),
)


def config_of(file: Path) -> dict[str, Any]:
    """Returns config.json's entries for a model that has params.json. ValueError names what is not computed here."""
    params = read_object(file)
    known = (*NAMES, *FIXED_ENTRIES, "yarn", "moe", "llama_4_scaling", *TOWERS)
    refuse_unknown(
        f"entry of {file}", [name for name, value in params.items() if value is not None], known, UNSUPPORTED_PARAMS
    )
    for name, values in FIXED_ENTRIES.items():
        if name in params and params[name] not in values:
            raise ValueError(f"{file}: {name} is {params[name]!r}; {_REFUSED}")
    entries = {NAMES[name]: value for name, value in params.items() if name in NAMES and value is not None}
    config = {"max_position_embeddings": LENGTH, "tie_word_embeddings": False, "sliding_window": None, **entries}
    config.setdefault("num_key_value_heads", config.get("num_attention_heads"))
    if isinstance(config["sliding_window"], list):
        raise ValueError(f"{file}: sliding_window differs from layer to layer; {_REFUSED}")
    if params.get("yarn") is not None:
        config["rope_parameters"] = _yarn(params["yarn"], file, config.pop("rope_theta", 10000.0))
    experts = params.get("moe")
    if params.get("llama_4_scaling") is not None:
        return {**config, **_growing(params, config, file)}
    if experts is None:
        return {"model_type": "mistral", "architectures": ["MistralForCausalLM"], **config}
    moe = _part("moe", experts, EXPERTS, file)
    return {"model_type": "mixtral", "architectures": ["MixtralForCausalLM"], **config, **moe}


def _yarn(entry: Any, file: Path, theta: Any) -> dict[str, Any]:
    scaled = entry.get("apply_scale", True) if isinstance(entry, dict) else True
    entries = _part("yarn", entry, {**YARN, "apply_scale": ""}, file)
    entries.pop("", None)
    whole = {"attention_factor": 1.0} if scaled is False else {}
    return {"rope_type": "yarn", "rope_theta": theta, **entries, **whole}


def _growing(params: Mapping[str, Any], config: Mapping[str, Any], file: Path) -> dict[str, Any]:
    """Returns the entries of Ministral 3, whose queries grow with their position."""
    growth, rope = _part("llama_4_scaling", params["llama_4_scaling"], GROWTH, file), config.get("rope_parameters")
    rope = rope or {"rope_type": "default", "rope_theta": config.get("rope_theta", 10000.0)}
    first = growth.get("original_max_position_embeddings")
    if params.get("moe") is not None or rope.get("original_max_position_embeddings", first) != first:
        raise ValueError(f"{file}: llama_4_scaling with moe, or with another first length than yarn's; {_REFUSED}")
    kind = {"model_type": "ministral3", "architectures": ["Ministral3ForCausalLM"]}
    return {**kind, "rope_parameters": {**rope, **growth}}


def _part(name: str, part: Any, names: Mapping[str, str], file: Path) -> dict[str, Any]:
    if not isinstance(part, dict):
        raise ValueError(f"{file}: {name} is no object; fetch it again")
    refuse_unknown(f"entry of {file}'s {name}", part, names, UNSUPPORTED_PARAMS)
    return {names[entry]: value for entry, value in part.items()}


def heads_of(folder: Path) -> dict[str, int]:
    """Returns the query and key head counts; the heads' features are in Mistral's order. ValueError if not given."""
    params = read_object(folder / PARAMS)
    queries = params.get("n_heads")
    keys = params.get("n_kv_heads", queries)
    if not (isinstance(queries, int) and isinstance(keys, int) and 0 < keys <= queries < MAX_HEADS):
        raise ValueError(f"{folder / PARAMS} says n_heads={queries!r} and n_kv_heads={keys!r}; fetch it again")
    return {"q": queries, "k": keys}


class MistralFile:
    """A file of Mistral's, by transformers' names and in its order of features."""

    def __init__(self, file: Any, heads: Mapping[str, int]) -> None:
        self._file, self._heads = file, heads
        self._theirs = {transformers_name(name): name for name in file.keys()}

    def keys(self) -> list[str]:
        return list(self._theirs)

    def get_slice(self, name: str) -> Any:
        return self._file.get_slice(self._theirs[name])

    def get_tensor(self, name: str) -> "Tensor":
        """Rows of queries and keys: pairs that turn together stand side by side there, half a head apart here."""
        tensor: Tensor = self._file.get_tensor(self._theirs[name])
        turned = re.search(r"\.self_attn\.([qk])_proj\.", name)
        if turned is None:
            return tensor
        heads, rows = self._heads[turned[1]], tensor.shape[0]
        if rows % (2 * heads):
            raise ValueError(f"{name} has {rows} rows for {heads} heads; the files are not of one model")
        return tensor.reshape(heads, rows // heads // 2, 2, -1).transpose(1, 2).reshape(tensor.shape)


def transformers_name(name: str) -> str:
    """layers.0.attention.wq.weight -> model.layers.0.self_attn.q_proj.weight"""
    for theirs, ours in PLACES:
        name = re.sub(theirs, ours, name)
    return name
