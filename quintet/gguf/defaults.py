"""Chat templates, sampling defaults and end tokens of a GGUF file."""

import json
import math
import re
from collections.abc import Mapping
from typing import Any

from quintet.gguf.cursor import format_name
from quintet.gguf.vocabulary import read_ends

TEMPLATE = "tokenizer.chat_template"
PAIRS = f"{TEMPLATE}.rerank"  # of a query and a document
MAX_TEMPLATES = 64
# Of "general.sampling.<...>" -> what generation_config.json calls it, and the type of its value.
SAMPLING: Mapping[str, tuple[str, type]] = {
    "temp": ("temperature", float),
    "top_k": ("top_k", int),
    "top_p": ("top_p", float),
    "min_p": ("min_p", float),
    "penalty_repeat": ("repetition_penalty", float),
}


def templates(metadata: Mapping[str, Any]) -> str | dict[str, str] | None:
    """The chat template, or several by their names; None if there is none."""
    found = {key: value for key, value in metadata.items() if key == TEMPLATE or key.startswith(f"{TEMPLATE}.")}
    wrong = next((key for key, value in found.items() if not isinstance(value, str)), None)
    if wrong is not None or len(found) > MAX_TEMPLATES:
        what = f"{wrong} is no text" if wrong else f"it has {len(found)} chat templates, more than {MAX_TEMPLATES}"
        raise ValueError(f"{format_name(what)}; give another conversion of the model")
    if PAIRS in found:
        found[PAIRS] = _pairs_template(found[PAIRS])
    if set(found) <= {TEMPLATE}:
        return found.get(TEMPLATE)
    return {key.removeprefix(TEMPLATE).removeprefix(".") or "default": value for key, value in found.items()}


def _pairs_template(text: str) -> str:
    """Returns a reranker's template, a text with "{query}" and "{document}", as Jinja over messages of these roles."""
    texts = {"{query}": "messages[0].content", "{document}": "messages[1].content"}
    parts = [each for each in re.split(r"(\{query\}|\{document\})", text) if each]
    if not texts.keys() & set(parts):
        return text  # Jinja already
    return "{{ " + " ~ ".join(texts.get(each) or json.dumps(each, ensure_ascii=False) for each in parts) + " }}"


def generation(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Returns generation_config.json's entries: sampling defaults, and "eos_token_id", all ids that end an answer.

    Samplers that quintet does not have (mirostat, xtc) are left out.
    """
    settings: dict[str, Any] = {}
    for key, (name, kind) in SAMPLING.items():
        value = metadata.get(f"general.sampling.{key}")
        if value is None:
            continue
        if type(value) not in (int, kind) or not math.isfinite(value):
            raise ValueError(
                f"general.sampling.{key} is {format_name(str(value))}, not a number; give another conversion"
            )
        settings[name] = kind(value)
    return settings | {"eos_token_id": list(read_ends(metadata))}
