"""Writes quintet/hub/transformers_cache.json: what transformers makes of the bundled models, for the first start.

    python scripts/transformers_cache.py

To be run after a change of quintet/bundled* or of the form of readings; a test says so.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoTokenizer

from quintet.config import INSIDE
from quintet.hub import hf_config as model_config
from quintet.hub import transformers_cache as readings
from quintet.tokenizers import tokenizer

FOLDERS = [readings.SHIPPED.parents[1] / name for name in INSIDE]


def made(folders: Iterable[Path]) -> dict[str, Any]:
    return {name: reading for folder in folders for name, reading in _made(folder).items()}


def _made(folder: Path) -> dict[str, Any]:
    raw = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config = {model_config.digest(raw["model_type"], raw): model_config.freeze(AutoConfig.from_pretrained(folder))}
    if not (folder / "tokenizer.json").is_file():  # a draft head
        return dict(json.loads(json.dumps(config)))
    loaded = tokenizer.Tokenizer.from_transformers(AutoTokenizer.from_pretrained(folder))
    both = {**config, readings.digest("tokenizer", tokenizer.contents(folder)): tokenizer.freeze(loaded, folder)}
    return dict(json.loads(json.dumps(both)))


if __name__ == "__main__":
    content = json.dumps(made(FOLDERS), indent=1, sort_keys=True) + "\n"
    readings.SHIPPED.write_text(content, encoding="utf-8")
