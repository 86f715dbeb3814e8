"""Configurations of small multimodal wrappers, and settings of their processors."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

VOCAB = 320
TEXT = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 1024, "bos_token_id": 256, "eos_token_id": 257,
    "pad_token_id": 257, "tie_word_embeddings": False,
}  # fmt: skip
CLIP = {
    "model_type": "clip_vision_model", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
    "num_attention_heads": 2, "image_size": 28, "patch_size": 7, "projection_dim": 32,
}  # fmt: skip
SIGLIP = {
    "model_type": "siglip_vision_model", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 2, "image_size": 28, "patch_size": 7, "vision_use_head": False,
}  # fmt: skip
SQUARE = {"size": {"height": 28, "width": 28}, "crop_size": {"height": 28, "width": 28}}
SECTIONS = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}}


@dataclass(frozen=True)
class Wrapper:
    """A small model of one type."""

    text: dict[str, Any]  # its text model, beside TEXT
    vision: dict[str, Any] = field(default_factory=dict)
    image_processor: dict[str, Any] = field(default_factory=dict)
    processor: dict[str, Any] = field(default_factory=dict)
    entries: dict[str, Any] = field(default_factory=dict)  # of the wrapper's own config
    specials: tuple[str, ...] = ("<image>",)  # tokens, the first of which stands for a picture
    named: Mapping[str, str] = field(default_factory=dict)  # attributes of the tokenizer
    token_entry: str = "image_token_id"
    around: str = "{}"  # a placeholder in a text
    like: str = ""  # the model_type whose processor it has, if not its own
    model_type: str = ""  # if not the name of it here
    video_processor: dict[str, Any] = field(default_factory=dict)  # empty: it takes no videos
    audio: dict[str, Any] = field(default_factory=dict)  # its encoder of sound
    extractor: dict[str, Any] = field(default_factory=dict)  # of sound
    extractor_class: str = "WhisperFeatureExtractor"
    around_audio: str = ""  # a recording's placeholder in a text, if not `around`
    length: int = 512  # max_model_len for its pictures
    flat: bool = False  # its text model has no config of its own
    part: str = ""  # entry of the config of a larger model that the wrapper is a part of
    beside: dict[str, Any] = field(default_factory=dict)  # other entries of that
    extra: tuple[str, ...] = ()  # tensors of the files that are no part of the wrapper
    options: dict[str, Any] = field(default_factory=dict)  # of each call of the processor


QWEN = ("<|image_pad|>", "<|vision_start|>", "<|vision_end|>", "<|video_pad|>")
QWEN_IDS = {"vision_start_token_id": 259, "vision_end_token_id": 260, "video_token_id": 261}
QWEN_PIXELS = {"patch_size": 4, "temporal_patch_size": 2, "merge_size": 2,
               "size": {"shortest_edge": 64, "longest_edge": 2048}}  # fmt: skip
QWEN_FRAMES = {"patch_size": 4, "temporal_patch_size": 2, "merge_size": 2,
               "size": {"shortest_edge": 64, "longest_edge": 1024}}  # fmt: skip
QWEN_VISION = {"depth": 2, "num_heads": 2, "patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2}
QWEN35 = {
    "full_attention_interval": 2, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1],
                        "partial_rotary_factor": 0.5},
}  # fmt: skip
PINPOINTS = [[28, 56], [56, 28], [56, 56]]
TILES = {"size": {"longest_edge": 56}, "max_image_size": {"longest_edge": 28}, "do_image_splitting": True}
ROWS = ("<fake_token_around_image>", "<global-img>", "<end_of_utterance>", "<row_1_col_1>", "<row_1_col_2>",
        "<row_2_col_1>", "<row_2_col_2>")  # fmt: skip
INTERN = ("<IMG_CONTEXT>", "<img>", "</img>", "<video>")
IDEFICS = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 28,
    "patch_size": 7,
}  # fmt: skip
PIXTRAL = {
    "model_type": "pixtral", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 2, "image_size": 56, "patch_size": 7,
}  # fmt: skip
WRAPPERS = {
    "llava": Wrapper(
        {"model_type": "llama"}, CLIP, SQUARE,
        {"patch_size": 7, "num_additional_image_tokens": 1, "vision_feature_select_strategy": "default"},
        {"image_seq_length": 16}, token_entry="image_token_index",
    ),
    "llava_next": Wrapper(
        {"model_type": "mistral"}, CLIP,
        {"size": {"shortest_edge": 28}, "crop_size": {"height": 28, "width": 28}, "image_grid_pinpoints": PINPOINTS},
        {"patch_size": 7, "num_additional_image_tokens": 1, "vision_feature_select_strategy": "default"},
        {"image_seq_length": 16, "image_grid_pinpoints": PINPOINTS}, token_entry="image_token_index",
    ),
    "llava_onevision": Wrapper(
        {"model_type": "qwen2"}, SIGLIP, {"size": {"height": 28, "width": 28}, "image_grid_pinpoints": PINPOINTS},
        {"num_image_tokens": 16, "vision_feature_select_strategy": "full", "vision_aspect_ratio": "anyres_max_9"},
        {"image_grid_pinpoints": PINPOINTS, "video_token_index": 259}, specials=("<image>", "<video>"),
        token_entry="image_token_index", video_processor={"size": {"height": 28, "width": 28}},
    ),
    "qwen2_vl": Wrapper(
        {"model_type": "qwen2_vl_text", **SECTIONS},
        {**QWEN_VISION, "embed_dim": 32, "hidden_size": 64, "mlp_ratio": 2},
        QWEN_PIXELS, entries=QWEN_IDS, specials=QWEN, around="<|vision_start|>{}<|vision_end|>",
        video_processor=QWEN_FRAMES,
    ),
    "qwen2_5_vl": Wrapper(
        {"model_type": "qwen2_5_vl_text", **SECTIONS},
        {**QWEN_VISION, "hidden_size": 32, "intermediate_size": 48, "out_hidden_size": 64, "window_size": 16,
         "fullatt_block_indexes": [1]},
        QWEN_PIXELS, entries=QWEN_IDS, specials=QWEN, around="<|vision_start|>{}<|vision_end|>",
        video_processor=QWEN_FRAMES,
    ),
    "qwen3_vl": Wrapper(
        {"model_type": "qwen3_vl_text", **SECTIONS},
        {**QWEN_VISION, "hidden_size": 32, "intermediate_size": 48, "out_hidden_size": 64,
         "num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1]},
        QWEN_PIXELS, entries=QWEN_IDS, specials=QWEN, around="<|vision_start|>{}<|vision_end|>",
        video_processor=QWEN_FRAMES,
    ),
    "qwen3_vl_moe": Wrapper(
        {"model_type": "qwen3_vl_moe_text", **SECTIONS, "num_experts": 4, "num_experts_per_tok": 2,
         "moe_intermediate_size": 32},
        {**QWEN_VISION, "hidden_size": 32, "intermediate_size": 48, "out_hidden_size": 64,
         "num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1]},
        QWEN_PIXELS, entries=QWEN_IDS, specials=QWEN, around="<|vision_start|>{}<|vision_end|>",
        video_processor=QWEN_FRAMES, like="qwen3_vl",
    ),
    "qwen3_5": Wrapper(
        {"model_type": "qwen3_5_text", **QWEN35},
        {**QWEN_VISION, "hidden_size": 32, "intermediate_size": 48, "out_hidden_size": 64,
         "num_position_embeddings": 64, "deepstack_visual_indexes": []},
        QWEN_PIXELS, entries=QWEN_IDS, specials=QWEN, around="<|vision_start|>{}<|vision_end|>",
        video_processor=QWEN_FRAMES, like="qwen3_vl",
    ),
    "qwen3_5_moe": Wrapper(
        {"model_type": "qwen3_5_moe_text", **QWEN35, "num_experts": 4, "num_experts_per_tok": 2,
         "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32},
        {**QWEN_VISION, "hidden_size": 32, "intermediate_size": 48, "out_hidden_size": 64,
         "num_position_embeddings": 64, "deepstack_visual_indexes": []},
        QWEN_PIXELS, entries=QWEN_IDS, specials=QWEN, around="<|vision_start|>{}<|vision_end|>",
        video_processor=QWEN_FRAMES, like="qwen3_vl",
    ),
    "idefics3": Wrapper(
        {"model_type": "llama"}, IDEFICS, TILES, {"image_seq_len": 4}, {"scale_factor": 2}, specials=("<image>", *ROWS),
    ),
    "smolvlm": Wrapper(
        {"model_type": "llama"}, IDEFICS, TILES, {"image_seq_len": 4}, {"scale_factor": 2},
        specials=("<image>", *ROWS, "<video>"),
        video_processor={"size": {"longest_edge": 56}, "max_image_size": {"longest_edge": 28}},
    ),
    "gemma3": Wrapper(
        {"model_type": "gemma3_text", "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
         "sliding_window": 20, "query_pre_attn_scalar": 16},
        SIGLIP, {"size": {"height": 28, "width": 28}}, {"image_seq_length": 16}, {"mm_tokens_per_image": 16},
        specials=("<image_soft_token>", "<start_of_image>", "<end_of_image>"), around="<start_of_image>",
        named={"image_token": "<image_soft_token>", "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>"},
    ),
    "mistral3": Wrapper(
        {"model_type": "mistral"}, PIXTRAL, {"size": {"longest_edge": 56}, "patch_size": {"height": 14, "width": 14}},
        {"patch_size": 7, "spatial_merge_size": 2}, {"spatial_merge_size": 2, "vision_feature_layer": -1},
        specials=("[IMG]", "[IMG_BREAK]", "[IMG_END]"), token_entry="image_token_index",
    ),
    "pixtral": Wrapper(
        {"model_type": "mistral"}, PIXTRAL, {"size": {"longest_edge": 56}, "patch_size": {"height": 7, "width": 7}},
        {"patch_size": 7, "spatial_merge_size": 1},
        {"vision_feature_layer": -1, "vision_feature_select_strategy": "full"},
        specials=("[IMG]", "[IMG_BREAK]", "[IMG_END]"), token_entry="image_token_index", like="mistral3",
        model_type="llava",
    ),
    "internvl": Wrapper(
        {"model_type": "qwen2"},
        {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
         "image_size": [28, 28], "patch_size": [7, 7]},
        {"size": {"height": 28, "width": 28}, "crop_to_patches": True, "max_patches": 4}, {"image_seq_length": 4},
        {"image_seq_length": 4}, specials=INTERN,
        named={"context_image_token": "<IMG_CONTEXT>", "start_image_token": "<img>", "end_image_token": "</img>",
               "video_token": "<video>"},
        video_processor={"size": {"height": 28, "width": 28}},
    ),
    "qwen2_audio": Wrapper(
        {"model_type": "qwen2"}, specials=("<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>"),
        token_entry="audio_token_index", around="<|audio_bos|>{}<|audio_eos|>",
        audio={"d_model": 32, "encoder_layers": 2, "encoder_attention_heads": 2, "encoder_ffn_dim": 48,
               "num_mel_bins": 16, "max_source_positions": 50},
        extractor={"feature_size": 16, "chunk_length": 1},
    ),
    "voxtral": Wrapper(
        {"model_type": "llama"}, specials=("[AUDIO]", "[BEGIN_AUDIO]"), token_entry="audio_token_id",
        around="[BEGIN_AUDIO]{}",
        audio={"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
               "num_mel_bins": 16, "max_source_positions": 50},
        extractor={"feature_size": 16, "chunk_length": 1},
    ),
}  # fmt: skip
