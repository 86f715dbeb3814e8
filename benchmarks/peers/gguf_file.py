"""A bfloat16 checkpoint of a Llama, Qwen3 or Qwen3-MoE as a GGUF file, without a vocabulary: prompts are token ids."""

import json
import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np

Array = np.ndarray[Any, Any]
KINDS = {"llama": "llama", "qwen3": "qwen3", "qwen3_moe": "qwen3moe"}  # model_type -> llama.cpp's name
EXPERT = re.compile(r"\.experts\.(\d+)\.")


def write(checkpoint: Path, target: Path) -> None:
    """Matrices stay bfloat16; vectors become float32, as llama.cpp wants them."""
    config = json.loads((checkpoint / "config.json").read_text())
    kind = config["model_type"]
    rope = config["rope_parameters"]
    if kind not in KINDS or rope["rope_type"] != "default":
        raise ValueError(
            f"{checkpoint} is a {kind} with {rope['rope_type']} positions; {', '.join(KINDS)} and default ones go"
        )
    writer = gguf.GGUFWriter(target, KINDS[kind])
    _describe(writer, config)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[KINDS[kind].upper()], config["num_hidden_layers"])
    for name, tensor in _stacked(_tensors(checkpoint / "model.safetensors")).items():
        heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
        projection = name.split(".")[-2]
        if kind == "llama" and projection in heads:
            tensor = _interleaved(tensor, heads[projection])
        new = names.get_name(name, try_suffixes=(".weight",))
        if tensor.ndim == 1 or name.endswith("mlp.gate.weight"):  # a router
            writer.add_tensor(new, (tensor.astype(np.uint32) << 16).view(np.float32))
        else:
            writer.add_tensor(new, tensor.view(np.uint8), raw_dtype=gguf.GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _describe(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(float(config["rope_parameters"]["rope_theta"]))
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    # transformers 5 has another name for their number than checkpoints had before
    if experts := config.get("num_experts") or config.get("num_local_experts"):
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_tokenizer_model("no_vocab")
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)


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


def _interleaved(tensor: Array, heads: int) -> Array:
    """Rows of each head reordered from halves to pairs: llama.cpp turns neighbours where a Llama turns halves."""
    halves = tensor.reshape(heads, 2, -1, tensor.shape[1])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(tensor.shape)
