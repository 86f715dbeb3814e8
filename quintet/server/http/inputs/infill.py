"""Builds fill-in-the-middle (FIM) prompts from prompt and suffix, for tokenizers with FIM tokens."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from quintet.sampling_params import SamplingParams
from quintet.server.http.errors import ApiError
from quintet.server.http.inputs.sampling_params import invalid_field
from quintet.server.http.openai.completions_protocol import CompletionRequest
from quintet.tokenizers.tokenizer import Tokenizer


class InfillTokens(NamedTuple):
    """FIM tokens before the prompt, between prompt and suffix, and after the suffix, where generation starts."""

    begin: str
    middle: str
    end: str


# From the models' cards; a tokenizer has the tokens of one kind.
INFILL_TOKENS = (
    InfillTokens("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen2.5-Coder, CodeGemma
    InfillTokens("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite
    InfillTokens("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    InfillTokens("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek-Coder
    InfillTokens("▁<PRE>", "▁<SUF>", "▁<MID>"),  # Code Llama, as its tokenizer names them
    InfillTokens("<PRE>", "<SUF>", "<MID>"),
)
# Tokens that end an infill besides EOS: after them the model would begin the next file.
_ENDS = (
    "<|fim_pad|>", "<|file_sep|>", "<|file_separator|>", "<|endoftext|>", "<fim_pad>", "<file_sep>", "<|end_of_text|>",
    "▁<EOT>", "<EOT>",
)  # fmt: skip


def infill_texts(
    tokenizer: Tokenizer, body: CompletionRequest, prompts: Sequence[Any], params: SamplingParams
) -> list[str]:
    """Returns the FIM texts of a request with a suffix. Adds the tokens that end an infill to `params`.

    Raises ApiError 400 if the model has no FIM tokens, or the request has fields that exclude a suffix.
    """
    marks = need_infill_tokens(tokenizer, "suffix")
    _check(body, prompts, marks)
    add_infill_ends(tokenizer, params)
    return [f"{marks.begin}{prompt}{marks.middle}{body.suffix}{marks.end}" for prompt in prompts]


def find_infill_tokens(tokenizer: Tokenizer) -> InfillTokens | None:
    """Returns the FIM tokens of a tokenizer; None if it has none."""
    tokens = added_tokens(tokenizer)
    return next((kind for kind in INFILL_TOKENS if set(kind) <= tokens.keys()), None)


def need_infill_tokens(tokenizer: Tokenizer, field: str) -> InfillTokens:
    """Returns the FIM tokens of a tokenizer. Raises ApiError 400 for `field` if it has none."""
    marks = find_infill_tokens(tokenizer)
    if marks is None:
        raise ApiError(
            400, f"{field} is not served for this model: its tokenizer has no tokens to fill in with, such as "
            f"{INFILL_TOKENS[0].begin}; put what follows into the prompt", param=field, code="unsupported_field",
        )  # fmt: skip
    return marks


def added_tokens(tokenizer: Tokenizer) -> dict[str, int]:
    """Returns the added tokens of a tokenizer, special or not -> their ids."""
    return {token.content: token_id for token_id, token in tokenizer.backend.get_added_tokens_decoder().items()}


def add_infill_ends(tokenizer: Tokenizer, params: SamplingParams) -> None:
    """Adds the tokens that end an infill to the params, unless the output goes on after EOS."""
    if not params.ignore_eos:
        tokens = added_tokens(tokenizer)
        ends = {tokens[name] for name in _ENDS if name in tokens}
        params.stop_token_ids = [*(params.stop_token_ids or ()), *sorted(ends)]


def refuse_marks(marks: Sequence[str], texts: Mapping[str, Sequence[str]]) -> None:
    """Raises ApiError 400 for a field whose texts hold a FIM token."""
    for field, given in texts.items():
        found = next((mark for mark in marks for text in given if mark in text), None)
        if found is not None:
            raise invalid_field(field, f"holds {found}, which tells this model where the gap is; leave that out")


def _check(body: CompletionRequest, prompts: Sequence[Any], marks: InfillTokens) -> None:
    if body.prompt_embeds is not None or not all(isinstance(prompt, str) for prompt in prompts):
        raise invalid_field("suffix", "goes with prompts that are text; leave it out, or give text")
    if body.echo:
        raise invalid_field("echo", "gives the prompt before the output, and what is filled in has text on both sides")
    if body.truncate_prompt_tokens is not None:
        raise invalid_field("truncate_prompt_tokens", "would cut off what says that there is a gap; shorten the prompt")
    refuse_marks(marks, {"prompt": prompts, "suffix": [body.suffix or ""]})
