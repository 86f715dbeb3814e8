"""Configurations of small multimodal wrappers that take sound, beside the first ones."""

from dataclasses import replace
from typing import Any

from tests.helpers.media.configs import QWEN, QWEN_FRAMES, QWEN_IDS, QWEN_PIXELS, QWEN_VISION, SECTIONS, Wrapper

OMNI_TOKENS = ("<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>")
OMNI_NAMES = {
    "image_token": QWEN[0], "vision_bos_token": QWEN[1], "vision_eos_token": QWEN[2], "video_token": QWEN[3],
    "audio_token": OMNI_TOKENS[0], "audio_bos_token": OMNI_TOKENS[1], "audio_eos_token": OMNI_TOKENS[2],
}  # fmt: skip
WHISPER = {
    "d_model": 32, "encoder_layers": 2, "encoder_attention_heads": 2, "encoder_ffn_dim": 48, "num_mel_bins": 16,
    "max_source_positions": 100,
}  # fmt: skip
SPOKEN = ("talker.model.layers.0.mlp.up_proj.weight", "token2wav.code2wav_dit_model.proj.weight", "code2wav.x.weight")


def _omni(text: dict[str, Any], vision: dict[str, Any], audio: dict[str, Any], **entries: Any) -> Wrapper:
    """A thinker of Qwen's models that listen, see and speak."""
    return Wrapper(
        {**text, **SECTIONS},
        {**QWEN_VISION, "hidden_size": 32, "intermediate_size": 48, "out_hidden_size": 64, **vision},
        QWEN_PIXELS, {}, {**QWEN_IDS, "audio_token_id": 262, "audio_start_token_id": 263, **entries},
        specials=(*QWEN, *OMNI_TOKENS), named=OMNI_NAMES, around="<|vision_start|>{}<|vision_end|>",
        around_audio="<|audio_bos|>{}<|audio_eos|>", video_processor=QWEN_FRAMES,
        options={"videos_kwargs": {"size": QWEN_FRAMES["size"]}},
        audio={**WHISPER, "output_dim": 64, **audio}, extractor={"feature_size": 16, "chunk_length": 2},
    )  # fmt: skip


QWEN25 = replace(
    _omni(
        {"model_type": "qwen2_5_omni_text"}, {"window_size": 16, "fullatt_block_indexes": [1]}, {"n_window": 10},
        video_token_index=261, audio_token_index=262, image_token_index=258, audio_end_token_id=264,
    ),
    token_entry="image_token_index", like="qwen2_5_omni",
)  # fmt: skip
QWEN3 = replace(
    _omni(
        {"model_type": "qwen3_omni_moe_text", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
        {"num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1]},
        {"n_window": 50, "n_window_infer": 200, "downsample_hidden_size": 8}, position_id_per_seconds=13,
    ),
    like="qwen3_omni_moe",
)  # fmt: skip
WHOLE: dict[str, Any] = {"part": "thinker_config", "beside": {"enable_audio_output": False}, "extra": SPOKEN}
GLM = {"hidden_size": 32, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2,
       "num_mel_bins": 16}  # fmt: skip
VIBES = {"hidden_size": 16, "num_filters": 2, "depths": [1] * 7, "vae_std": 0.0}
QWEN_SOUND = ("<|audio_pad|>", "<|audio_start|>", "<|audio_end|>")
HEARD = {
    "qwen2_5_omni_thinker": QWEN25,
    "qwen2_5_omni": replace(QWEN25, **WHOLE),
    "qwen3_omni_moe_thinker": QWEN3,
    "qwen3_omni_moe": replace(QWEN3, **WHOLE),
    "phi4_multimodal": Wrapper(
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
         "max_position_embeddings": 4096},
        {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 2,
         "image_token_id": 258},
        {"dynamic_hd": 2}, specials=("<|image|>", "<|audio|>"), length=2048,  # it counts for 448 pixels
        audio={"hidden_size": 32, "intermediate_size": 48, "num_blocks": 3, "num_attention_heads": 2,
               "ext_pw_out_channel": 32, "depthwise_separable_out_channel": 32, "nemo_conv_channels": 16,
               "input_size": 80, "audio_token_id": 259},
        named={"image_token": "<|image|>", "audio_token": "<|audio|>"}, flat=True,
        extractor={}, extractor_class="Phi4MultimodalFeatureExtractor",
    ),
    "nemotron_h_omni": Wrapper(
        {"model_type": "nemotron_h", "layers_block_type": ["linear_attention", "full_attention", "mlp"],
         "mamba_num_heads": 6, "mamba_head_dim": 16, "n_groups": 2, "ssm_state_size": 8, "chunk_size": 16},
        {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "patch_size": 4, "image_size": 32,
         "max_img_size": 64, "num_cls_tokens": 1, "num_registers": 1, "video_temporal_patch_size": 2},
        {"patch_size": 4, "min_num_patches": 16, "max_num_patches": 256}, {},
        {"vision_hidden_size": 32, "projector_hidden_size": 48, "audio_token_id": 259},
        specials=("<image>", "<so_embedding>", "<img>", "</img>", "<so_start>", "<so_end>"),
        audio={"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
               "subsampling_conv_channels": 8, "num_mel_bins": 80, "projection_hidden_size": 48,
               "projection_bias": False},
        extractor_class="ParakeetFeatureExtractor",
    ),
    "qwen3_asr": Wrapper(
        {"model_type": "qwen3"}, specials=QWEN_SOUND, token_entry="audio_token_id",
        around="<|audio_start|>{}<|audio_end|>",
        named=dict(zip(("audio_token", "audio_bos_token", "audio_eos_token"), QWEN_SOUND, strict=True)),
        audio={**WHISPER, "output_dim": 64, "downsample_hidden_size": 8, "n_window_infer": 200},
        extractor={"feature_size": 16}, extractor_class="Qwen3ASRFeatureExtractor",
    ),
    "glmasr": Wrapper(
        {"model_type": "llama"}, specials=("<|pad|>", "<|begin_of_audio|>", "<|end_of_audio|>"),
        token_entry="audio_token_id", around="<|begin_of_audio|>{}<|end_of_audio|>", audio=GLM,
        extractor={"feature_size": 16, "chunk_length": 2},
    ),
    "moss_transcribe_diarize": Wrapper(
        {"model_type": "qwen3"}, specials=QWEN_SOUND, token_entry="audio_token_id",
        around="<|audio_start|>{}<|audio_end|>",
        audio={"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
               "num_mel_bins": 16, "max_source_positions": 100},
        entries={"audio_chunk_size": 32000}, processor={"time_marker_every_seconds": 1},
        extractor={"feature_size": 16, "chunk_length": 2}, extractor_class="MossTranscribeDiarizeFeatureExtractor",
    ),
    "vibevoice_asr": Wrapper(
        {"model_type": "qwen2"}, specials=("<|box_start|>", "<|object_ref_start|>", "<|object_ref_end|>"),
        token_entry="audio_token_id", around="<|object_ref_start|>{}<|object_ref_end|> of <|AUDIO_DURATION|> s",
        entries={"acoustic_tokenizer_encoder_config": VIBES, "semantic_tokenizer_encoder_config": VIBES},
        extractor={"normalize_audio": True}, extractor_class="VibeVoiceAcousticTokenizerFeatureExtractor",
    ),
}  # fmt: skip
