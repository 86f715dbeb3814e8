"""Sampling parameters of a conversation: of an engine here, or the ones that are sent to a server."""

import dataclasses
from typing import Any

from quintet.common.suggestions import unknown_name_error
from quintet.config.schema.flags import read_setting
from quintet.sampling_params import SamplingParams

# One answer is shown, as text.
_FIXED = (
    "n", "detokenize", "output_kind", "extra_args", "logprobs", "prompt_logprobs", "logprob_token_ids", "flat_logprobs",
    "trace_decode_token_ids", "prompt_logprob_token_ids", "prompt_logprob_start", "routed_experts_prompt_start",
)  # fmt: skip
_SETTABLE = [each.name for each in dataclasses.fields(SamplingParams) if each.name not in _FIXED]
_OTHER_NAMES = {"num_predict": "max_tokens", "repeat_penalty": "repetition_penalty", "temp": "temperature"}


def changed_params(params: Any) -> dict[str, Any]:
    """Returns the parameters that are not SamplingParams' defaults. `params`: SamplingParams, or a dict of them."""
    if isinstance(params, dict):
        return dict(params)
    plain = SamplingParams()
    named = {name: getattr(params, name) for name in _SETTABLE}
    return {name: value for name, value in named.items() if value != getattr(plain, name)}


def with_param(params: Any, name: str, word: str) -> Any:
    """Returns the parameters with another value for one. ValueError names the nearest parameter, or what is wrong."""
    name = _OTHER_NAMES.get(name, name)
    if name not in _SETTABLE:
        raise ValueError(unknown_name_error("sampling parameter", name, _SETTABLE))
    if not word:
        raise ValueError(f"no value for {name}: give one (/set {name} VALUE)")
    change = {name: read_setting(SamplingParams, name, word)}
    if isinstance(params, dict):
        SamplingParams(**{"max_tokens": None, **params, **change})
        return {**params, **change}
    fields = {each.name: getattr(params, each.name) for each in dataclasses.fields(SamplingParams)}
    return SamplingParams(**{**fields, **change})
