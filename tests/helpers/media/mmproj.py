"""Small multimodal models as llama.cpp's users have them: two GGUF files, by gguf's writer and tables of names.

What its converter changes of tensors is done here as its description says: rows of queries and keys of Llama and
Pixtral stand for rotations of neighbours, Gemma's norms hold 1 + w, patches of two frames are two tensors.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from torch import Tensor

from tests.helpers.media.configs import WRAPPERS, Wrapper
from tests.helpers.media.wrappers import Made

CONTROL, NORMAL = 3, 1  # of tokens
DEEP = ["sliding_attention"] * 5 + ["full_attention"]  # as llama.cpp takes Gemma 3's layers to be
WINDOWED = {"size": {"shortest_edge": 64, "longest_edge": 2**16}}
INTERN_VISION = {"image_size": [28, 28], "patch_size": [7, 7], "use_mean_pooling": True}


def _like(
    kind: str, text: Mapping[str, Any] | None = None, vision: Mapping[str, Any] | None = None, **more: Any
) -> Wrapper:
    base = WRAPPERS[kind]
    more = {"like": base.like or kind, "model_type": base.model_type or kind, "video_processor": {}, **more}
    return replace(base, text={**base.text, **(text or {})}, vision={**base.vision, **(vision or {})}, **more)


CLIP_SIZES = {"size": {"shortest_edge": 28}, "crop_size": {"height": 28, "width": 28}}
# by clip.projector_type, and the text model where there are several
MODELS: dict[str, Wrapper] = {
    "gemma3": _like("gemma3", {"num_hidden_layers": 6, "layer_types": DEEP}),
    "qwen2vl_merger": _like("qwen2_vl", vision={"mlp_ratio": 3}),
    "qwen2.5vl_merger": _like(
        "qwen2_5_vl", vision={"window_size": 112, "depth": 4, "fullatt_block_indexes": [1, 3]},
        image_processor={**WRAPPERS["qwen2_5_vl"].image_processor, **WINDOWED},
    ),
    "idefics3": _like("idefics3"),
    "mlp": _like("llava", image_processor=CLIP_SIZES),
    "pixtral": _like("pixtral", {"model_type": "llama"}),
    "pixtral, merged": _like("mistral3", {"model_type": "llama"}, {"hidden_act": "silu"}),
    "internvl": _like("internvl", vision=INTERN_VISION),
    "qwen3vl_merger": _like("qwen3_vl"),
    "qwen3vl_merger, mixture": _like("qwen3_vl_moe"),
    "qwen3vl_merger, without deepstack": _like("qwen3_5", {"linear_num_value_heads": 2}),
}  # fmt: skip
ARCHITECTURES = {
    "gemma3": gguf.MODEL_ARCH.GEMMA3, "qwen2_vl": gguf.MODEL_ARCH.QWEN2VL, "qwen2_5_vl": gguf.MODEL_ARCH.QWEN2VL,
    "qwen3_vl": gguf.MODEL_ARCH.QWEN3VL, "qwen3_vl_moe": gguf.MODEL_ARCH.QWEN3VLMOE,
    "qwen3_5": gguf.MODEL_ARCH.QWEN35, "internvl": gguf.MODEL_ARCH.QWEN2,
}  # fmt: skip


def _permuted(x: Tensor, heads: int) -> Tensor:
    """Rows of the features i and i + D / 2 of a head side by side."""
    return x.reshape(heads, 2, -1, *x.shape[1:]).swapaxes(1, 2).reshape(x.shape)


# ------------------------------------------------------------------------------------------------------ text
def write_text(made: Made, path: Path, renamed: Mapping[str, str] | None = None) -> Path:
    """Writes the text model. `renamed`: tokens that have another name."""
    config, kind = made.model.config.get_text_config(), made.model.config.model_type
    arch = ARCHITECTURES.get(kind, gguf.MODEL_ARCH.LLAMA)
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[arch])
    rope, count = config.rope_parameters, config.num_hidden_layers
    whole = rope.get("full_attention", rope)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_block_count(count)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_key_length(width)
    writer.add_value_length(width)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(whole["rope_theta"])
    if "mrope_section" in whole:
        writer.add_rope_dimension_sections([*whole["mrope_section"], 0])
    if kind == "qwen3_vl_moe":
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    if kind == "gemma3":
        writer.add_sliding_window(config.sliding_window)
        writer.add_float32("gemma3.rope.freq_base_swa", rope["sliding_attention"]["rope_theta"])
    if kind == "qwen3_5":
        _delta(writer, config, whole)
    _vocabulary(writer, made, renamed or {})
    names = gguf.get_tensor_name_map(arch, count)
    for name, tensor in _text_tensors(made):
        for each, x in _text_changes(name, tensor, kind, config):
            own = names.get_name(each, (".weight", ".bias"))
            assert own is not None, each
            own += "" if own.endswith((".weight", ".bias", "ssm_a")) else ".weight"
            writer.add_tensor(own, x.float().contiguous().numpy())
    return _written(writer, path)


def _text_tensors(made: Made) -> list[tuple[str, Tensor]]:
    found = []
    for name, tensor in made.model.state_dict().items():
        for prefix in ("model.language_model.", "model.text_model."):
            if name.startswith(prefix):
                found.append((f"model.{name.removeprefix(prefix)}", tensor))
        if name.startswith("lm_head."):
            found.append((name, tensor))
    return found


def _text_changes(name: str, x: Tensor, kind: str, config: Any) -> list[tuple[str, Tensor]]:
    arch = ARCHITECTURES.get(kind, gguf.MODEL_ARCH.LLAMA)
    if arch == gguf.MODEL_ARCH.LLAMA and name.endswith(("q_proj.weight", "k_proj.weight")):
        x = _permuted(x, config.num_attention_heads if "q_proj" in name else config.num_key_value_heads)
    if kind in ("gemma3", "qwen3_5") and name.endswith("norm.weight") and "linear_attn.norm" not in name:
        x = x + 1
    if name.endswith("mlp.experts.gate_up_proj"):
        return [(name.replace("gate_up", each), part) for each, part in zip(("gate", "up"), x.chunk(2, 1), strict=True)]
    if name.endswith("A_log"):
        x = -torch.exp(x)
    return [(name.replace(".dt_bias", ".dt_proj.bias"), x.squeeze() if "conv1d" in name else x)]


def _delta(writer: gguf.GGUFWriter, config: Any, rope: Mapping[str, Any]) -> None:
    layers, size = config.num_hidden_layers, config.linear_value_head_dim
    writer.add_ssm_conv_kernel(config.linear_conv_kernel_dim)
    writer.add_ssm_state_size(config.linear_key_head_dim)
    writer.add_ssm_group_count(config.linear_num_key_heads)
    writer.add_ssm_time_step_rank(config.linear_num_value_heads)
    writer.add_ssm_inner_size(size * config.linear_num_value_heads)
    writer.add_rope_dimension_count(int(config.head_dim * rope["partial_rotary_factor"]))
    assert layers and config.linear_num_key_heads == config.linear_num_value_heads, "heads of values stay in order"


def _vocabulary(writer: gguf.GGUFWriter, made: Made, renamed: Mapping[str, str]) -> None:
    tokenizer, size = made.processor.tokenizer, made.model.config.get_text_config().vocab_size
    words = {number: word for word, number in tokenizer.get_vocab().items()}
    added = set(tokenizer.get_added_vocab()) | {"<s>", "</s>"}
    tokens = [words.get(each, f"[PAD{each}]") for each in range(size)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([renamed.get(each, each) for each in tokens])
    writer.add_token_types([CONTROL if each in added else NORMAL for each in tokens])
    writer.add_token_merges(["a b"])  # which makes no token: all are bytes
    writer.add_bos_token_id(256)
    writer.add_eos_token_id(257)
    writer.add_add_bos_token(False)


# --------------------------------------------------------------------------------------------------- encoder
def write_mmproj(
    made: Made, path: Path, kind: str, dtype: Any = np.float32, text_width: int = 0, **metadata: Any
) -> Path:
    """Writes the encoder. `metadata`: entries of clip.vision that replace others, or are taken away (None);
    `text_width`: of Gemma's rows, if not the model's."""
    writer = gguf.GGUFWriter(path, "clip")
    vision, text = made.model.config.vision_config, made.model.config.get_text_config()
    kind = kind.partition(",")[0]
    layers = getattr(vision, "depth", None) or vision.num_hidden_layers
    layers -= kind == "mlp"  # the last is behind the one that is read
    writer.add_clip_has_vision_encoder(True)
    writer.add_clip_projector_type(metadata.pop("clip.projector_type", kind))
    patch = vision.patch_size[0] if isinstance(vision.patch_size, list) else vision.patch_size
    entries: dict[str, Any] = {
        "projection_dim": text.hidden_size, "patch_size": patch, "image_size": _side(vision, patch),
        "embedding_length": getattr(vision, "embed_dim", None) or vision.hidden_size,
        "feed_forward_length": getattr(vision, "intermediate_size", None) or vision.hidden_size,
        "block_count": layers, "attention.head_count": getattr(vision, "num_heads", None) or vision.num_attention_heads,
        "attention.layer_norm_epsilon": float(getattr(vision, "layer_norm_eps", None) or 1e-6),
        "image_mean": [float(each) for each in made.processor.image_processor.image_mean],
        "image_std": [float(each) for each in made.processor.image_processor.image_std],
        **_more(made, kind), **metadata,
    }  # fmt: skip
    for name, each in entries.items():
        if each is not None:
            _add(writer, name if name.startswith("clip.") else f"clip.vision.{name}", each)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.MMPROJ, max(layers, 8))
    for name, tensor in made.model.state_dict().items():
        for own, x in _encoder_tensors(name, tensor, kind, made.model.config, names):
            if own == "mm.input_projection.weight" and text_width:
                x = x[:, :text_width]
            values = x.float().contiguous().numpy()
            floats = "position_embd" in own or "class_embd" in own or values.ndim == 1
            if dtype == "Q8_0" and values.ndim == 2 and not floats and not values.shape[-1] % 32:
                quantized = gguf.quants.quantize(values, gguf.GGMLQuantizationType.Q8_0)
                writer.add_tensor(own, quantized, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
            else:
                writer.add_tensor(own, values if floats else values.astype("float16" if dtype == "Q8_0" else dtype))
    return _written(writer, path)


def _side(vision: Any, patch: int) -> int:
    side = getattr(vision, "image_size", None)
    if side is None:
        return int(getattr(vision, "num_position_embeddings", 0) ** 0.5) * patch or 560
    return side[0] if isinstance(side, list) else side


def _more(made: Made, kind: str) -> dict[str, Any]:
    """Entries of one type of projector."""
    config, image = made.model.config, made.processor.image_processor
    vision = config.vision_config
    bounds = {"image_min_pixels": 64, "image_max_pixels": int(image.size["longest_edge"])} if "qwen" in kind else {}
    return {
        "gemma3": lambda: {"clip.use_gelu": True, "projector.scale_factor": 1},
        "qwen2vl_merger": lambda: bounds,
        "qwen2.5vl_merger": lambda: {**bounds, "clip.use_silu": True, "n_wa_pattern": 2},
        "qwen3vl_merger": lambda: {**bounds, "clip.use_gelu": True, "spatial_merge_size": 2, "is_deepstack_layers": [
            at in vision.deepstack_visual_indexes for at in range(vision.depth)]},
        "idefics3": lambda: {"clip.use_gelu": True, "projector.scale_factor": 2, "preproc_image_size": 56},
        "mlp": lambda: {"projection_dim": 32},
        "pixtral": lambda: {f"clip.use_{vision.hidden_act}": True, "attention.layer_norm_epsilon": 1e-5,
                            "spatial_merge_size": getattr(config, "spatial_merge_size", None)},
        "internvl": lambda: {"clip.use_gelu": True, "projector.scale_factor": 2, "preproc_max_tiles": 4},
    }[kind]()  # fmt: skip


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string,
           list: writer.add_array}[type(value)]  # fmt: skip
    add(key, value)


FIRST = {"mm.1": "mm.0", "ffn_up": "ffn_down", "ffn_down": "ffn_up"}
PUBLISHED = {  # transformers' names -> those of published checkpoints, which the tables have
    "model.vision_tower.encoder.layers.": "vision_tower.vision_model.encoder.layers.",
    "model.vision_tower.transformer.": "vision_tower.transformer.",
    "model.multi_modal_projector.": "multi_modal_projector.",
    "model.visual.": "visual.",
}
SIGLIP = {"model.vision_tower.": "vision_tower.vision_model."}
PIXTRAL = {"model.vision_tower.": "vision_tower."}
INTERN = {"multi_modal_projector.layer_norm": "mlp1.0", "multi_modal_projector.linear_1": "mlp1.1",
          "multi_modal_projector.linear_2": "mlp1.3"}  # fmt: skip


def _encoder_tensors(name: str, x: Tensor, kind: str, config: Any, names: Any) -> list[tuple[str, Tensor]]:
    """Returns the tensors of the file that one of transformers' is in; none for those of text."""
    if any(part in name for part in ("language_model", "text_model", "lm_head")):
        return []
    base, last = name.rsplit(".", 1)
    if last not in ("weight", "bias"):  # parameters without a module of their own
        base, last = (name.removesuffix("_weight"), "weight") if name.endswith("_weight") else (name, "")
        last = "weight" if "lambda" in name or "position" in name else last
    if base.startswith("model.visual."):
        return _qwen_tensors(base.removeprefix("model."), last, x, config.vision_config, names)
    if kind == "mlp" and ("post_layernorm" in name or ".layers.2." in name):
        return []
    prefixes = {**PUBLISHED, **{"gemma3": SIGLIP, "mlp": SIGLIP, "pixtral": PIXTRAL}.get(kind, {})}
    published = next((base.replace(old, new, 1) for old, new in prefixes.items() if base.startswith(old)), base)
    if kind == "pixtral" and base.endswith(("q_proj", "k_proj")):
        x = _permuted(x, config.vision_config.num_attention_heads)
    if base.endswith("mm_soft_emb_norm"):
        x = x + 1
    if kind == "internvl":
        published = next((base.replace(f"model.{old}", new) for old, new in INTERN.items() if old in base), base)
    own = names.get_name(published)
    assert own is not None, published
    if kind == "mlp":  # as the first converter called them
        own = re.sub("mm.1$|ffn_up$|ffn_down$", lambda found: FIRST[found[0]], own)
    return [(f"{own}.{last}" if last else own, x)]


