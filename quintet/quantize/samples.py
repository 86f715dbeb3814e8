"""Calibration and evaluation text: lines of a file as sequences of tokens."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from quintet.chat.messages import ChatOptions, render_chat
from quintet.tokenizers.tokenizer import Tokenizer

MAX_BYTES = 256 * 2**20  # of a file
MIN_TOKENS = 16  # tokens of a sequence


def sequences(file: Path, tokenizer: Tokenizer, count: int, length: int) -> list[list[int]]:
    """At most so many sequences, of so many tokens each: the file's samples one after the other, cut into pieces.
    ValueError or OSError says what is wrong with the file."""
    if not file.is_file():
        raise FileNotFoundError(f"{file} is not there; give a file with a sample of text per line")
    if (size := file.stat().st_size) > MAX_BYTES:
        raise ValueError(f"{file} has {size >> 20} MiB, and {MAX_BYTES >> 20} are read at most; give a part of it")
    held: list[int] = []
    found: list[list[int]] = []
    for sample in samples(file, tokenizer):
        held += sample
        while len(held) >= length and len(found) < count:
            found.append(held[:length])
            held = held[length:]
        if len(found) == count:
            return found
    if not found and len(held) >= MIN_TOKENS:
        return [held]
    if not found:
        raise ValueError(f"{file} has {len(held)} tokens, and {MIN_TOKENS} are the least; give more text")
    return found


def samples(file: Path, tokenizer: Tokenizer) -> Iterator[list[int]]:
    """Lines that are not empty; of .jsonl the text of each object, or what its messages are to the model."""
    try:
        with file.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip() and file.suffix == ".jsonl":
                    yield _ids(json.loads(line), tokenizer, f"{file}:{number}")
                elif line.strip():
                    yield tokenizer.encode(line.rstrip("\n"))
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        what = "an object of JSON per line" if file.suffix == ".jsonl" else "UTF-8 text"
        raise ValueError(f"{file} is not {what}: {error}") from None


def _ids(entry: Any, tokenizer: Tokenizer, where: str) -> list[int]:
    entry = entry if isinstance(entry, dict) else {"text": entry}
    text = entry.get("text", entry.get("prompt"))
    if isinstance(text, str):
        return tokenizer.encode(text)
    if not isinstance(entry.get("messages"), list):
        raise ValueError(f"{where} has neither 'text' nor 'messages'; each line is an object with one of them")
    return render_chat(tokenizer, entry["messages"], ChatOptions(add_generation_prompt=False)).token_ids
