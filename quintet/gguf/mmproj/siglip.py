"""Encoders of square pictures (SigLIP, CLIP, InternViT) and Pixtral's."""

from collections.abc import Mapping

from quintet.gguf.cursor import Array
from quintet.gguf.mmproj.projector import Entries, Projector, activation, is_swapped, side_tokens, vision_entries
from quintet.gguf.model import GGUFModel
from quintet.gguf.names import ArchitectureNames, Computed

_LAYER: Mapping[str, str] = {
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_out": "self_attn.out_proj", "ln1": "layer_norm1", "ln2": "layer_norm2", "ffn_up": "mlp.fc1",
    "ffn_down": "mlp.fc2",
}  # fmt: skip
_SWAPPED: Mapping[str, str] = {"ffn_up": "ffn_down", "ffn_down": "ffn_up"}
_LLAMAS = ("llama", "mistral", "mixtral", "qwen2", "qwen3", "phi3", "gemma", "gemma2")  # text models of LLaVA


def unswapped(mmproj: GGUFModel, layer: Mapping[str, str]) -> Mapping[str, str]:
    """Returns a layer's names for the file, which may have its two products under one another's."""
    if not is_swapped(mmproj):
        return layer
    return {_SWAPPED.get(name, name): module for name, module in layer.items()}


def _names(mmproj: GGUFModel, tower: str, ends: Mapping[str, str], **computed: Computed) -> ArchitectureNames:
    """Names of SigLIP's and CLIP's layers. `ends`: of the projector."""
    own = {
        "patch_embd": f"{tower}.embeddings.patch_embedding",
        "position_embd": f"{tower}.embeddings.position_embedding",
        "pre_ln": f"{tower}.pre_layrnorm",
        "post_ln": f"{tower}.post_layernorm",
    }
    return ArchitectureNames(
        unswapped(mmproj, _LAYER), {**own, **ends}, f"{tower}.encoder.layers",
        computed={f"/{name.replace('__', '.')}": each for name, each in computed.items()},
    )  # fmt: skip


# ---------------------------------------------------------------------------------------------------------- Gemma 3
_TOWER, _JOINT = "model.vision_tower", "model.multi_modal_projector"


def _gemma3_names(mmproj: GGUFModel) -> ArchitectureNames:
    return _names(mmproj, _TOWER, {}, **{
        f"{_JOINT}.mm_input_projection_weight": Computed("same", ("mm.input_projection.weight",)),
        f"{_JOINT}.mm_soft_emb_norm.weight": Computed("less_one", ("mm.soft_emb_norm.weight",)),
    })  # fmt: skip


def _gemma3_side(mmproj: GGUFModel) -> int:
    return side_tokens(mmproj, mmproj.required_number("projector.scale_factor", 4))


def _gemma3(mmproj: GGUFModel) -> Entries:
    vision = {"model_type": "siglip_vision_model", "vision_use_head": False, **vision_entries(mmproj)}
    vision["hidden_act"] = activation(mmproj, "gelu_pytorch_tanh", "gelu_pytorch_tanh")
    return {"vision_config": vision, "mm_tokens_per_image": _gemma3_side(mmproj) ** 2}


def _square(mmproj: GGUFModel) -> Entries:
    side = mmproj.required_number("image_size")
    return {"size": {"height": side, "width": side}}


# ----------------------------------------------------------------------------------------------- Idefics 3, SmolVLM
def _idefics3_names(mmproj: GGUFModel) -> ArchitectureNames:
    return _names(mmproj, "model.vision_model", {"mm.model.fc": "model.connector.modality_projection.proj"})


def _scale(mmproj: GGUFModel) -> int:
    return mmproj.required_number("projector.scale_factor", 2)


def _idefics3(mmproj: GGUFModel) -> Entries:
    vision = {"model_type": "idefics3_vision", **vision_entries(mmproj)}
    vision["hidden_act"] = activation(mmproj, "gelu_pytorch_tanh", "gelu_pytorch_tanh")
    return {"vision_config": vision, "scale_factor": _scale(mmproj)}


def _idefics3_sizes(mmproj: GGUFModel) -> Entries:
    side = mmproj.required_number("image_size")
    longest = mmproj.required_number("preproc_image_size", 4 * side)
    return {"size": {"longest_edge": longest}, "max_image_size": {"longest_edge": side}, "do_image_splitting": True}


# -------------------------------------------------------------------------------------------------------- LLaVA 1.5
def _llava_names(mmproj: GGUFModel) -> ArchitectureNames:
    ends = {"mm.0": f"{_JOINT}.linear_1", "mm.2": f"{_JOINT}.linear_2"}
    return _names(mmproj, _TOWER, ends, **{f"{_TOWER}.embeddings.class_embedding": Computed("same", ("class_embd",))})


