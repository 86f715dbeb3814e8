"""Configurations of small multimodal wrappers that take pictures and videos: newer ones."""

from dataclasses import replace
from typing import Any

from tests.helpers.media.configs import (
    CLIP,
    PINPOINTS,
    QWEN,
    QWEN35,
    QWEN_FRAMES,
    QWEN_PIXELS,
    ROWS,
    SIGLIP,
    SQUARE,
    Wrapper,
)
from tests.helpers.media.more_configs import LLAVA, MORE

MINICPM = ("<|image_pad|>", "<|video_pad|>", "<image>", "</image>", "<slice>", "</slice>", "<image_id>", "</image_id>")
SLICES = {"scale_resolution": 32, "max_slice_nums": 4, "patch_size": 4}


def _minicpm(**entries: Any) -> Wrapper:
    """A wrapper of MiniCPM's, whose processor numbers pictures and cuts them into slices."""
    names = ("image_token", "video_token", "image_start_token", "image_end_token", "slice_start_token",
             "slice_end_token", "image_id_start_token", "image_id_end_token")  # fmt: skip
    return Wrapper(
        {"model_type": "qwen3_5_text", **QWEN35},
        {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 2,
         "image_size": 32, "patch_size": 4, "insert_layer_id": 1},
        SLICES, {}, {"video_token_id": 259, "insert_layer_id": 1, **entries}, specials=MINICPM,
        named=dict(zip(names, MINICPM, strict=True)), video_processor=SLICES,
    )  # fmt: skip


def _long(wrapper: Wrapper) -> Wrapper:
    """The wrapper with prompts of up to 2048 tokens."""
    return replace(wrapper, text={**wrapper.text, "max_position_embeddings": 2048}, length=2048)


NEWER = {
    "glmga": replace(MORE["glm46v"], like="glm46v"),
    "lfm3_vl": Wrapper(
        {"model_type": "lfm3", "layer_types": ["conv", "sliding_attention", "full_attention"], "sliding_window": 20,
         "conv_L_cache": 7},
        {"hidden_size": 32, "intermediate_size": 48, "patch_size": 4, "num_hidden_layers": 3, "num_attention_heads": 2,
         "num_key_value_heads": 1, "layer_types": ["conv", "full_attention", "conv"]},
        QWEN_PIXELS, {}, {"video_token_id": 261, "projector_hidden_size": 48}, specials=QWEN,
        around="<|vision_start|>{}<|vision_end|>", video_processor=QWEN_FRAMES,
    ),
    "granite4_vision": Wrapper(
        {"model_type": "granite4_vision_text", "embedding_multiplier": 2.0}, {**SIGLIP, "hidden_size": 64},
        {"size": {"height": 28, "width": 28}, "crop_size": {"height": 28, "width": 28},
         "image_grid_pinpoints": PINPOINTS},
        {"patch_size": 7, "vision_feature_select_strategy": "full", "downsample_rate": "1/2"},
        {"image_grid_pinpoints": PINPOINTS, "vision_feature_select_strategy": "full", "downsample_rate": "1/2",
         "deepstack_layer_map": [[0, 0], [1, 1]], "spatial_target_layers": [2],
         "qformer_config": {"model_type": "blip_2_qformer", "hidden_size": 32, "intermediate_size": 48,
                            "num_hidden_layers": 1, "num_attention_heads": 2, "encoder_hidden_size": 32}},
        token_entry="image_token_index",
    ),
    "granite_docling": Wrapper(
        {"model_type": "granite_docling_text", "embedding_multiplier": 2.0},
        {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 2,
         "image_size": 32, "patch_size": 4, "out_hidden_size": 64, "deepstack_visual_indexes": [0, 1]},
        {"size": {"height": 32, "width": 32}, "max_patches": 4}, {"image_seq_len": 4}, specials=("<image>", *ROWS),
    ),
    "deepseek_ocr2": Wrapper(  # 144 and 256 tokens of a picture are its class's: pixels of one patch each
        {"model_type": "deepseek_ocr2_text", "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1,
         "moe_intermediate_size": 32, "mlp_layer_types": ["dense", "sparse", "sparse"],
         "max_position_embeddings": 2048},
        {"sam_config": {"hidden_size": 16, "output_channels": 8, "num_hidden_layers": 2, "num_attention_heads": 2,
                        "image_size": 64, "patch_size": 1, "window_size": 8, "global_attn_indexes": [],
                        "downsample_channels": [8, 32]},
         "encoder_config": {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
                            "num_attention_heads": 2, "num_key_value_heads": 1}},
        {"size": {"height": 64, "width": 64}, "tile_size": 48}, {"patch_size": 1}, specials=("<image>",),
        options={"max_patches": 2}, length=2048,
    ),
    "video_llava": Wrapper(
        {"model_type": "llama"}, CLIP, SQUARE, LLAVA,
        {"video_token_index": 259}, specials=("<image>", "<video>"), token_entry="image_token_index",
        video_processor=SQUARE,
    ),
    "blip-2": Wrapper(
        {"model_type": "opt", "ffn_dim": 96, "word_embed_proj_dim": 64},
        {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
         "image_size": 28, "patch_size": 7},
        {"size": {"height": 28, "width": 28}}, {"num_query_tokens": 4},
        {"num_query_tokens": 4, "qformer_config": {
            "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
            "encoder_hidden_size": 32, "vocab_size": 64}},
        token_entry="image_token_index", around="",
    ),
    "minimax_m3_vl": Wrapper(
        {"model_type": "minimax_m3_vl_text", "num_local_experts": 4, "num_experts_per_tok": 2,
         "dense_intermediate_size": 96, "shared_intermediate_size": 32, "intermediate_size": 48,
         "mlp_layer_types": ["dense", "sparse", "sparse"], "index_n_heads": 2, "index_head_dim": 16,
         "layer_types": ["full_attention", *["minimax_m3_sparse"] * 2], "index_block_size": 8, "index_topk_blocks": 2},
        {"hidden_size": 48, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
         "patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2},
        QWEN_PIXELS, {}, {"projector_hidden_size": 64, "video_token_index": 259},
        specials=("]<]image[>[", "]<]video[>[", "]<]start of image[>[", "]<]end of image[>["),
        token_entry="image_token_index", options={"do_resize": True},  # frames, too, which stay as they are otherwise
        video_processor={"patch_size": 4, "temporal_patch_size": 2, "merge_size": 2, "min_pixels": 64,
                         "max_pixels": 1024, "vision_segment_max_frames": 1},
    ),
    "minicpmv4_6": _minicpm(),
    "minicpmv4_7": replace(
        _minicpm(image_start_id=260, image_end_id=261, slice_start_id=262, slice_end_id=263, newline_id=10)
    ),
    "minicpm_ocr": _long(_minicpm()),  # it gives a picture four times the tokens
}  # fmt: skip
