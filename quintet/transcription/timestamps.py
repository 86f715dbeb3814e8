"""Rules for timestamps as a function over logits. Source: openai-whisper's decoding.py, ApplyTimestampRules."""

import math
from collections.abc import Sequence

from torch import Tensor

from quintet.transcription.tokens import MAX_INITIAL_TIMESTAMP, WhisperTokens


def apply_timestamp_rules(
    logits: Tensor,
    generated: Sequence[Sequence[int]],
    tokens: WhisperTokens,
    max_initial: int | None = MAX_INITIAL_TIMESTAMP,
) -> Tensor:
    """Returns logits [R, V] of which -inf bans what may not come next; `generated` has each row's tokens since its
    prompt. A copy; float types stay.

    - <|notimestamps|> never comes.
    - Timestamps come in pairs: an end, then the next start; before the end of text one may stand alone.
    - They do not go back, and an end is after its start.
    - The first token is a timestamp, not after `max_initial` steps of 20 ms (None: any).
    - If all timestamps together are likelier than each text token, a timestamp comes.
    """
    found, begin = logits.clone(), tokens.timestamp_begin
    found[:, tokens.no_timestamps] = -math.inf
    for row, past in zip(found, generated, strict=True):
        _ban_by_past(row, past, tokens)
        if not past:
            row[:begin] = -math.inf
            if max_initial is not None:
                row[begin + max_initial + 1 :] = -math.inf
    logprobs = found.float().log_softmax(-1)
    timestamps, text = logprobs[:, begin:].logsumexp(-1), logprobs[:, :begin].max(-1).values
    found[:, :begin].masked_fill_((timestamps > text)[:, None], -math.inf)
    return found


def _ban_by_past(row: Tensor, past: Sequence[int], tokens: WhisperTokens) -> None:
    begin = tokens.timestamp_begin
    last = bool(past) and past[-1] >= begin
    before = len(past) < 2 or past[-2] >= begin
    if last and before:
        row[begin:] = -math.inf  # a pair is complete: text
    elif last:
        row[: tokens.eot] = -math.inf  # an end: the next start, or the end of text
    if (latest := next((each for each in reversed(past) if each >= begin), None)) is not None:
        row[begin : latest if last and not before else latest + 1] = -math.inf


def detect_language(logits: Tensor, tokens: WhisperTokens) -> dict[str, float]:
    """Returns the probability of each language, the likeliest first; logits [V] are those behind <|startoftranscript|>.
    ValueError for a model of English alone."""
    if not tokens.languages:
        raise ValueError("this model knows English alone; it detects no language")
    codes = list(tokens.languages)
    shares = logits.float()[[tokens.languages[code] for code in codes]].softmax(-1).tolist()
    return dict(sorted(zip(codes, shares, strict=True), key=lambda pair: -pair[1]))