def _qwen_tensors(base: str, last: str, x: Tensor, vision: Any, names: Any) -> list[tuple[str, Tensor]]:
    qwen3 = hasattr(vision, "num_position_embeddings")
    if base == "visual.patch_embed.proj" and last == "weight":
        return [("v.patch_embd.weight", x[:, :, 0]), ("v.patch_embd.weight.1", x[:, :, 1])]
    if base.endswith(".qkv") and not qwen3:
        parts = zip("qkv", x.chunk(3), strict=True)
        return [(f"{names.get_name(base[:-3] + each)}.{last}", part) for each, part in parts]
    if base.startswith("visual.deepstack_merger_list."):
        _, _, index, module = base.split(".")
        own = {"norm": "norm", "linear_fc1": "fc1", "linear_fc2": "fc2"}[module]
        return [(f"v.deepstack.{vision.deepstack_visual_indexes[int(index)]}.{own}.{last}", x)]
    if base.startswith("visual.merger.") and qwen3:
        own = {"norm": "v.post_ln", "linear_fc1": "mm.0", "linear_fc2": "mm.2"}[base.split(".")[2]]
        return [(f"{own}.{last}", x)]
    return [(f"{names.get_name(base)}.{last}", x)]


def _written(writer: gguf.GGUFWriter, path: Path) -> Path:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
