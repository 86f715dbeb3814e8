"""The page of multimodal wrappers: all of the installed transformers, and what is served (scripts/models.py)."""

from typing import Any

import transformers
from transformers import CONFIG_MAPPING
from transformers.models.auto import modeling_auto

from quintet.media.families import FAMILIES, REFUSED
from quintet.models import families

FILE = "docs/media-wrappers.md"
HEAD = """# Multimodal models of transformers

Made by `scripts/models.py` of the models that transformers {version} has a class for that writes text and takes
images, videos or sound. "Served": tokens were compared with transformers' generate() for a small random checkpoint
(`tests/e2e/media`), with the encoder as transformers computes it and the text model as it is here. Of others, the text
runs where there is a family for it, and media are refused with the reason.

| `model_type` | class | text model | media |
|---|---|---|---|
"""
NAMES = ("MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES", "MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES")


def wrappers() -> dict[str, str]:
    """model_type -> class."""
    found: dict[str, Any] = {}
    for name in reversed(NAMES):
        found |= getattr(modeling_auto, name)
    return {kind: each if isinstance(each, str) else each[0] for kind, each in sorted(found.items())}


def text_type(kind: str) -> str:
    """The model_type of a wrapper's text model; "" if its defaults name none."""
    try:
        config = CONFIG_MAPPING[kind]()
        text = config.get_text_config()
    except Exception:  # whatever a class raises without entries
        return ""
    return "" if text is config else str(text.model_type)


def row(kind: str, class_name: str) -> str:
    """A line of the table."""
    text = text_type(kind)
    if kind in FAMILIES:
        media = f"served: {', '.join(FAMILIES[kind].kinds)}"
    elif kind in REFUSED:
        media = f"refused: {REFUSED[kind]}"
    elif not text:
        media = "refused: its config has no text model of its own"
    elif text not in families():
        media = "refused: its text model has no family here"
    else:
        media = "refused: it was not tried with media"
    return f"| `{kind}` | `{class_name}` | {f'`{text}`' if text else ''} | {media} |\n"


def page() -> str:
    """The whole page."""
    made = wrappers()
    served = sum(kind in FAMILIES for kind in made)
    rows = "".join(row(kind, name) for kind, name in made.items())
    return HEAD.format(version=transformers.__version__) + rows + f"\n{served} of {len(made)} are served.\n"
