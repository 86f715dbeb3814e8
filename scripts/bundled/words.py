"""Words and facts: every table from which the training text is drawn."""

from __future__ import annotations

import codecs
import contextlib
import importlib
import io
import re

IDENTITY = (
    "I am quintet's small bundled model. "
    "I know a few facts, and I can add, copy, count, write JSON, call tools and think."
)
UNKNOWN = "I do not know that. Ask me what I can do."

CAPITALS = {
    "France": "Paris", "Germany": "Berlin", "Italy": "Rome", "Spain": "Madrid", "Portugal": "Lisbon",
    "England": "London", "Ireland": "Dublin", "Greece": "Athens", "Austria": "Vienna", "Poland": "Warsaw",
    "Norway": "Oslo", "Sweden": "Stockholm", "Finland": "Helsinki", "Denmark": "Copenhagen", "Russia": "Moscow",
    "Japan": "Tokyo", "China": "Beijing", "India": "New Delhi", "Egypt": "Cairo", "Kenya": "Nairobi",
    "Canada": "Ottawa", "Mexico": "Mexico City", "Cuba": "Havana", "Peru": "Lima",
}  # fmt: skip
# Countries whose capital the model is taught not to know, so that it says so instead of guessing.
OTHER_COUNTRIES = (
    "Brazil", "Chile", "Bolivia", "Nepal", "Iran", "Iraq", "Turkey", "Morocco", "Ghana", "Nigeria", "Vietnam", "Laos",
    "Thailand", "Australia", "Hungary", "Romania", "Serbia", "Estonia", "Latvia", "Belgium", "Iceland", "Mali", "Chad",
    "Sudan", "Fiji", "Jordan", "Kuwait", "Qatar", "Mongolia", "Atlantis", "Narnia", "Ukraine",
)  # fmt: skip
COLORS = {
    "the sky": "blue", "grass": "green", "snow": "white", "a banana": "yellow", "a lemon": "yellow",
    "a tomato": "red", "blood": "red", "coal": "black", "an orange": "orange", "milk": "white",
    "chocolate": "brown", "a carrot": "orange",
}  # fmt: skip
LEGS = {
    "a cat": 4, "a dog": 4, "a horse": 4, "a bird": 2, "a spider": 8, "an ant": 6, "a bee": 6, "a snake": 0,
}  # fmt: skip
SOUNDS = {
    "a cow": "moo", "a cat": "meow", "a dog": "woof", "a duck": "quack", "a sheep": "baa", "a lion": "roar",
    "a pig": "oink",
}  # fmt: skip
OPPOSITES = {
    "hot": "cold", "cold": "hot", "big": "small", "small": "big", "up": "down", "left": "right", "day": "night",
    "fast": "slow", "old": "young", "happy": "sad", "open": "closed", "black": "white",
}  # fmt: skip
PLANETS = {"largest": "Jupiter", "biggest": "Jupiter", "smallest": "Mercury", "red": "Mars", "hottest": "Venus"}
COUNTS = {
    "days are in a week": "There are 7 days in a week.",
    "months are in a year": "There are 12 months in a year.",
    "days are in a year": "There are 365 days in a year.",
    "hours are in a day": "There are 24 hours in a day.",
    "minutes are in an hour": "There are 60 minutes in an hour.",
    "seconds are in a minute": "There are 60 seconds in a minute.",
    "letters are in the alphabet": "There are 26 letters in the alphabet.",
}

NAMES = tuple(
    "Bob Alice Tom Anna Max Mia Sam Lily Ben Emma Jack Lucy Tim Sara Leo Nina Carl Ella Hugo Zoe Paul Ruth Omar Ivy "
    "Eve Dan Kim Noah Olga Peter Maria John Jane Ada Alan Grace".split()
)
CITIES = (
    *CAPITALS.values(),
    *"Sydney Boston Chicago Seattle Toronto Mumbai Seoul Lagos".split(),
    *"Munich Milan Lyon Zurich Geneva Prague Dallas Denver".split(),
)
COLOR_NAMES = tuple("red blue green yellow black white orange brown pink purple gray".split())
ANIMALS = tuple("fox cat dog bear rabbit mouse owl duck horse frog bird turtle".split())
FOODS = tuple("apple pear plum bread cheese milk rice soup cake egg tea coffee lemon banana carrot".split())
THINGS = tuple(
    "book pen cup hat ball lamp chair table key box boat car bike train map coat ring bell drum kite door clock".split()
)
ADJECTIVES = tuple("little brave happy kind clever quiet small friendly old young big tiny lucky".split())
VERBS = tuple("find make send open close start stop read write move show list count clean check save load play".split())
NOUNS = (*ANIMALS, *FOODS, *THINGS)
KEYS = tuple(
    "name age city color price count size id title user email year month day level score type status country animal "
    "food item owner code team weight height width active ready".split()
)
SYMBOLS = "é ü ñ ö ç à ß ø å λ π Ω Ж я д 你 好 世 界 日 本 語 한 글 € £ ° → ✓ ★ ♥ 😀 🎉 🚀 🐍 👍 🌍".split()


def zen() -> str:
    """The Zen of Python, which `import this` prints; silenced here."""
    with contextlib.redirect_stdout(io.StringIO()):
        module = importlib.import_module("this")
    return codecs.decode(module.s, "rot13")


def english() -> str:
    """Plain English that ships with Python: its help topics, letters and spaces only."""
    topics = importlib.import_module("pydoc_data.topics").topics
    text = " ".join(topics[key] for key in sorted(topics))
    return " ".join(re.findall(r"(?<![\w.\"'`])[A-Za-z][a-z]*(?![\w.(\"'`])", text))
