"""What the bundled model is asked about tools: it calls the first for the weather, and the second for a sum."""

from typing import Any

CITY: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}},
    "required": ["city"],
    "additionalProperties": False,
}
SUMMANDS: dict[str, Any] = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}, "b": {"enum": [1, 2, 30]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
SCHEMAS = {"get_weather": CITY, "add": SUMMANDS}
WEATHER: dict[str, Any] = {  # as chats have it
    "type": "function",
    "function": {"name": "get_weather", "description": "Weather of a city", "parameters": CITY},
}
ADD: dict[str, Any] = {"type": "function", "function": {"name": "add", "parameters": SUMMANDS}}
