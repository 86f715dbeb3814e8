"""Writes a prompt and what follows it so that a model fills in between, if its tokenizer has tokens for that."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from quintet.engine.tokenizer import Tokenizer
from quintet.sampling_params import SamplingParams
from quintet.server.http.errors import ApiError
from quintet.server.http.protocol.completions import CompletionRequest
from quintet.server.http.sampling import refuse


class Marks(NamedTuple):
    """Tokens before the prompt, between prompt and suffix, and behind the suffix, where the model writes on."""

    begin: str
    hole: str
    end: str


# As the models' own cards write them; a tokenizer has those of one kind.
KINDS = (
    Marks("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen2.5-Coder, CodeGemma
    Marks("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite
    Marks("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    Marks("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek-Coder
    Marks("▁<PRE>", "▁<SUF>", "▁<MID>"),  # Code Llama, as its tokenizer names them
    Marks("<PRE>", "<SUF>", "<MID>"),
)
# What models write when the gap is filled, besides their end of text: the next file would begin.
_ENDS = (
    "<|fim_pad|>", "<|file_sep|>", "<|file_separator|>", "<|endoftext|>", "<fim_pad>", "<file_sep>", "<|end_of_text|>",
    "▁<EOT>", "<EOT>",
)  # fmt: skip


def infilled(
    tokenizer: Tokenizer, body: CompletionRequest, prompts: Sequence[Any], params: SamplingParams
) -> list[str]:
    """The texts of a request with a suffix. Adds to `params` the tokens that end what fills the gap.

    Raises ApiError 400 where the model cannot fill in, and where the request asks for what does not go with it.
    """
    tokens = {token.content: token_id for token_id, token in tokenizer.backend.get_added_tokens_decoder().items()}
    marks = next((kind for kind in KINDS if set(kind) <= tokens.keys()), None)
    if marks is None:
        raise ApiError(
            400, "suffix is not served for this model: its tokenizer has no tokens to fill in with, such as "
            f"{KINDS[0].begin}; put what follows into the prompt", param="suffix", code="unsupported_field",
        )  # fmt: skip
    _check(body, prompts, marks)
    if not params.ignore_eos:
        ends = {tokens[name] for name in _ENDS if name in tokens}
        params.stop_token_ids = [*(params.stop_token_ids or ()), *sorted(ends)]
    return [f"{marks.begin}{prompt}{marks.hole}{body.suffix}{marks.end}" for prompt in prompts]


def _check(body: CompletionRequest, prompts: Sequence[Any], marks: Marks) -> None:
    if body.prompt_embeds is not None or not all(isinstance(prompt, str) for prompt in prompts):
        raise refuse("suffix", "goes with prompts that are text; leave it out, or give text")
    if body.echo:
        raise refuse("echo", "gives the prompt before the output, and what is filled in has text on both sides")
    if body.truncate_prompt_tokens is not None:
        raise refuse("truncate_prompt_tokens", "would cut off what says that there is a gap; shorten the prompt")
    for field, texts in (("prompt", prompts), ("suffix", [body.suffix or ""])):
        found = next((mark for mark in marks for text in texts if mark in text), None)
        if found is not None:
            raise refuse(field, f"holds {found}, which tells this model where the gap is; leave that out")
