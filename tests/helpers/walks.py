"""Random texts inside a grammar: any token that its mask allows, and at last those that lead to its end."""

import functools
import itertools
import random
from typing import Any

import numpy as np

from quintet.structured_output.grammar_source import llguidance as library
from tests.helpers.platforms.shaped import SIZE, folder

EOS, CLOSERS = 1, "]},0@:"


@functools.cache
def vocabulary() -> Any:
    text = (folder() / "tokenizer.json").read_text()
    return library().LLTokenizer(text, n_vocab=SIZE, eos_token=EOS)


def walk(grammar: str, seed: int, free: int = 30, most: int = 3000, lean: str = "", end: str = "") -> str:
    """Any token that may come, often one of `lean`, and after some of them those that lead to the end, or say it."""
    draw, said = random.Random(seed), []
    matcher = library().LLMatcher(vocabulary(), grammar, log_level=0)
    quote, *closers = (vocabulary().tokenize_str(each)[0] for each in '"' + CLOSERS)
    ending = itertools.cycle(vocabulary().tokenize_str(end))
    leaning = [vocabulary().tokenize_str(each)[0] for each in lean]
    while not matcher.is_stopped():
        bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
        allowed = np.flatnonzero(bits).tolist()
        assert allowed and len(said) < most, f"no end: {vocabulary().decode_str(said)!r}"
        token = draw.choice(allowed)
        if leaning and len(said) <= free and draw.random() < 0.8:
            token = draw.choice([each for each in leaning if each in allowed] or [token])
        if len(said) > free and draw.random() < 0.9:
            closer = next(ending) if end else draw.choice([each for each in closers if each in allowed] or [token])
            token = next((each for each in (EOS, closer if end else quote, closer) if each in allowed), token)
        if token == EOS:
            break
        assert matcher.consume_token(token), matcher.get_error()
        said.append(token)
    return str(vocabulary().decode_str(said))
