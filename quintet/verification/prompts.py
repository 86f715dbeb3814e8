"""Prompts that engines are compared on: short and long text, code, numbers, several scripts, and one after another."""

from collections.abc import Sequence

from quintet.tokenizers.tokenizer import Tokenizer

MAX_PROMPTS = 256
LONGEST = 320  # tokens of a prompt of ours

_LONG = """
A lighthouse keeper wrote a page each evening. On the first page he described the rock: forty steps long, twelve steps
wide, and bare except for a patch of grass behind the oil store. On the second page he described the lamp, whose lens
had been ground in another country and carried up the stairs in nine crates. He polished it with a linen cloth before
noon, because the sun came through the western panes after that, and a lens in the sun can set a curtain on fire. On
the third page there was a storm. The waves came over the landing stage, and the boat that should have brought flour
and letters turned back. He wrote that he was not afraid, then crossed it out, and wrote that the lamp had not gone
out. On the fourth page the storm was over. He found a crate on the rocks with oranges in it, and counted them: sixty-
one, of which seven were bad. He ate one, put nine on the shelf, and packed the others in straw for the crew of the
boat. On the fifth page the boat came. The letters were wet, and he dried them on the stove. One was from his sister,
who asked whether he was lonely.
"""

TEXTS = (
    "Once upon a time",
    "The capital of France is Paris, and the capital of Italy is",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return fibonacci(n - 1) +",
    "| year | price |\n|------|-------|\n| 2021 | 12.50 |\n| 2022 | 13.75 |\n| 2023 |",
    "El viejo pescador miró al mar. Der Wind war kalt. 东边的天空慢慢变亮。 Наступило утро.",
    " ".join(_LONG.split()),
)


def default_prompts(tokenizer: Tokenizer, longest: int) -> list[list[int]]:
    """Returns token ids of our prompts, each of `longest` tokens at most."""
    return [ids[: min(LONGEST, longest)] for ids in tokenizer.encode_all(list(TEXTS)) if ids]


def encode_prompts(tokenizer: Tokenizer, texts: Sequence[str], longest: int) -> list[list[int]]:
    """Returns token ids of texts. ValueError names one that is too long, or has no token."""
    if len(texts) > MAX_PROMPTS:
        raise ValueError(f"{len(texts)} prompts; {MAX_PROMPTS} are compared at most, give fewer")
    found = tokenizer.encode_all(list(texts))
    for number, ids in enumerate(found, 1):
        if not 0 < len(ids) <= longest:
            raise ValueError(
                f"prompt {number} has {len(ids)} tokens, and 1 to {longest} fit beside the output; shorten it, or "
                "raise max_model_len"
            )
    return found