def _llava(mmproj: GGUFModel) -> Entries:
    """The files have no layers behind the one that is read: the last is it."""
    if mmproj.get("mm_patch_merge_type", "flat") != "flat" or mmproj.has("model.image_newline"):
        raise ValueError(f"{mmproj.path} is of LLaVA 1.6, which cuts pictures into tiles, and of 1.5 alone is read")
    vision = {"model_type": "clip_vision_model", **vision_entries(mmproj)}
    vision["hidden_act"] = activation(mmproj, "gelu")
    chosen = mmproj.metadata.get(f"{mmproj.prefix}.feature_layer")
    layers = list(chosen) if isinstance(chosen, Array) else [vision["num_hidden_layers"]]
    if layers != [vision["num_hidden_layers"]]:
        raise ValueError(f"{mmproj.path}: rows of layers {layers} are read, and here those of the last layer alone")
    return {"vision_config": vision, "vision_feature_layer": -1, "image_seq_length": side_tokens(mmproj, 1) ** 2}


def _llava_settings(mmproj: GGUFModel) -> Entries:
    strategy = {"vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
    return {"patch_size": mmproj.required_number("patch_size"), **strategy}


def _cropped(mmproj: GGUFModel) -> Entries:
    side = mmproj.required_number("image_size")
    return {"size": {"shortest_edge": side}, "crop_size": {"height": side, "width": side}}


def _llava_filled(mmproj: GGUFModel) -> Mapping[str, float]:
    """The norm of the class token, which LLaVA does not read."""
    return {} if mmproj.has("post_ln.weight") else {
        f"{_TOWER}.post_layernorm.weight": 1.0, f"{_TOWER}.post_layernorm.bias": 0.0
    }  # fmt: skip


# ---------------------------------------------------------------------------------------------------------- Pixtral
_PIXTRAL = ArchitectureNames(
    {
        "attn_q": "attention.q_proj", "attn_k": "attention.k_proj", "attn_v": "attention.v_proj",
        "attn_out": "attention.o_proj", "ln1": "attention_norm", "ln2": "ffn_norm",
        "ffn_gate": "feed_forward.gate_proj", "ffn_up": "feed_forward.up_proj", "ffn_down": "feed_forward.down_proj",
    },
    {
        "patch_embd": f"{_TOWER}.patch_conv", "pre_ln": f"{_TOWER}.ln_pre", "mm.1": f"{_JOINT}.linear_1",
        "mm.2": f"{_JOINT}.linear_2", "mm.input_norm": f"{_JOINT}.norm",
        "mm.patch_merger": f"{_JOINT}.patch_merger.merging_layer",
    },
    f"{_TOWER}.transformer.layers",
    permutes_qk=True,
)  # fmt: skip


def _pixtral_merge(mmproj: GGUFModel) -> int:
    return mmproj.required_number("spatial_merge_size", 1) if mmproj.has("mm.patch_merger.weight") else 1


def _pixtral_kind(mmproj: GGUFModel) -> str:
    return "mistral3" if mmproj.has("mm.patch_merger.weight") else "llava"


def _pixtral(mmproj: GGUFModel) -> Entries:
    vision = {"model_type": "pixtral", **vision_entries(mmproj), "hidden_act": activation(mmproj, "gelu")}
    vision |= {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}  # as llama.cpp has it, for all files
    own = {"vision_config": vision, "vision_feature_layer": -1, "multimodal_projector_bias": mmproj.has("mm.1.bias")}
    if _pixtral_kind(mmproj) == "mistral3":
        return own | {"spatial_merge_size": _pixtral_merge(mmproj)}
    return own | {"vision_feature_select_strategy": "full", "image_seq_length": 1}


def _pixtral_settings(mmproj: GGUFModel) -> Entries:
    return {"patch_size": mmproj.required_number("patch_size"), "spatial_merge_size": _pixtral_merge(mmproj)}


def _pixtral_sizes(mmproj: GGUFModel) -> Entries:
    patch = mmproj.required_number("patch_size") * _pixtral_merge(mmproj)
    longest = mmproj.required_number("image_size")
    return {"size": {"longest_edge": longest}, "patch_size": {"height": patch, "width": patch}}


# --------------------------------------------------------------------------------------------------------- InternVL
def _intern_names(mmproj: GGUFModel) -> ArchitectureNames:
    layer = {
        "attn_q": "attention.q_proj", "attn_k": "attention.k_proj", "attn_v": "attention.v_proj",
        "attn_q_norm": "attention.q_norm", "attn_k_norm": "attention.k_norm",
        "attn_out": "attention.projection_layer", "ln1": "layernorm_before", "ln2": "layernorm_after",
        "ffn_up": "mlp.fc1", "ffn_down": "mlp.fc2",
    }  # fmt: skip
    inputs = f"{_TOWER}.embeddings"
    ends = {
        "patch_embd": f"{inputs}.patch_embeddings.projection", "mm.model.mlp.0": f"{_JOINT}.layer_norm",
        "mm.model.mlp.1": f"{_JOINT}.linear_1", "mm.model.mlp.3": f"{_JOINT}.linear_2",
    }  # fmt: skip
    computed = {
        f"/{inputs}.cls_token": Computed("one_batch", ("class_embd",)),
        f"/{inputs}.position_embeddings": Computed("one_batch", ("position_embd.weight",)),
        "lambda_1": Computed("same", ("ls1.weight",)),
        "lambda_2": Computed("same", ("ls2.weight",)),
    }
    return ArchitectureNames(unswapped(mmproj, layer), ends, f"{_TOWER}.encoder.layer", computed=computed)


def _intern(mmproj: GGUFModel) -> Entries:
    vision = {"model_type": "internvl_vision", **vision_entries(mmproj), "hidden_act": activation(mmproj, "gelu")}
    vision |= {name: [vision[name]] * 2 for name in ("image_size", "patch_size")}
    vision |= {"use_qk_norm": mmproj.has("blk.0.attn_q_norm.weight"), "attention_bias": mmproj.has("blk.0.attn_q.bias")}
    vision["norm_type"] = "layer_norm" if mmproj.has("blk.0.ln1.bias") else "rms_norm"
    return {"vision_config": vision, "downsample_ratio": 1 / _scale(mmproj), **_intern_settings(mmproj)}


def _intern_settings(mmproj: GGUFModel) -> Entries:
    return {"image_seq_length": side_tokens(mmproj, _scale(mmproj)) ** 2}


def _tiles(mmproj: GGUFModel) -> Entries:
    least, most = (mmproj.required_number(f"preproc_{name}_tiles", n) for name, n in (("min", 1), ("max", 12)))
    return {**_square(mmproj), "crop_to_patches": True, "min_patches": least, "max_patches": most}


SIGLIP: Mapping[str, Projector] = {
    "gemma3": Projector(
        {"gemma3_text": "gemma3"}, _gemma3_names, _gemma3, ("mm.input_projection.weight", 1),
        {
            "image_token_id": ("<image_soft_token>", "<unused99>"), "boi_token_index": ("<start_of_image>",),
            "eoi_token_index": ("<end_of_image>",),
        },
        "Gemma3Processor", "Gemma3ImageProcessorPil",
        lambda mmproj: {"image_seq_length": _gemma3_side(mmproj) ** 2}, _square,
        {"image_token": "image_token_id", "boi_token": "boi_token_index", "eoi_token": "eoi_token_index"},
    ),
    "idefics3": Projector(
        {"llama": "idefics3"}, _idefics3_names, _idefics3, ("mm.model.fc.weight", 0),
        {"image_token_id": ("<image>",)}, "Idefics3Processor", "Idefics3ImageProcessorPil",
        lambda mmproj: {"image_seq_len": side_tokens(mmproj, _scale(mmproj)) ** 2}, _idefics3_sizes,
    ),
    "mlp": Projector(
        dict.fromkeys(_LLAMAS, "llava"), _llava_names, _llava, ("mm.2.weight", 0), {"image_token_id": ("<image>",)},
        "LlavaProcessor", "CLIPImageProcessorPil", _llava_settings, _cropped, filled=_llava_filled,
    ),
    "pixtral": Projector(
        dict.fromkeys(("llama", "mistral", "ministral3"), ""), _PIXTRAL, _pixtral, ("mm.2.weight", 0),
        {"image_token_id": ("[IMG]",)}, "PixtralProcessor", "PixtralImageProcessorPil", _pixtral_settings,
        _pixtral_sizes, kind=_pixtral_kind,
    ),
    "internvl": Projector(
        dict.fromkeys(("qwen2", "qwen3", "qwen3_moe", "llama"), "internvl"), _intern_names, _intern,
        ("mm.model.mlp.3.weight", 0), {
            "image_token_id": ("<IMG_CONTEXT>",), "start_image_token_id": ("<img>",), "end_image_token_id": ("</img>",)
        },
        "InternVLProcessor", "GotOcr2ImageProcessorPil", _intern_settings, _tiles,
        {"context_image_token": "image_token_id", "start_image_token": "start_image_token_id",
         "end_image_token": "end_image_token_id", "video_token": "<video>"},
    ),
}  # fmt: skip
