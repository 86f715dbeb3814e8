"""Configurations of small multimodal wrappers: more of them."""

from dataclasses import replace

from tests.helpers.media.configs import (
    CLIP,
    PINPOINTS,
    PIXTRAL,
    QWEN,
    QWEN_FRAMES,
    QWEN_PIXELS,
    QWEN_VISION,
    SECTIONS,
    SIGLIP,
    SQUARE,
    VOCAB,
    Wrapper,
)

PATCHED = {"size": {"height": 28, "width": 28}, "crop_to_patches": True, "max_patches": 4}
COHERE = ("<image>", "<|START_OF_IMG|>", "<|END_OF_IMG|>", "<|IMG_LINE_BREAK|>")
LLAVA = {"patch_size": 7, "num_additional_image_tokens": 1, "vision_feature_select_strategy": "default"}
QWEN_WINDOWS = {**QWEN_VISION, "hidden_size": 32, "intermediate_size": 48, "out_hidden_size": 64, "window_size": 16,
                "fullatt_block_indexes": [1]}  # fmt: skip
LFM = ("<image>", "<|image_start|>", "<|image_end|>", "<|img_thumbnail|>",
       *(f"<|img_row_{row}_col_{column}|>" for row in (1, 2, 3) for column in (1, 2, 3)))  # fmt: skip
GLM = ("<|image|>", "<|begin_of_image|>", "<|end_of_image|>", "<|begin_of_video|>", "<|end_of_video|>", "<|video|>")
GLM_IDS = {"image_start_token_id": 259, "image_end_token_id": 260, "video_start_token_id": 261,
           "video_end_token_id": 262, "video_token_id": 263}  # fmt: skip
GLM_ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 2, 1],
                                "partial_rotary_factor": 0.5}}  # fmt: skip
GLM_VISION = {"depth": 2, "hidden_size": 32, "num_heads": 2, "image_size": 28, "patch_size": 4, "out_hidden_size": 64,
              "intermediate_size": 48}  # fmt: skip
GLM_PIXELS = {"patch_size": 4, "size": {"shortest_edge": 128, "longest_edge": 4096}}

PALIGEMMA = Wrapper(
    {"model_type": "gemma", "hidden_act": "gelu_pytorch_tanh"}, SIGLIP,
    {"size": {"height": 28, "width": 28}, "image_seq_length": 16}, {}, {"projection_dim": 64, "hidden_size": 64},
    token_entry="image_token_index", named={"image_token": "<image>"}, like="paligemma", model_type="paligemma",
)  # fmt: skip
GEMMA4 = ("<|image|>", "<|image>", "<image|>", "<|audio|>", "<|audio>", "<audio|>", "<|video|>")
GEMMA4_NAMES = {
    "image_token": "<|image|>", "boi_token": "<|image>", "eoi_token": "<image|>", "audio_token": "<|audio|>",
    "boa_token": "<|audio>", "eoa_token": "<audio|>",
}  # fmt: skip
GEMMA4_IDS = {
    "boi_token_id": 259, "eoi_token_id": 260, "audio_token_id": 261, "boa_token_id": 262, "eoa_token_index": 263,
    "video_token_id": 264,
}  # fmt: skip
GEMMA4_TEXT = {"global_head_dim": 32, "pad_token_id": 0, "final_logit_softcapping": 30.0}
GEMMA4_KINDS = ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention", "full_attention"]
GEMMA4_VISION = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "head_dim": 16, "patch_size": 4, "pooling_kernel_size": 2, "position_embedding_size": 160,
    "standardize": True,
}  # fmt: skip
GEMMA4_PATCHES = {"patch_size": 4, "pooling_kernel_size": 2, "max_soft_tokens": 70}
GEMMA4_PIXELS = {"image_processor": {"image_processor_type": "Gemma4ImageProcessor", **GEMMA4_PATCHES}}
GEMMA4_PARTS = {"feature_extractor": {"feature_extractor_type": "Gemma4AudioFeatureExtractor", "feature_size": 16}}

