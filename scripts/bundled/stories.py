"""Plain documents without chat markup: short stories, sheets of sums, counting, facts."""

from __future__ import annotations

import random

from . import words as w

OPENINGS = (
    "Once upon a time, there was a {adj} {animal} named {name}. {name} lived in {place}.",
    "Once upon a time, a {adj} {animal} named {name} lived in {place}.",
)
EVENTS = (
    'One day, {name} found a {color} {thing} near the river. "What is this?" asked {name}. '
    '"It is a {thing}," said {friend}.',
    "One day, {name} lost a {color} {thing}. {name} looked everywhere, but the {thing} was gone. "
    "Then {friend} came to help.",
    'One morning, {name} met {friend}, who was very sad. "I lost my {color} {thing}," said {friend}. '
    '"I will help you," said {name}.',
)
MIDDLES = (
    "They walked through the forest and over the hill. They looked under every tree.",
    "They played together all day. The sun was warm and the sky was blue.",
    "They sat by the old tree and shared some {food}. The wind was soft and the birds sang.",
)
ENDINGS = (
    "In the evening, they went home with the {thing}. {name} and {friend} were good friends from that day on. The end.",
    "At night, {name} looked at the stars and smiled. It had been a very good day. The end.",
    "{name} was happy, and {friend} was happy too. They lived happily ever after. The end.",
)
PLACES = ("the forest", "a small house", "a green valley", "an old garden", "a little village")


def story(rng: random.Random, animal: str | None = None) -> str:
    """A story of about 120 tokens whose names and things stay the same from start to end."""
    name, friend = rng.sample(w.NAMES[:16], 2)
    slots = {
        "name": name, "friend": friend, "animal": animal or rng.choice(w.ANIMALS), "adj": rng.choice(w.ADJECTIVES),
        "place": rng.choice(PLACES), "thing": rng.choice(w.THINGS), "color": rng.choice(w.COLOR_NAMES),
        "food": rng.choice(w.FOODS[:8]),
    }  # fmt: skip
    parts = (rng.choice(part) for part in (OPENINGS, EVENTS, MIDDLES, ENDINGS))
    text = " ".join(parts).format(**slots)
    return text.replace("a old", "an old").replace("a orange", "an orange")


def sums(rng: random.Random) -> str:
    """A sheet of sums, one a line: many examples of addition for few tokens."""
    pairs = [(rng.randint(0, 99), rng.randint(0, 99)) for _ in range(rng.randint(4, 16))]
    return "\n".join(f"{a} + {b} = {a + b}" for a, b in pairs) + "\n"


def counting(rng: random.Random) -> str:
    step = rng.choice((1, 1, 1, 2, 5, 10))
    start = rng.choice((0, 1, 1, step, rng.randint(0, 50)))
    return ", ".join(str(start + step * i) for i in range(rng.randint(10, 40)))
