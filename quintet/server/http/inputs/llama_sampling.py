"""Sampling fields under llama.cpp's names: Ollama's `options`, and bodies of llama.cpp's own routes."""

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, ClassVar

from pydantic import Field, SkipValidation, create_model

from quintet.server.http.inputs.body import Body, UnsupportedField

_SAME = ("temperature", "top_k", "top_p", "min_p", "seed", "presence_penalty", "frequency_penalty", "stop")
_WHOLE = ("top_k", "seed", "max_tokens")
_RANDOM_SEED = 2**32 - 1  # llama.cpp's value of no seed
_PENALTIES = ("presence_penalty", "frequency_penalty", "repetition_penalty")
_NOT_SAMPLED = "this sampler does not exist here; leave it out, or use temperature, top_k, top_p and min_p"

Number = Annotated[float | None, SkipValidation]  # SamplingParams checks the values
Whole = Annotated[int | None, SkipValidation]


def accepted(names: Iterable[str], why: str = "accepted, not used") -> dict[str, Any]:
    """Returns field definitions for create_model(): any value is accepted and has no effect."""
    return {name: (Any, Field(None, description=why)) for name in names}


# Parameters of samplers that are off; without the sampler they have no effect in llama.cpp either.
_Accepted: Any = create_model(
    "_Accepted",
    __base__=Body,
    **accepted(
        ("mirostat_tau", "mirostat_eta", "dynatemp_exponent", "xtc_threshold", "dry_base", "dry_allowed_length",
         "dry_penalty_last_n", "dry_sequence_breakers", "penalize_newline", "penalize_nl")
    ),
)  # fmt: skip


class LlamaSampling(_Accepted):
    """Sampling fields that llama.cpp and Ollama share. The model's own defaults hold where a field is not given."""

    temperature: Number = Field(None, description="divides the logits; 0 or less is greedy")
    top_k: Whole = Field(None, description="draw from this many most likely tokens; 0 or less: all")
    top_p: Number = Field(None, description="draw from the fewest tokens whose probabilities add up to this")
    min_p: Number = Field(None, description="draw from tokens at least this likely relative to the likeliest")
    seed: Whole = Field(None, description="seed of the random numbers; -1: unlike any other request")
    presence_penalty: Number = Field(None, description="subtracted from the logit of each token of the output")
    frequency_penalty: Number = Field(
        None, description="subtracted from a token's logit for each time it is in the output"
    )
    repeat_penalty: Number = Field(None, description="repetition_penalty of vLLM: prompt and output are penalized")
    repeat_last_n: Whole = Field(
        None, description="0 turns all penalties off; other values have no effect: penalties see the whole text"
    )
    stop: Annotated[str | list[str] | None, SkipValidation] = Field(None, description="text that ends the output")

    unsupported_fields: ClassVar[Mapping[str, UnsupportedField]] = {
        "typical_p": UnsupportedField(_NOT_SAMPLED, (1, 1.0)),
        "tfs_z": UnsupportedField(_NOT_SAMPLED, (1, 1.0)),
        "mirostat": UnsupportedField(_NOT_SAMPLED, (0,)),
        "dynatemp_range": UnsupportedField(_NOT_SAMPLED, (0, 0.0)),
        "xtc_probability": UnsupportedField(_NOT_SAMPLED, (0, 0.0)),
        "dry_multiplier": UnsupportedField(_NOT_SAMPLED, (0, 0.0)),
        "top_n_sigma": UnsupportedField(_NOT_SAMPLED, (-1, -1.0, 0, 0.0)),
        "min_keep": UnsupportedField("samplers keep one token at least", (0, 1)),
    }


def llama_fields(body: LlamaSampling, max_tokens: Any) -> dict[str, Any]:
    """Returns the fields of SamplingParams that a body sets. `max_tokens`: None is not given, below 0 is no limit."""
    fields = {name: value for name in _SAME if (value := getattr(body, name)) is not None}
    if body.repeat_penalty is not None:
        fields["repetition_penalty"] = body.repeat_penalty
    if max_tokens is not None:
        fields["max_tokens"] = max_tokens
    for name in _WHOLE:  # JSON of some clients has 42.0
        if isinstance(value := fields.get(name), float) and value.is_integer():
            fields[name] = int(value)
    for name in ("temperature", "top_k"):
        if _is_negative(fields.get(name)):
            fields[name] = 0
    if _is_negative(fields.get("max_tokens")):
        fields["max_tokens"] = None
    if fields.get("seed") == _RANDOM_SEED:
        fields["seed"] = None
    if body.repeat_last_n == 0:
        fields |= {name: 1.0 if name == "repetition_penalty" else 0.0 for name in _PENALTIES}
    return fields


def _is_negative(value: Any) -> bool:
    return isinstance(value, int | float) and value < 0
