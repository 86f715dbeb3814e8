"""Decides everything about a draft model: its files, its configuration, and the settings that it is built with."""

import functools
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from quintet.config import EngineConfig
from quintet.config.speculative import HEAD_METHODS
from quintet.engine.executor.model_part import DrafterSizes, ModelSizes
from quintet.engine.executor.model_weights import weights_cache_for, weights_for
from quintet.engine.quantization import TargetPlatform, resolve_quantization
from quintet.engine.spec_decode.head_files import is_head, mtp_head_of, read_head
from quintet.hub.max_model_len import resolve_max_model_len
from quintet.hub.model_impl import read_model
from quintet.hub.resolve import resolve_config, resolve_model, separate_quantization_config
from quintet.interface.platform import Capabilities, Platform
from quintet.interface.weights import StoredTensor
from quintet.layers.build import RequestedOutputs
from quintet.layers.decoder import CausalLM, ModelBase
from quintet.layers.quantization import QuantizationPlan
from quintet.model_loader.loader import check_counts, tensors_of
from quintet.model_loader.sharded_state import FORMATS as SHARDED
from quintet.model_loader.tied_head import is_tied
from quintet.models import model_class

# Settings of the model that answers, which say nothing of a drafter, and what they are for one.
OWN_SETTINGS: Mapping[str, Any] = {
    "tokenizer": None,
    "tokenizer_revision": None,
    "code_revision": None,
    "hf_config_path": None,
    "hf_overrides": None,
    "model_loader_extra_config": None,
    "quantization": None,
    "quantization_group_size": None,
    "activation_bits": None,
    "enable_lora": False,
    "enable_prompt_embeds": False,
    "calculate_kv_scales": False,
    "speculative_config": None,
}


def with_drafter(
    config: EngineConfig, facts: Capabilities, platform: Platform, whole: Any, sizes: ModelSizes, reasons: list[str]
) -> ModelSizes:
    """Returns the settings of a model with those of its drafts, and of the drafter beside it (see drafter_sizes)."""
    drafter = drafter_sizes(config, facts, platform, whole, sizes, reasons)
    if drafter is not None and drafter.head is not None:
        sizes = replace(sizes, requested_outputs=RequestedOutputs(aux_hidden_states=drafter.head.layers))
    spec = config.speculative_config
    return replace(sizes, drafter=drafter, max_drafts=0 if spec is None else spec.num_speculative_tokens)


def drafter_sizes(
    config: EngineConfig, facts: Capabilities, platform: Platform, whole: Any, sizes: ModelSizes, reasons: list[str]
) -> DrafterSizes | None:
    """Returns the settings of the draft model that speculative_config names; None: it names none.

    `whole`: the configuration of the model that answers, which `sizes` are of. ValueError or OSError says why there
    can be none.
    """
    spec = config.speculative_config
    if spec is None or not spec.uses_model:
        return None
    _check_settings(config)
    if spec.method == "mtp":
        reasons.append(f"draft head of the checkpoint's own: {spec.num_speculative_tokens} tokens at most")
        return _mtp_sizes(config, facts, platform, whole.get_text_config(), sizes)
    own = config.replace(
        **{**OWN_SETTINGS, "model": spec.model, "revision": spec.revision, "quantization": spec.quantization}
    )
    folder = resolve_model(own)
    has_head = is_head(folder)
    if spec.method == "draft_model" and has_head:
        methods = " or ".join(map(repr, HEAD_METHODS))
        raise ValueError(f"{spec.model!r} holds a draft head; use method {methods}, or leave method out")
    if spec.method in HEAD_METHODS or has_head:
        if spec.draft_vocab_size is not None:
            raise ValueError("speculative_config.draft_vocab_size is for draft models, and this is a draft head")
        found = _head_sizes(own, facts, folder, whole.get_text_config(), sizes, spec.method)
        reasons.append(f"draft head {spec.model}: {spec.num_speculative_tokens} tokens at most")
        return found
    place = resolve_config(own, folder)
    theirs, backend = read_model(own, place, platform.models)
    if backend:
        raise ValueError(f"speculative_config.model: {backend}, and a draft model is run by a family's file alone")
    hf_config = theirs.get_text_config()
    _check_vocabulary(hf_config, whole.get_text_config(), str(spec.model))
    family: type[ModelBase] = model_class(hf_config, platform.models)
    dummy = own.load_format == "dummy"
    weights = None if dummy else weights_for(own, folder, facts)
    there: Any = dict[str, StoredTensor] if weights is None else functools.partial(tensors_of, weights, family)
    if weights is not None:
        check_counts(weights, family, hf_config)
    quantization = resolve_quantization(
        own, theirs, TargetPlatform(platform.name, facts), there, separate_quantization_config(folder)
    )
    longest = resolve_max_model_len(own.replace(max_model_len=None), hf_config, family.max_text_length(hf_config), None)
    made = ModelSizes(
        sizes.dtype,
        sizes.page_size,
        min(longest, sizes.max_model_len),
        quantization,
        sizes.kv_dtype,
        attention=sizes.attention,
    )
    made = replace(made, requested_outputs=RequestedOutputs(vocab_size=spec.draft_vocab_size))
    made = replace(made, tied_head=is_tied(there(), (hf_config, theirs)))
    if weights is not None:
        made = replace(made, weights_cache=weights_cache_for(own, facts, weights))
    reasons.append(f"draft model {spec.model}: {hf_config.model_type}, {spec.num_speculative_tokens} tokens at most")
    return DrafterSizes(hf_config, made, weights)


