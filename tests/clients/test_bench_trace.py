"""`quintet bench serve` on a trace: what is sent when, and what is saved."""

from pathlib import Path

import pytest

from quintet.cli import main as cli
from quintet.clients.request_traces import TraceEntry, read_trace, write_trace
from tests.clients.conftest import Fake


def test_bench_serve_sends_a_trace_and_saves_what_it_sent(fake: Fake, tmp_path: Path) -> None:
    trace, sent = str(tmp_path / "trace.jsonl"), str(tmp_path / "sent.jsonl")
    entries = [
        TraceEntry(0.0, 40, 3, group=1, shared_length=32),
        TraceEntry(0.4, 36, 5, group=1, shared_length=32, priority=2),
    ]
    write_trace(trace, entries)
    words = ["bench", "serve", "--url", fake.url, "--trace", trace, "--trace-speed", "4", "--save-trace", sent]
    assert cli.main([*words, "--warmup", "0"]) == 0
    first, second = sorted(fake.bodies(), key=lambda body: len(body["prompt"]), reverse=True)
    assert (first["prompt"], second["prompt"]) == (entries[0].prompt(0, 1000), entries[1].prompt(1, 1000))
    assert first["prompt"][:32] == second["prompt"][:32]
    assert (first["max_tokens"], second["max_tokens"], first["ignore_eos"]) == (3, 5, True)
    assert "priority" not in first and second["priority"] == 2
    found = read_trace(sent)
    assert [(each.input_length, each.output_length) for each in found] == [(7, 3), (7, 5)]  # as the server counted
    assert found[1].arrival - found[0].arrival >= 0.09  # 0.4 s, four times as fast


@pytest.mark.parametrize("beside", [["--request-rate", "1"], ["--dataset", "x"], ["--endpoint", "chat"]])
def test_bench_serve_takes_nothing_that_a_trace_settles(
    fake: Fake,
    tmp_path: Path,
    beside: list[str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    trace = str(tmp_path / "trace.jsonl")
    write_trace(trace, [TraceEntry(0.0, 4, 3)])
    assert cli.main(["bench", "serve", "--url", fake.url, "--trace", trace, *beside]) == 1
    assert "trace" in capsys.readouterr().err
