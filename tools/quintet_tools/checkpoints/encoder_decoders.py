"""Small models of families with an encoder: family -> entries of its config.json."""

from typing import Any

WHISPER: dict[str, Any] = {
    "model_type": "whisper", "vocab_size": 170, "d_model": 32, "num_mel_bins": 20, "encoder_layers": 2,
    "decoder_layers": 3, "encoder_attention_heads": 4, "decoder_attention_heads": 2, "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 64, "max_source_positions": 100, "max_target_positions": 64, "pad_token_id": 60,
    "bos_token_id": 60, "eos_token_id": 60, "decoder_start_token_id": 61,
}  # fmt: skip
ENCODER_DECODERS: dict[str, dict[str, Any]] = {"whisper": WHISPER}
