"""A bfloat16 checkpoint of one of KINDS as a GGUF file, without a vocabulary: prompts are token ids."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np

Array = np.ndarray[Any, Any]
# model_type -> llama.cpp's name
KINDS = {
    "llama": "llama",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3moe",
    "deepseek_v2": "deepseek2",
    "gemma3_text": "gemma3",
    "granitemoehybrid": "granitehybrid",
    "lfm2": "lfm2",
}
ARCHITECTURES = {gguf.MODEL_ARCH_NAMES[each]: each for each in gguf.MODEL_ARCH}
EXPERT = re.compile(r"\.experts\.(\d+)\.")
VECTORS = (".mlp.gate.weight", ".conv1d.weight", ".conv.conv.weight")  # float32 though not of one axis: routers, taps


def write(checkpoint: Path, target: Path) -> None:
    """Matrices stay bfloat16; vectors become float32, as llama.cpp wants them."""
    config = json.loads((checkpoint / "config.json").read_text())
    kind = config["model_type"]
    rope = config["rope_parameters"]
    types = {each["rope_type"] for each in (rope if "rope_type" not in rope else {"": rope}).values()}
    if kind not in KINDS or types != {"default"}:
        raise ValueError(
            f"{checkpoint} is a {kind} with {', '.join(types)} positions; {', '.join(KINDS)} and default ones go"
        )
    writer = gguf.GGUFWriter(target, KINDS[kind])
    _describe(writer, config)
    names = gguf.get_tensor_name_map(ARCHITECTURES[KINDS[kind]], config["num_hidden_layers"])
    tensors = _stacked(_tensors(checkpoint / "model.safetensors"))
    if kind == "deepseek_v2":
        tensors = _absorbed(tensors, config)
    for name, tensor in tensors.items():
        heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
        projection = name.split(".")[-2]
        if kind == "llama" and projection in heads:
            tensor = _interleaved(tensor, heads[projection])
        for part, numbers in _parts(name, tensor, config):
            _add(writer, names, part, numbers, 1.0 if kind == "gemma3_text" else 0.0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add(writer: gguf.GGUFWriter, names: gguf.TensorNameMap, name: str, tensor: Array, around: float) -> None:
    """`around`: what vectors are kept less than; a norm of Gemma multiplies by 1 + w."""
    new = names.get_name(name, try_suffixes=(".weight", ".bias"))
    if new is None:
        raise ValueError(f"{name} has no name in a GGUF file")
    if tensor.dtype == np.float32:
        writer.add_tensor(new, tensor)
    elif tensor.ndim == 1 or name.endswith(VECTORS):
        writer.add_tensor(new, _widened(tensor) + np.float32(around))
    else:
        writer.add_tensor(new, tensor.view(np.uint8), raw_dtype=gguf.GGMLQuantizationType.BF16)


def _parts(name: str, tensor: Array, config: dict[str, Any]) -> Iterator[tuple[str, Array]]:
    """Yields tensors as llama.cpp stores them: conv without the middle axis, gate and up apart, SSM parameters."""
    stem, _, last = name.rpartition(".")
    if name.endswith((".conv1d.weight", ".conv.conv.weight")):
        yield name, tensor[:, 0]
    elif last == "A_log":
        yield name, -np.exp(_widened(tensor))[:, None]
    elif last == "D":
        yield name, _widened(tensor)[:, None]
    elif last == "dt_bias":
        yield f"{stem}.dt_proj.bias", tensor
    elif name.endswith(".mamba.norm.weight"):
        yield name, _widened(tensor).reshape(config["mamba_n_groups"], -1)
    elif name.endswith(".shared_mlp.input_linear.weight"):
        for part, numbers in zip(("gate_proj", "up_proj"), np.split(tensor, 2), strict=True):
            yield name.replace("shared_mlp.input_linear", f"mlp.{part}"), numbers
    else:
        yield name.replace("shared_mlp.output_linear", "mlp.down_proj"), tensor


def _describe(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    latent = config.get("kv_lora_rank")
    rope = config["rope_parameters"]
    kinds = config.get("layer_types") or []
    states = config["model_type"] in ("granitemoehybrid", "lfm2")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(_inner(config))
    writer.add_head_count(config["num_attention_heads"])
    if latent:
        _describe_latent(writer, config)
    else:
        kv_heads = config["num_key_value_heads"]
        each = [kv_heads * (kind == "full_attention") for kind in kinds]  # none where a layer keeps a state
        writer.add_head_count_kv(each if states else kv_heads)
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
        writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(float(rope.get("full_attention", rope)["rope_theta"]))
    if "sliding_attention" in rope:  # every sixth layer sees all, as the architecture has it
        writer.add_sliding_window(config["sliding_window"])
        writer.add_rope_freq_base_swa(float(rope["sliding_attention"]["rope_theta"]))
    writer.add_layer_norm_rms_eps(config["norm_eps"] if config["model_type"] == "lfm2" else config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    # transformers 5 has another name for their number than checkpoints had before; DeepSeek's have a third
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    if experts := next((config[name] for name in names if config.get(name)), None):
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    if config["model_type"] == "lfm2":
        writer.add_shortconv_l_cache(config["conv_L_cache"])
    if config["model_type"] == "granitemoehybrid":
        _describe_granite(writer, config)
    writer.add_tokenizer_model("no_vocab")
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)


def _describe_granite(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    """Without experts, and without positions."""
    if config["num_local_experts"] or config.get("position_embedding_type") == "rope":
        raise ValueError("a granitemoehybrid goes without experts and positions")
    writer.add_rope_scaling_finetuned(False)
    writer.add_attention_scale(config["attention_multiplier"])
    writer.add_embedding_scale(config["embedding_multiplier"])
    writer.add_residual_scale(config["residual_multiplier"])
    writer.add_logit_scale(config["logits_scaling"])
    writer.add_ssm_conv_kernel(config["mamba_d_conv"])
    writer.add_ssm_state_size(config["mamba_d_state"])
    writer.add_ssm_group_count(config["mamba_n_groups"])
    writer.add_ssm_inner_size(config["mamba_n_heads"] * config["mamba_d_head"])
    writer.add_ssm_time_step_rank(config["mamba_n_heads"])  # llama.cpp's name for the heads


def _inner(config: dict[str, Any]) -> int:
    """The width of the feed-forward: LFM2 computes two thirds of what is written, up to the next multiple."""
    written: int = config["intermediate_size"]
    if not config.get("block_auto_adjust_ff_dim"):
        return written
    multiple = config["block_multiple_of"]
    return -(-int(config["block_ffn_dim_multiplier"] * int(2 * written / 3)) // multiple) * multiple


def _describe_latent(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    """Latent attention as llama.cpp absorbs it: one K of the latent and what is turned, of which V is the beginning."""
    rank, turned = config["kv_lora_rank"], config["qk_rope_head_dim"]
    writer.add_head_count_kv(1)
    writer.add_kv_lora_rank(rank)
    writer.add_q_lora_rank(config["q_lora_rank"] or 0)  # wanted by all but models of 26, 27 and 48 layers
    writer.add_key_length(rank + turned)
    writer.add_value_length(rank)
    writer.add_key_length_mla(config["qk_nope_head_dim"] + turned)
    writer.add_value_length_mla(config["v_head_dim"])
    writer.add_rope_dimension_count(turned)
    writer.add_leading_dense_block_count(config["first_k_dense_replace"])
    writer.add_expert_shared_count(config["n_shared_experts"])
    writer.add_expert_weights_scale(float(config["routed_scaling_factor"]))
    writer.add_expert_weights_norm(config["norm_topk_prob"])


def _tensors(path: Path) -> dict[str, Array]:
    """Bit patterns as uint16, memory-mapped: NumPy has no bfloat16."""
    data = np.memmap(path, np.uint8, "r")
    length = int.from_bytes(data[:8].tobytes(), "little")
    header = json.loads(data[8 : 8 + length].tobytes())
    header.pop("__metadata__", None)
    found = {}
    for name, entry in header.items():
        if entry["dtype"] != "BF16":
            raise ValueError(f"{name} of {path} is {entry['dtype']}; only BF16 is written")
        first, last = (8 + length + offset for offset in entry["data_offsets"])
        found[name] = data[first:last].view(np.uint16).reshape(entry["shape"])
    return found


def _widened(tensor: Array) -> Array:
    return (tensor.astype(np.uint32) << 16).view(np.float32)


def _stacked(tensors: dict[str, Array]) -> dict[str, Array]:
    """Experts that stand one by one become stacks [E, N, K]."""
    found: dict[str, Any] = {}
    for name, tensor in tensors.items():
        if place := EXPERT.search(name):
            found.setdefault(EXPERT.sub(".experts.", name), {})[int(place[1])] = tensor
        else:
            found[name] = tensor
    return {
        name: np.stack([each[i] for i in range(len(each))]) if isinstance(each, dict) else each
        for name, each in found.items()
    }


def _absorbed(tensors: dict[str, Array], config: dict[str, Any]) -> dict[str, Array]:
    """kv_b_proj, head by head: the keys' part turned around, as q goes through it, and the values'."""
    heads, plain = config["num_attention_heads"], config["qk_nope_head_dim"]
    found = {}
    for name, tensor in tensors.items():
        if not name.endswith("kv_b_proj.weight"):
            found[name] = tensor
            continue
        each = tensor.reshape(heads, plain + config["v_head_dim"], tensor.shape[1])
        found[name.replace("kv_b", "k_b")] = np.ascontiguousarray(each[:, :plain].swapaxes(1, 2))
        found[name.replace("kv_b", "v_b")] = np.ascontiguousarray(each[:, plain:])
    return found


def _interleaved(tensor: Array, heads: int) -> Array:
    """Rows of each head reordered from halves to pairs: llama.cpp turns neighbours where a Llama turns halves."""
    halves = tensor.reshape(heads, 2, -1, tensor.shape[1])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(tensor.shape)
