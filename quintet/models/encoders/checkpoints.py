"""Encoder-decoder models by their files: those that are not run, and why; entries of generation configs."""

from collections.abc import Mapping
from typing import Any

_BIAS = "its decoder adds a learned bias by distance to attention's scores, which attention over pages does not compute"
_SPARSE = "its encoder attends to parts of the text (sparse attention), which is not computed here"
REASONS: Mapping[str, str] = {
    **dict.fromkeys(("t5", "mt5", "umt5", "switch_transformers", "udop", "pop2piano"), _BIAS),
    **dict.fromkeys(("led", "longt5", "bigbird_pegasus", "pegasus_x"), _SPARSE),
    "moonshine_streaming": "its encoder normalises and compresses frames and attends within windows, and its decoder "
    "adds learned positions to the encoder's rows, which Moonshine's code here does not",
    "prophetnet": "it predicts several tokens at once",
    "xlm-prophetnet": "it predicts several tokens at once",
}
SERVED = "BART, mBART, Marian, Pegasus, M2M-100, NLLB, PLBART, MVP, Blenderbot, Whisper and Moonshine"


def refuse_encoder_decoder(kind: Any, raw: Mapping[str, Any], asked: bool = False) -> None:
    """ValueError for a config.json of an encoder-decoder model that no file here computes. `asked`: transformers' code
    was asked for (model_impl)."""
    reason = REASONS.get(str(kind))
    if asked and raw.get("is_encoder_decoder") is True:
        reason = "transformers' code runs decoders alone; leave model_impl out"
    if reason is None and raw.get("is_encoder_decoder") is not True:
        return
    why = reason or "no file here computes it"
    raise ValueError(
        f"model type {kind!r} is an encoder-decoder model, and {why}; {SERVED} are served (docs/models.md)"
    )


def obeyed_entries(generation: Mapping[str, Any]) -> tuple[str, ...]:
    """Returns the entries of a generation config that are obeyed where a model has an encoder: bad words, if each is
    one token."""
    if not generation.keys() & {"decoder_start_token_id", "no_timestamps_token_id"}:
        return ()
    words = generation.get("bad_words_ids")
    single = isinstance(words, list) and all(isinstance(word, list) and len(word) == 1 for word in words)
    return ("suppress_tokens", "begin_suppress_tokens", "forced_bos_token_id", *("bad_words_ids",) * single)
