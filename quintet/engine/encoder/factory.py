"""Makes an encoder's parts by the settings, and refuses settings that encoder-decoder models do not have."""

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from quintet.config import EngineConfig
from quintet.engine.encoder.alignment import FILTER_WIDTH, Aligner
from quintet.engine.encoder.cache import EncoderCache
from quintet.engine.kv_cache.page_pool import PagePool
from quintet.layers.decoder import ModelBase
from quintet.media.audio.encoder_input import SpeechInput
from quintet.media.encoder_text import TextInput
from quintet.model_loader.gguf_config import read_generation_config
from quintet.model_loader.sharded_state import FORMATS as SHARDED
from quintet.models.encoders.base import CrossEncoder
from quintet.transcription.rules import DecodingRules

logger = logging.getLogger(__name__)

if TYPE_CHECKING:
    from quintet.engine.executor.worker import Worker
    from quintet.engine.executor.worker_group import WorkerGroup

MAX_FILTER_WIDTH = 100  # far beyond Whisper's 7


def checked_family(config: EngineConfig, hf_config: Any, family: type[ModelBase]) -> type[ModelBase]:
    """Returns the family. ValueError names settings that a model with an encoder does not have."""
    if getattr(family, "encoder_class", None) is None:
        return family
    speculative = config.speculative_config
    drafts = speculative is not None and speculative.method not in ("ngram", "suffix")
    wanted = {
        "runner": config.runner == "pooling" and "it generates text, and gives no numbers",
        "pipeline_parallel_size": config.pipeline_parallel_size > 1
        and "an encoder's rows are read by the layers of all stages; share each layer out (tensor_parallel_size)",
        "enable_lora": config.enable_lora and "adapters would change what its encoder gives, which requests share",
        "speculative_config": drafts and "no draft model reads its encoder; use method 'ngram'",
        "calculate_kv_scales": config.calculate_kv_scales and "the prompt that they are computed from has no media",
        "enable_prompt_embeds": config.enable_prompt_embeds and "its prompts are tokens and media",
        "load_format": config.load_format in SHARDED and "its encoder's weights are not in shards",
    }
    for name, why in wanted.items():
        if why:
            raise ValueError(f"{name} is not there for {hf_config.model_type} models: {why}; leave it out")
    return family


def encoder_input(
    folder: Path, hf_config: Any, worker: "Worker", aligns: bool = True
) -> SpeechInput | TextInput | None:
    """Returns what the encoder takes of a request; None: there is none. `aligns`: see SpeechInput. ValueError names an
    entry of the generation config that is wrong."""
    if worker.encoder is None:
        return None
    encoder = cast(CrossEncoder, worker.encoder.model)
    if not encoder.takes_text:
        return SpeechInput(
            encoder.mel_bins, encoder.rows, (hf_config.decoder_start_token_id,), aligns and encoder.has_timestamps
        )
    start, forced = (_token(folder, hf_config, each) for each in ("decoder_start_token_id", "forced_bos_token_id"))
    start = _token(folder, hf_config, "bos_token_id") if start is None else start
    if start is None:
        raise ValueError(f"{folder}: no decoder_start_token_id in generation_config.json or config.json; add it")
    return TextInput(encoder.rows, hf_config.vocab_size, (start,) if forced is None else (start, forced))


def _token(folder: Path, hf_config: Any, name: str) -> int | None:
    """Returns a token that generation begins with, by the generation config or config.json; None: there is none."""
    found = read_generation_config(folder).get(name)
    found = getattr(hf_config, name, None) if found is None else found
    if found is None or (type(found) is int and 0 <= found < hf_config.vocab_size):
        return found
    raise ValueError(f"{folder}: {name} is {str(found)[:40]}, no token id below {hf_config.vocab_size}; correct it")


def decoding_rules(folder: Path, hf_config: Any, worker: "Worker") -> DecodingRules | None:
    """Returns the rules of a decoder's tokens, by the model's generation config; None: it has no encoder. ValueError
    names an entry that is wrong."""
    if worker.encoder is None:
        return None
    ends = hf_config.eos_token_id
    eot = ends[0] if isinstance(ends, list) else ends
    entries, vocab = dict(read_generation_config(folder)), worker.model.vocab_size
    if not cast(CrossEncoder, worker.encoder.model).has_timestamps:
        entries.pop("no_timestamps_token_id", None)
    try:
        return DecodingRules.of_generation_config(entries, getattr(hf_config, "decoder_start_token_id", -1), eot, vocab)
    except ValueError as error:
        raise ValueError(f"{folder}: {error}") from None


def make_aligner(folder: Path, hf_config: Any, ranks: "WorkerGroup") -> Aligner:
    """Makes what finds the attention of transcripts to audio. ValueError names an entry of the generation config that
    is wrong."""
    layers, heads = hf_config.decoder_layers, hf_config.decoder_attention_heads
    found = read_generation_config(folder).get("alignment_heads") or [
        [layer, head] for layer in range(layers // 2, layers) for head in range(heads)
    ]
    if not isinstance(found, list) or not all(_is_head(each, layers, heads) for each in found):
        raise ValueError(
            f"{folder}: alignment_heads is no list of pairs of a layer below {layers} and a head below {heads}; "
            "correct generation_config.json, or fetch the model again"
        )
    width = getattr(hf_config, "median_filter_width", FILTER_WIDTH)
    if type(width) is not int or not 0 < width < MAX_FILTER_WIDTH or width % 2 == 0:
        raise ValueError(f"{folder}: median_filter_width is {str(width)[:40]}, no odd number; correct config.json")
    return Aligner(ranks, [(layer, head) for layer, head in found], width)


def _is_head(pair: Any, layers: int, heads: int) -> bool:
    """Returns whether a pair names a head of the decoder."""
    limits = (layers, heads)
    return (
        isinstance(pair, list)
        and len(pair) == len(limits)
        and all(type(each) is int and 0 <= each < limit for each, limit in zip(pair, limits, strict=True))
    )


def make_encoder_cache(worker: "Worker", pool: PagePool, page_size: int) -> EncoderCache | None:
    """Makes the bookkeeping of the pages that hold an encoder's rows; None: no layer reads any."""
    layout = worker.kv_cache_layout
    if not layout.has_cross:
        return None
    pages = layout.encoder_pages(page_size)
    logger.info(
        "encoder: the %d rows of one request's media take %d pages of the KV cache, %.1f MiB",
        layout.encoder_rows, pages, pages * layout.page_bytes / 2**20,
    )  # fmt: skip
    return EncoderCache(pool, len(layout.groups), layout.encoder_rows, page_size)
