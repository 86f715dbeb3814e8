"""How often tokens are used in English at large, by the list of the PyPI package wordfreq (Speer 2022)."""

from __future__ import annotations

import importlib.util
from collections import Counter

from transformers import PreTrainedTokenizerFast


def frequencies() -> dict[str, float]:
    """Of 300 thousand words, in lower case; what is not written in ASCII is left out."""
    if importlib.util.find_spec("wordfreq") is None:
        raise ModuleNotFoundError("the list of common words is missing; pip install wordfreq")
    import wordfreq

    return {word: share for word, share in wordfreq.get_frequency_dict("en").items() if word.isascii()}


def shares(tokenizer: PreTrainedTokenizerFast) -> dict[int, float]:
    """By the id of a token; all shares add up to 1."""
    words = frequencies()
    rows = tokenizer(list(words), add_special_tokens=False)["input_ids"]
    found: Counter[int] = Counter()
    for row, share in zip(rows, words.values(), strict=True):
        for token in row:
            found[token] += share  # type: ignore[assignment]
    total = sum(found.values())
    return {token: share / total for token, share in found.items()}