MORE = {
    "paligemma": PALIGEMMA,
    "paligemma2": replace(
        PALIGEMMA, text={"model_type": "gemma2", "query_pre_attn_scalar": 16, "sliding_window": 96},
    ),
    "aya_vision": Wrapper(
        {"model_type": "cohere2"}, SIGLIP, PATCHED, {"patch_size": 7, "img_size": 28, "downsample_factor": 2},
        {"downsample_factor": 2},
        specials=("<|IMG_PATCH|>", "<image>", "<|START_OF_IMG|>", "<|END_OF_IMG|>", "<|IMG_LINE_BREAK|>"),
        token_entry="image_token_index", around="<image>",
    ),
    "cohere2_vision": Wrapper(
        {"model_type": "cohere2"}, SIGLIP, {**PATCHED, "patch_size": 2}, {},
        {"downsample_factor": 2, "alignment_intermediate_size": 64}, specials=COHERE,
        named={"image_token": "<image>", "boi_token": "<|START_OF_IMG|>", "eoi_token": "<|END_OF_IMG|>",
               "img_line_break_token": "<|IMG_LINE_BREAK|>"},
    ),
    "lighton_ocr": Wrapper(
        {"model_type": "qwen3"}, PIXTRAL, {"size": {"longest_edge": 56}, "patch_size": {"height": 14, "width": 14}},
        {"patch_size": 7, "spatial_merge_size": 2}, {"spatial_merge_size": 2},
        specials=("<|image_pad|>", "<|vision_pad|>", "<|vision_end|>"),
        named={"image_token": "<|image_pad|>", "image_break_token": "<|vision_pad|>",
               "image_end_token": "<|vision_end|>"},
    ),
    "vipllava": Wrapper(
        {"model_type": "llama"}, CLIP, SQUARE, LLAVA, {"image_seq_length": 16, "vision_feature_layers": [-2, -1]},
        token_entry="image_token_index",
    ),
    "llava_next_video": Wrapper(
        {"model_type": "llama"}, CLIP,
        {"size": {"shortest_edge": 28}, "crop_size": {"height": 28, "width": 28}, "image_grid_pinpoints": PINPOINTS},
        LLAVA, {"image_grid_pinpoints": PINPOINTS, "video_token_index": 259}, specials=("<image>", "<video>"),
        token_entry="image_token_index", video_processor=SQUARE,
    ),
    "got_ocr2": Wrapper(
        {"model_type": "qwen2"},
        {"hidden_size": 32, "output_channels": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 64,
         "patch_size": 4, "window_size": 4, "global_attn_indexes": [1], "mlp_dim": 48},
        {"size": {"height": 64, "width": 64}}, {}, specials=("<imgpad>", "<img>", "</img>"),
        options={"num_image_tokens": 16},
        token_entry="image_token_index", around="<img>{}</img>",
    ),
    "qianfan_ocr": Wrapper(
        {"model_type": "qwen3"},
        {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
         "image_size": [28, 28], "patch_size": [7, 7]},
        PATCHED, {"image_seq_length": 4}, {"image_seq_length": 4},
        specials=("<IMG_CONTEXT>", "<img>", "</img>", "<image>"), around="<image>",
        named={"context_image_token": "<IMG_CONTEXT>", "start_image_token": "<img>", "end_image_token": "</img>"},
    ),
    "idefics2": Wrapper(
        {"model_type": "mistral"},
        {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
         "image_size": 28, "patch_size": 7},
        {"size": {"shortest_edge": 20, "longest_edge": 28}, "do_image_splitting": True}, {"image_seq_len": 4},
        {"perceiver_config": {"resampler_n_latents": 4, "resampler_depth": 2, "resampler_n_heads": 2,
                              "resampler_head_dim": 16, "num_key_value_heads": 1, "hidden_size": 64}},
        specials=("<image>", "<fake_token_around_image>", "<end_of_utterance>"),
    ),
    "deepseek_vl": Wrapper(
        {"model_type": "llama"}, SIGLIP, {"size": {"height": 28, "width": 28}, "min_size": 4},
        {"num_image_tokens": 16}, specials=("<image_placeholder>",), named={"image_token": "<image_placeholder>"},
    ),
    "janus": Wrapper(
        {"model_type": "llama"},
        {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 28, "patch_size": 7,
         "mlp_ratio": 2, "projection_dim": 64, "num_image_tokens": 16},
        {"size": {"height": 28, "width": 28}, "min_size": 4}, {"num_image_tokens": 16},
        {"vq_config": {"embed_dim": 4, "num_embeddings": 16, "latent_channels": 8, "base_channels": 32,
                       "channel_multiplier": [1, 1], "num_res_blocks": 1, "num_patches": 4, "projection_dim": 64,
                       "image_token_embed_dim": 64}},
        specials=("<image_placeholder>", "<begin_of_image>", "<end_of_image>"),
        named={"image_token": "<image_placeholder>", "boi_token": "<begin_of_image>", "eoi_token": "<end_of_image>"},
    ),
    "exaone4_5": Wrapper(
        {"model_type": "exaone4", "sliding_window": 512,
         "layer_types": ["sliding_attention", "sliding_attention", "full_attention"]},
        {**QWEN_WINDOWS, "num_key_value_heads": 1}, QWEN_PIXELS, entries={"video_token_id": 261}, specials=QWEN,
        around="<|vision_start|>{}<|vision_end|>", video_processor=QWEN_FRAMES,
    ),
    "hyperclovax_vision_v2": Wrapper(
        {"model_type": "hyperclovax"}, {"model_type": "qwen2_5_vl_vision", **QWEN_WINDOWS}, QWEN_PIXELS,
        entries={"video_token_id": 261}, specials=QWEN, around="<|vision_start|>{}<|vision_end|>",
        video_processor=QWEN_FRAMES,
    ),
    "video_llama_3": Wrapper(
        {"model_type": "qwen2"},
        {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
         "patch_size": 7},
        {"size": {"shortest_edge": 196, "longest_edge": 1960}, "patch_size": 7}, {}, {"video_token_id": 259},
        specials=("<|image_pad|>", "<|video_pad|>"),
        video_processor={"size": {"shortest_edge": 196, "longest_edge": 7840}, "patch_size": 7},
    ),
    "lfm2_vl": Wrapper(
        {"model_type": "lfm2", "layer_types": ["conv", "full_attention", "conv"], "conv_L_cache": 3,
         "block_auto_adjust_ff_dim": False},
        {"model_type": "siglip2_vision_model", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
         "num_attention_heads": 2, "patch_size": 4, "num_patches": 64, "vision_use_head": False},
        {"tile_size": 32, "encoder_patch_size": 4, "min_image_tokens": 4, "max_image_tokens": 16, "max_tiles": 4},
        {}, {"projector_hidden_size": 48}, specials=LFM,
    ),
    "glm4v": Wrapper(
        {"model_type": "glm4v_text", **GLM_ROPE}, GLM_VISION, GLM_PIXELS, entries=GLM_IDS, specials=GLM,
        around="<|begin_of_image|>{}<|end_of_image|>",
    ),
    "glm4v_moe": Wrapper(
        {"model_type": "glm4v_moe_text", **GLM_ROPE, "n_routed_experts": 4, "num_experts_per_tok": 2,
         "moe_intermediate_size": 32, "first_k_dense_replace": 1, "n_shared_experts": 1},
        GLM_VISION, GLM_PIXELS, entries=GLM_IDS, specials=GLM, around="<|begin_of_image|>{}<|end_of_image|>",
        like="glm4v",
    ),
    "glm46v": Wrapper(
        {"model_type": "glm4v_text", **GLM_ROPE}, {"model_type": "glm4v_vision", **GLM_VISION}, GLM_PIXELS,
        entries=GLM_IDS, specials=GLM, around="<|begin_of_image|>{}<|end_of_image|>",
    ),
    "glm_ocr": Wrapper(
        {"model_type": "glm_ocr_text", **GLM_ROPE}, GLM_VISION, GLM_PIXELS, entries=GLM_IDS, specials=GLM,
        around="<|begin_of_image|>{}<|end_of_image|>", like="glm46v",
    ),
    "gemma4": Wrapper(
        {"model_type": "gemma4_text", **GEMMA4_TEXT, "num_hidden_layers": 5, "num_kv_shared_layers": 2,
         "layer_types": GEMMA4_KINDS, "sliding_window": 20, "hidden_size_per_layer_input": 8,
         "vocab_size_per_layer_input": VOCAB, "use_double_wide_mlp": True},
        GEMMA4_VISION, processor={**GEMMA4_PARTS, **GEMMA4_PIXELS}, entries=GEMMA4_IDS, specials=GEMMA4,
        named=GEMMA4_NAMES, video_processor=GEMMA4_PATCHES,
    ),
    "gemma4_large": Wrapper(
        {"model_type": "gemma4_text", **GEMMA4_TEXT, "layer_types": GEMMA4_KINDS[:2] + ["full_attention"],
         "sliding_window": 80, "hidden_size_per_layer_input": 0, "attention_k_eq_v": True, "enable_moe_block": True,
         "num_global_key_value_heads": 1, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32,
         "use_bidirectional_attention": "vision"},
        GEMMA4_VISION, processor={**GEMMA4_PARTS, **GEMMA4_PIXELS}, entries=GEMMA4_IDS, specials=GEMMA4,
        named=GEMMA4_NAMES, like="gemma4", model_type="gemma4", video_processor=GEMMA4_PATCHES,
    ),
    "gemma4_sound": Wrapper(
        {"model_type": "gemma4_text", **GEMMA4_TEXT, "layer_types": GEMMA4_KINDS[:2] + ["full_attention"],
         "sliding_window": 20, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCAB},
        processor={**GEMMA4_PARTS, **GEMMA4_PIXELS}, entries=GEMMA4_IDS, specials=GEMMA4, named=GEMMA4_NAMES,
        like="gemma4", model_type="gemma4",
        audio={"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "output_proj_dims": 24,
               "subsampling_conv_channels": [16, 4]},
    ),
    "gemma4_unified": Wrapper(
        {"model_type": "gemma4_unified_text", **GEMMA4_TEXT, "layer_types": GEMMA4_KINDS[:2] + ["full_attention"],
         "sliding_window": 80},
        {"patch_size": 4, "pooling_kernel_size": 2, "mm_embed_dim": 32, "mm_posemb_size": 80, "output_proj_dims": 32},
        processor={**GEMMA4_PARTS, "image_processor": {"image_processor_type": "Gemma4UnifiedImageProcessor",
                                                       **GEMMA4_PATCHES}},
        entries=GEMMA4_IDS, specials=GEMMA4, named=GEMMA4_NAMES, video_processor=GEMMA4_PATCHES,
    ),
    "gemma4_unified_sound": Wrapper(
        {"model_type": "gemma4_unified_text", **GEMMA4_TEXT, "layer_types": GEMMA4_KINDS[:2] + ["full_attention"],
         "sliding_window": 20},
        processor={**GEMMA4_PARTS, "image_processor": {"image_processor_type": "Gemma4UnifiedImageProcessor",
                                                       **GEMMA4_PATCHES},
                   "feature_extractor": {"feature_extractor_type": "Gemma4UnifiedAudioFeatureExtractor",
                                         "audio_samples_per_token": 64, "feature_size": 64}},
        entries=GEMMA4_IDS, specials=GEMMA4, named=GEMMA4_NAMES, like="gemma4_unified", model_type="gemma4_unified",
        audio={"audio_embed_dim": 64},
    ),
    "paddleocr_vl": Wrapper(
        {"model_type": "paddleocr_vl_text", "use_bias": True, **SECTIONS},
        {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
         "image_size": 28, "patch_size": 4},
        {"size": {"shortest_edge": 256, "longest_edge": 2048}, "patch_size": 4},
        entries={"vision_start_token_id": 259, "vision_end_token_id": 260, "video_token_id": 261},
        specials=("<|IMAGE_PLACEHOLDER|>", "<|IMAGE_START|>", "<|IMAGE_END|>", "<|video_pad|>"),
        around="<|IMAGE_START|>{}<|IMAGE_END|>", named={"image_token": "<|IMAGE_PLACEHOLDER|>"},
    ),
    "deepseek_vl_hybrid": Wrapper(
        {"model_type": "llama"}, SIGLIP,
        {"size": {"height": 28, "width": 28}, "min_size": 4, "high_res_size": {"height": 64, "width": 64}},
        {"num_image_tokens": 16},
        {"high_res_vision_config": {
            "model_type": "sam_vision_model", "hidden_size": 32, "output_channels": 16, "num_hidden_layers": 2,
            "num_attention_heads": 2, "image_size": 64, "patch_size": 4, "window_size": 4, "global_attn_indexes": [1],
            "mlp_dim": 48, "num_pos_feats": 8}},
        specials=("<image_placeholder>",), named={"image_token": "<image_placeholder>"},
    ),
    "kimi_k25": Wrapper(
        {"model_type": "deepseek_v3", "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 16,
         "qk_rope_head_dim": 8, "head_dim": 8, "v_head_dim": 16, "n_routed_experts": 4, "num_experts_per_tok": 2,
         "n_group": 1, "topk_group": 1, "moe_intermediate_size": 32, "first_k_dense_replace": 1,
         "num_key_value_heads": 4},
        {"patch_size": 4, "pos_emb_height": 8, "pos_emb_width": 8, "num_attention_heads": 2, "num_hidden_layers": 2,
         "hidden_size": 32, "intermediate_size": 48},
        {"patch_size": 4, "size": {"max_height": 64, "max_width": 64}, "max_patches": 256}, {},
        {"projection_hidden_size": 32}, specials=("<|media_pad|>", "<|media_begin|>", "<|media_end|>"),
        around="<|media_begin|>{}<|media_end|>",
    ),
    "llama4": Wrapper(
        {"model_type": "llama4_text", "num_local_experts": 2, "intermediate_size_mlp": 64, "attention_chunk_size": 512},
        {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 128,
         "vision_output_dim": 32, "image_size": 28, "patch_size": 7, "projector_input_dim": 32,
         "projector_output_dim": 32},
        {"size": {"height": 28, "width": 28}, "max_patches": 4}, {"patch_size": 7},
        specials=("<|patch|>", "<|image|>", "<|image_start|>", "<|image_end|>", "<|tile_x_separator|>",
                  "<|tile_y_separator|>"),
        token_entry="image_token_index", around="<|image|>",
    ),
}  # fmt: skip
