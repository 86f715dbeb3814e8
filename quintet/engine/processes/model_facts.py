"""Facts of a model that an engine sends to API processes."""

import time

from quintet.engine.executor.engine_plan import EnginePlan
from quintet.engine.executor.routed_experts import bytes_of_token
from quintet.engine.media.factory import media_limits
from quintet.engine.processes.model_info import ModelInfo
from quintet.engine.row_store.factory import max_embeds_rows
from quintet.hub.resolve import resolve_tokenizer
from quintet.media.audio.encoder_input import SpeechInput
from quintet.media.encoder_text import TextInput


def served(prepared: EnginePlan) -> ModelInfo:
    """Returns what API processes must know of the model."""
    config, generation, encoder = prepared.config, dict(prepared.generation), prepared.encoder
    return ModelInfo(
        model=config.model,
        tokenizer=None if config.skip_tokenizer_init else str(resolve_tokenizer(config, prepared.folder)),
        vocab_size=prepared.vocab_size,
        max_model_len=prepared.memory_plan.max_model_len,
        max_logprobs=config.max_logprobs,
        logprobs_mode=config.logprobs_mode,
        eos_ids=sorted(generation.pop("eos_token_id", ())),
        seed=config.seed,
        num_pages=prepared.memory_plan.num_pages - 1,  # page 0 takes the writes of padding
        page_size=config.page_size,
        processors=list(config.logits_processors),
        defaults=generation,
        created=int(time.time()),
        embeds_width=prepared.embeds_width,
        embeds_rows=max_embeds_rows(config, prepared.sizes.row_store),
        by_priority=config.scheduling_policy == "priority",
        stream_interval=config.stream_interval,
        cache_dtype=config.kv_cache_dtype,
        prefix_caching=config.enable_prefix_caching,
        kv_tokens=prepared.memory_plan.kv_cache_tokens,
        family=str(prepared.hf_config.model_type),
        structured_outputs=config.structured_outputs_config,
        reasoning=config.reasoning_config,
        pooling=prepared.pooling_bounds,
        labels=_labels(prepared),
        encoder=encoder if isinstance(encoder, SpeechInput) else None,
        source=encoder if isinstance(encoder, TextInput) else None,
        transfers=config.kv_transfer_config.kv_role,
        step_tokens=config.step_tokens,
        weight_bytes=prepared.memory_plan.model_memory.estimate.weights,
        media=media_limits(config, prepared.media),
        media_model=prepared.media,
        no_media=prepared.served_media.why,
        expert_bytes=bytes_of_token(prepared.ranks.workers[0].main.build.routed_experts),
        dtype=str(prepared.sizes.dtype).removeprefix("torch."),
        max_loras=config.max_loras if config.enable_lora else 0,
        max_lora_rank=config.max_lora_rank if config.enable_lora else 0,
        num_ranks=config.tensor_parallel_size * config.pipeline_parallel_size,
    )


def _labels(prepared: EnginePlan) -> list[str]:
    """Names of the classes, by their number."""
    named = getattr(prepared.hf_config, "id2label", None)
    if prepared.pooling_bounds is None or not isinstance(named, dict):
        return []
    return [str(named.get(place, f"LABEL_{place}")) for place in range(len(named))]
