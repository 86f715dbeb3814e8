"""Log-probabilities that a trainer wrote: a file with an object of JSON per line."""

import math
from pathlib import Path
from typing import Any

from quintet.clients.json_lines import read_lines
from quintet.common.suggestions import refuse_unknown
from quintet.verification.scores import SequenceScores

MAX_BYTES = 256 * 2**20  # of a file
SLACK = 1e-3  # a log-probability of a trainer's float32 may be this much above 0
_FIELDS = ("prompt_token_ids", "token_ids", "logprobs", "id")


def read_scores(file: str, vocab_size: int, max_model_len: int) -> list[SequenceScores]:
    """Returns the sequences of a file. OSError or ValueError, which names the line, says what is wrong with it.

    Each line has `token_ids`, `logprobs` (one number per token, in nats, at temperature 1) and, where the tokens are an
    output, `prompt_token_ids`. Without a prompt the first token has no log-probability: null. An `id` is ignored.
    """
    path = Path(file)
    if not path.is_file():
        raise FileNotFoundError(f"{file} is not there; give a file with an object of JSON per line")
    if (size := path.stat().st_size) > MAX_BYTES:
        raise ValueError(f"{file} has {size >> 20} MiB, and {MAX_BYTES >> 20} are read at most; give a part of it")
    return read_lines(
        file, lambda entry: _scores(entry, vocab_size, max_model_len),
        "has no line; write {\"prompt_token_ids\": [...], \"token_ids\": [...], \"logprobs\": [...]} on each",
    )  # fmt: skip


def _scores(entry: Any, vocab_size: int, max_model_len: int) -> SequenceScores:
    if not isinstance(entry, dict):
        raise ValueError(f"is {type(entry).__name__}, not an object with token_ids and logprobs")
    refuse_unknown("entry", entry, _FIELDS)
    prompt = _ids(entry.get("prompt_token_ids", []), "prompt_token_ids", vocab_size)
    tokens = _ids(entry.get("token_ids"), "token_ids", vocab_size)
    if not tokens:
        raise ValueError("token_ids is empty; leave the line out")
    if len(prompt) + len(tokens) >= max_model_len:
        raise ValueError(f"has {len(prompt) + len(tokens)} tokens; fewer than max_model_len ({max_model_len}) fit")
    values = entry.get("logprobs")
    if not isinstance(values, list) or len(values) != len(tokens):
        count = len(values) if isinstance(values, list) else "no"
        raise ValueError(f"has {len(tokens)} token_ids and {count} logprobs; give one number for each token")
    logprobs = [_logprob(value, at, bool(prompt)) for at, value in enumerate(values)]
    known = [None] * len(prompt) + logprobs
    return SequenceScores([*prompt, *tokens], len(prompt), known, (), drawn=True)


def _ids(value: Any, name: str, vocab_size: int) -> list[int]:
    if not isinstance(value, list):
        raise ValueError(f"{name} is a list of token ids, not {repr(value)[:40]}")
    for each in value:
        if not isinstance(each, int) or isinstance(each, bool) or not 0 <= each < vocab_size:
            raise ValueError(f"{name} has {repr(each)[:40]}; token ids are 0 to {vocab_size - 1}")
    return value


def _logprob(value: Any, at: int, has_prompt: bool) -> float | None:
    if at == 0 and not has_prompt:
        return None  # it follows nothing
    if not isinstance(value, int | float) or isinstance(value, bool) or math.isnan(value):
        raise ValueError(f"logprobs has {repr(value)[:40]} at {at}; give a number")
    if value > SLACK:
        raise ValueError(f"logprobs has {value} at {at}; a log-probability is at most 0: is it a probability?")
    return float(value)
