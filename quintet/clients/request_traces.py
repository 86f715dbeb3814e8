"""Traces: which requests came when, how long they were and what they began with; no words of theirs."""

import json
import math
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from quintet.clients.json_lines import read_lines
from quintet.common.suggestions import refuse_unknown

BLOCK = 512  # tokens that one of hash_ids stands for, as in Mooncake's published traces
# fmt: skip
_KEYS = (
    "timestamp",
    "arrival",
    "input_length",
    "output_length",
    "hash_ids",
    "group",
    "shared_length",
    "priority",
)


@dataclass(frozen=True)
class TraceEntry:
    """One request. Those that begin with the same hash_ids, or are of one group, begin with the same tokens."""

    arrival: float  # seconds after the start
    input_length: int  # tokens
    output_length: int
    hash_ids: tuple[int, ...] = ()  # of its blocks of BLOCK tokens, the last of which may be shorter
    group: int | None = None
    shared_length: int = 0  # tokens that all of its group begin with
    priority: int = 0

    def line(self) -> str:
        """As read_trace() reads it."""
        given = {
            each.name: getattr(self, each.name) for each in fields(self) if getattr(self, each.name) != each.default
        }
        return json.dumps({**given, "arrival": round(self.arrival, 6)})

    def prompt(self, number: int, vocab_size: int) -> list[int]:
        """Its token ids. `number`: of the entry in its trace: what it shares with no other is drawn by that."""
        if self.hash_ids:
            blocks = [_random_tokens(f"block {each}", BLOCK, vocab_size) for each in self.hash_ids]
            return [token for block in blocks for token in block][: self.input_length]
        own = _random_tokens.__wrapped__(f"request {number}", self.input_length - self.shared_length, vocab_size)
        if self.group is None:
            return list(own)
        return [*_random_tokens(f"group {self.group}", self.shared_length, vocab_size), *own]


@lru_cache(maxsize=1 << 14)
def _random_tokens(seed: str, count: int, vocab_size: int) -> tuple[int, ...]:
    """Token ids from a seed."""
    numbers = np.frombuffer(random.Random(seed).randbytes(4 * count), "<u4")
    return tuple((numbers % vocab_size).tolist())


def read_trace(file: str) -> list[TraceEntry]:
    """Lines of JSON, in the order of their arrival: `input_length` and `output_length` in tokens; `arrival` in seconds,
    or Mooncake's `timestamp` in milliseconds; perhaps `hash_ids`, or `group` and `shared_length`, and `priority`."""
    entries = read_lines(file, _entry, "holds no requests; put one on each line")
    return sorted(entries, key=lambda entry: entry.arrival)


def write_trace(file: str, entries: Iterable[TraceEntry]) -> None:
    Path(file).write_text("".join(entry.line() + "\n" for entry in entries), encoding="utf-8")


def speed_up(entries: Sequence[TraceEntry], speed: float) -> list[TraceEntry]:
    """The same requests in 1/speed of the time."""
    return [replace(each, arrival=each.arrival / speed) for each in entries]


def _entry(found: Any) -> TraceEntry:
    if not isinstance(found, dict):
        raise ValueError('must be an object such as {"arrival": 0.5, "input_length": 600, "output_length": 80}')
    refuse_unknown("field", found, _KEYS)
    if ("arrival" in found) == ("timestamp" in found):
        raise ValueError("must hold either arrival (seconds) or timestamp (milliseconds)")
    entry = TraceEntry(
        _seconds(found["arrival"]) if "arrival" in found else _seconds(found["timestamp"], "timestamp") / 1e3,
        _int_field(found, "input_length", 1),
        _int_field(found, "output_length", 1),
        _hash_ids(found.get("hash_ids", [])),
        None if found.get("group") is None else _int_field(found, "group", 0),
        _int_field(found, "shared_length", 0, 0),
        _int_field(found, "priority", -(2**31), 0),
    )
    _check(entry)
    return entry


def _check(entry: TraceEntry) -> None:
    if entry.hash_ids and entry.group is not None:
        raise ValueError("hash_ids and group both say what the prompt begins with; give one of them")
    blocks = -(-entry.input_length // BLOCK)
    if entry.hash_ids and len(entry.hash_ids) != blocks:
        raise ValueError(
            f"input_length {entry.input_length} is {blocks} blocks of {BLOCK} tokens, and hash_ids has "
            f"{len(entry.hash_ids)}; give one for each"
        )
    if bool(entry.shared_length) != (entry.group is not None):
        raise ValueError("group and shared_length belong together: whose beginning, and how many tokens of it")
    if entry.shared_length > entry.input_length:
        raise ValueError(f"shared_length {entry.shared_length} is more than input_length {entry.input_length}")


def _seconds(value: Any, name: str = "arrival") -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
        raise ValueError(f"{name} must be a number of at least 0, not {value!r}")
    return float(value)


def _int_field(found: dict[str, Any], name: str, least: int, default: int | None = None) -> int:
    value = found.get(name, default)
    if value is None:
        raise ValueError(f"{name} is missing")
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name} must be a whole number of at least {least}, not {value!r}")
    return value


def _hash_ids(value: Any) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(isinstance(each, int) and not isinstance(each, bool) for each in value):
        raise ValueError(f"hash_ids must be a list of whole numbers, not {value!r}")
    return tuple(value)
