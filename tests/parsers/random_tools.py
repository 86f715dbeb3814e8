"""Tools with any arguments, by chance, of what schemas of tools are made of."""

import random
from typing import Any

from quintet.parsers import Tool

WORDS = ["a", "city name", "x-y", "é", "zone_2", "<p>", "true", "null", "5"]
NAMES = ["city", "days", "x_1", "unit", "how-long", "é", "more"]


def tools(seed: int) -> list[Tool]:
    draw = random.Random(seed)
    return [Tool(name, parameters(draw)) for name in ("get", "ns.say/it-2")]


def parameters(draw: random.Random) -> dict[str, Any]:
    names = draw.sample(NAMES, draw.randint(0, 3))
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {name: value(draw, 2) for name in names},
        "required": [name for name in names if draw.random() < 0.6],
        "additionalProperties": False,
    }
    if draw.random() < 0.3:
        schema["$defs"] = {"node": node()}
        schema["properties"]["tree"] = {"$ref": "#/$defs/node"}
    return {} if draw.random() < 0.1 else schema


def node() -> dict[str, Any]:
    """It refers to itself."""
    inner = {"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 1}
    return {
        "type": "object",
        "properties": {"v": {"type": "integer"}, "next": inner},
        "required": ["v"],
        "additionalProperties": False,
    }


def value(draw: random.Random, deep: int) -> dict[str, Any]:
    kinds = [text, number, word, several, listed] if deep else [number, word]
    return draw.choice([*kinds, text])(draw, deep - 1)


def text(draw: random.Random, deep: int) -> dict[str, Any]:
    kinds: list[dict[str, Any]] = [
        {},
        {"maxLength": 4},
        {"minLength": 1, "maxLength": 3},
        {"pattern": "^[a-c]{1,3}$"},
        {"pattern": "x/[0-9]", "maxLength": 8},
        {"format": "date"},
        {"format": "uuid"},
        {"enum": draw.sample(WORDS, 3)},
    ]
    return {"type": "string", **draw.choice(kinds)}


def number(draw: random.Random, deep: int) -> dict[str, Any]:
    kinds: list[dict[str, Any]] = [
        {"type": "integer"},
        {"type": "integer", "minimum": -3, "maximum": 40},
        {"type": "number"},
        {"type": "number", "exclusiveMinimum": 0, "maximum": 2},
        {"enum": [1, 2.5, -7]},
    ]
    return draw.choice(kinds)


def word(draw: random.Random, deep: int) -> dict[str, Any]:
    return draw.choice([{"type": "boolean"}, {"type": "null"}, {"const": True}, {"const": "yes"}, {}])


def several(draw: random.Random, deep: int) -> dict[str, Any]:
    kinds: list[dict[str, Any]] = [
        {"type": ["string", "null"], "maxLength": 5},
        {"type": ["string", "integer", "boolean"], "maxLength": 5},
        {"anyOf": [text(draw, deep), {"type": "null"}], "default": None},
        {"anyOf": [number(draw, deep), {"type": "string", "maxLength": 3}]},
        {"oneOf": [{"type": "array", "items": text(draw, deep), "maxItems": 2}, text(draw, deep)]},
        {"enum": ["a", "null", None, 3, [1, "b"]]},
        {"type": ["object", "string"], "properties": {"k": number(draw, deep)}, "additionalProperties": False},
    ]
    return draw.choice(kinds)


def listed(draw: random.Random, deep: int) -> dict[str, Any]:
    low = draw.randint(0, 2)
    items = {"type": "array", "items": value(draw, deep), "minItems": low, "maxItems": low + draw.randint(0, 1)}
    mapped = {
        "type": "object",
        "properties": {"k": value(draw, deep), "l m": value(draw, deep)},
        "required": ["k"],
        "additionalProperties": False,
    }
    return draw.choice([items, mapped, {"type": "object"}, {"type": "array"}])
