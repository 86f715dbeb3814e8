"""Datasets of prompts for a load: lines of JSON, and ShareGPT's file."""

import json
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from quintet.clients.json_lines import read_lines
from quintet.clients.load_generator import LoadRequest, RequestSource, prompt_fields
from quintet.common.suggestions import refuse_unknown

MAX_SHAREGPT = 2 * 2**30  # bytes of the file, which is read whole; the published one has 642 MB
_SHORTEST, _LONGEST_PROMPT, _LONGEST = 4, 1024, 2048  # tokens: vLLM's bounds for a sample


def read_dataset(file: str) -> list[dict[str, Any]]:
    """Lines of {"prompt": ..., "output_len": ...} or {"messages": [...], "output_len": ...}; output_len may lack."""
    return read_lines(file, _entry, "holds no prompts")


def _entry(entry: Any) -> dict[str, Any]:
    if not isinstance(entry, dict):
        raise ValueError('must be an object such as {"prompt": "Once upon a time", "output_len": 64}')
    refuse_unknown("field", entry, ("prompt", "messages", "output_len", "output_tokens"))
    if ("prompt" in entry) == ("messages" in entry):
        raise ValueError("must hold either prompt or messages")
    if "output_tokens" in entry:  # vLLM's name
        length = entry["output_tokens"]
        entry = {**{name: each for name, each in entry.items() if name != "output_tokens"}, "output_len": length}
    length = entry.get("output_len", 1)
    if not isinstance(length, int) or isinstance(length, bool) or length < 1:
        raise ValueError(f"output_len must be a whole number of at least 1, not {length!r}")
    return entry


def dataset_requests(entries: Sequence[Mapping[str, Any]], source: RequestSource, output_len: int) -> list[LoadRequest]:
    """`output_len` is of entries that name none."""
    calls = []
    for entry in entries:
        if "messages" in entry and source.endpoint == "completions":
            raise ValueError("the dataset holds messages, which /v1/completions does not take; use --endpoint chat")
        prompt = {"messages": entry["messages"]} if "messages" in entry else prompt_fields(entry["prompt"], source)
        calls.append(source.make_request(prompt, entry.get("output_len", output_len)))
    return calls


def read_sharegpt(
    file: str, count_tokens: Callable[[str], int], num_prompts: int, output_len: int | None, seed: int
) -> list[dict[str, Any]]:
    """Returns the first messages of ShareGPT's conversations in a random order, as many as are wanted and there.

    Outputs are as long as the answer in the file, or `output_len`. Samples are bounded as vLLM's benchmark bounds them:
    prompts of 4 to 1,024 tokens, answers of 4 or more, 2,048 together. Source: vLLM, benchmarks/datasets.
    """
    if Path(file).stat().st_size > MAX_SHAREGPT:
        raise ValueError(f"{file} has more than {MAX_SHAREGPT} bytes; give a part of it")
    try:
        found = json.loads(Path(file).read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is no JSON: {error}; give ShareGPT's file, or --dataset-name custom") from None
    pairs = [pair for each in found if (pair := _first_turns(each))] if isinstance(found, list) else []
    if not pairs:
        raise ValueError(f"{file} holds no conversations with two turns; give ShareGPT's file")
    random.Random(seed).shuffle(pairs)
    entries: list[dict[str, Any]] = []
    for prompt, answer in pairs:
        if len(entries) == num_prompts:
            break
        prompt_len = count_tokens(prompt)
        length = output_len or count_tokens(answer)
        long_enough = prompt_len >= _SHORTEST and (output_len is not None or length >= _SHORTEST)
        if long_enough and prompt_len <= _LONGEST_PROMPT and prompt_len + length <= _LONGEST:
            entries.append({"prompt": prompt, "output_len": length})
    return entries


def _first_turns(entry: Any) -> tuple[str, str] | None:
    turns = entry.get("conversations") if isinstance(entry, dict) else None
    texts = [each.get("value") for each in turns[:2] if isinstance(each, dict)] if isinstance(turns, list) else []
    first, second = [*texts, None, None][:2]
    if not (isinstance(first, str) and isinstance(second, str) and first and second):
        return None
    return first, second