def _mtp_sizes(
    config: EngineConfig, facts: Capabilities, platform: Platform, target: Any, sizes: ModelSizes
) -> DrafterSizes:
    """Returns the settings of the head in the model's own checkpoint."""
    folder = resolve_model(config)
    if facts.ops_only or folder.is_file() or sizes.transformers_backend or config.load_format in ("dummy", *SHARDED):
        raise ValueError(
            "speculative_config.method 'mtp' reads its head from a checkpoint in safetensors, of a family that quintet "
            "has a file for, on platforms that compute with torch; use 'ngram' or 'draft_model'"
        )
    weights = weights_for(config, folder, facts)
    family: type[CausalLM] = model_class(target, platform.models)
    head_config, head = mtp_head_of(family, target, tensors_of(weights, family))
    made = replace(sizes, lora=None, row_store=None, drafter=None, weights_cache=None, tied_head=None)
    return DrafterSizes(head_config, made, weights, head)


def _head_sizes(
    config: EngineConfig, facts: Capabilities, folder: Path, target: Any, sizes: ModelSizes, method: str | None
) -> DrafterSizes:
    """Returns the settings of a draft head; `config` names it as its model."""
    if facts.ops_only:
        raise ValueError(
            "speculative_config: draft heads are not supported on this platform; use method 'draft_model' or 'ngram'"
        )
    weights = weights_for(config.replace(load_format="auto"), folder, facts)
    hf_config, head = read_head(folder, weights, target, method)
    made = ModelSizes(sizes.dtype, sizes.page_size, sizes.max_model_len, QuantizationPlan(), sizes.kv_dtype)
    return DrafterSizes(hf_config, replace(made, attention=sizes.attention), weights, head)


def _check_settings(config: EngineConfig) -> None:
    """ValueError where a draft model cannot stand beside the rest."""
    if config.pipeline_parallel_size > 1:
        raise ValueError(
            "speculative_config.model: a draft model needs all layers of the other one in a process; set "
            "pipeline_parallel_size to 1, or use method 'ngram'"
        )
    if config.runner == "pooling":
        raise ValueError("speculative_config.model: a pooling model draws no tokens; leave speculative_config out")


def _check_vocabulary(own: Any, other: Any, name: str) -> None:
    if own.vocab_size != other.vocab_size:
        raise ValueError(
            f"speculative_config.model={name!r} has a vocabulary of {own.vocab_size} tokens, and the model has "
            f"{other.vocab_size}; use a draft model of the same family, or method 'ngram' or 'suffix'"
        )
