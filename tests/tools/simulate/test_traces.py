"""Traces: what a line says, which prompts begin alike, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from quintet.clients.request_traces import BLOCK, TraceEntry, read_trace, speed_up, write_trace


def written(tmp_path: Path, *lines: Any) -> str:
    file = tmp_path / "trace.jsonl"
    file.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return str(file)


def test_what_is_written_is_read(tmp_path: Path) -> None:
    entries = [
        TraceEntry(0.0, 5, 7),
        TraceEntry(0.25, 600, 1, hash_ids=(3, 9)),
        TraceEntry(1.5, 40, 2, group=0, shared_length=32, priority=-1),
    ]
    file = str(tmp_path / "trace.jsonl")
    write_trace(file, reversed(entries))
    assert read_trace(file) == entries  # in the order of their arrival
    assert [each.arrival for each in speed_up(entries, 2)] == [0.0, 0.125, 0.75]


def test_a_line_of_mooncakes_trace_is_taken(tmp_path: Path) -> None:
    line = {"timestamp": 27482, "input_length": 1100, "output_length": 52, "hash_ids": [46, 47, 48]}
    assert read_trace(written(tmp_path, line)) == [TraceEntry(27.482, 1100, 52, (46, 47, 48))]


def test_prompts_begin_alike_where_the_trace_says_so() -> None:
    one, two = TraceEntry(0, 1100, 1, (1, 2, 3)), TraceEntry(0, 1030, 1, (1, 2, 9))
    a, b = one.prompt(0, 1000), two.prompt(1, 1000)
    assert (len(a), len(b)) == (1100, 1030) and a[: 2 * BLOCK] == b[: 2 * BLOCK] and a[2 * BLOCK] != b[2 * BLOCK]
    short, long = TraceEntry(0, 50, 1, group=4, shared_length=20), TraceEntry(0, 90, 1, group=4, shared_length=64)
    a, b = short.prompt(2, 1000), long.prompt(3, 1000)
    assert (len(a), len(b)) == (50, 90) and a[:20] == b[:20] and a[20:50] != b[20:50]
    assert short.prompt(2, 1000) == a and short.prompt(7, 1000)[20:] != a[20:]
    assert all(0 <= token < 1000 for token in a)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("nonsense", "line 2: Expecting value"),
        ([1], "must be an object"),
        ({"arival": 1}, "did you mean 'arrival'"),
        ({"input_length": 1, "output_length": 1}, "either arrival"),
        ({"arrival": 1, "timestamp": 1, "input_length": 1, "output_length": 1}, "either arrival"),
        ({"arrival": -1, "input_length": 1, "output_length": 1}, "at least 0, not -1"),
        ({"arrival": 1, "output_length": 1}, "input_length is missing"),
        ({"arrival": 1, "input_length": 1, "output_length": 0}, "output_length must be"),
        ({"arrival": 1, "input_length": 600, "output_length": 1, "hash_ids": [1]}, "is 2 blocks"),
        ({"arrival": 1, "input_length": 6, "output_length": 1, "hash_ids": "1"}, "list of whole numbers"),
        ({"arrival": 1, "input_length": 6, "output_length": 1, "hash_ids": [1], "group": 1}, "give one of them"),
        ({"arrival": 1, "input_length": 6, "output_length": 1, "group": 1}, "belong together"),
        ({"arrival": 1, "input_length": 6, "output_length": 1, "group": 1, "shared_length": 7}, "is more than"),
    ],
)
def test_a_wrong_line_is_refused_by_its_number(tmp_path: Path, line: Any, says: str) -> None:
    with pytest.raises(ValueError) as error:
        read_trace(written(tmp_path, {"arrival": 0, "input_length": 1, "output_length": 1}, line))
    assert "line 2" in str(error.value) and says in str(error.value)


def test_a_trace_of_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds no requests"):
        read_trace(written(tmp_path, ""))
