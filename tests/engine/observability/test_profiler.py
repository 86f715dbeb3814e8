"""Traces of an engine: what is in them, what bounds them, who may have them, and what happens where they fail."""

import asyncio
import gzip
import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from quintet import LLM, AsyncLLM
from quintet.chat.prompts import Prompt
from quintet.config import EngineConfig
from quintet.engine.client import EngineClient
from quintet.engine.observability import profiler
from tests.helpers.platforms.null_engine import complete, expected, folder, greedy, null_client

PROMPT = [1, 2, 3]
PARTS = ["step", "schedule", "build batch", "start", "sample", "wait", "finish", "detokenize"]


def allowed(where: Path, **entries: Any) -> dict[str, Any]:
    return {"profiler_config": {"profiler": "torch", "torch_profiler_dir": str(where), **entries}}


def client(where: Path, **entries: Any) -> EngineClient:
    return null_client(**allowed(where, **entries))


def read(path: Path) -> dict[str, Any]:
    data = path.read_bytes()
    found: dict[str, Any] = json.loads(gzip.decompress(data) if path.suffix == ".gz" else data)
    return found


def events(trace: dict[str, Any], name: str) -> list[dict[str, Any]]:
    return [each for each in trace["traceEvents"] if each["name"] == name]


def test_a_trace_holds_every_part_of_every_step_with_its_counts(tmp_path: Path) -> None:
    made = client(tmp_path / "new" / "folder")
    made.engine.profiler.start()
    made.add("a", Prompt(PROMPT), greedy(max_tokens=4))
    made.add("b", Prompt(PROMPT + [4]), greedy(max_tokens=4))
    while made.busy:
        made.step()
    found = made.engine.profiler.stop()
    assert found.path.parent == tmp_path / "new" / "folder" and found.path.name.endswith(".pt.trace.json.gz")
    assert [each.name for each in found.path.parent.iterdir()] == [found.path.name], "nothing else is left there"
    trace = read(found.path)
    assert found.steps == trace["otherData"]["steps"] == 4 and trace["otherData"]["events left out"] == 0
    assert [len(events(trace, part)) for part in PARTS] == [4] * len(PARTS)
    first, second = events(trace, "start")[:2]
    assert first["args"] == {"requests": 2, "tokens": 7, "rows": 2, "drafts": 0} and second["args"]["tokens"] == 2
    assert events(trace, "detokenize")[0]["args"] == {"requests": 2, "tokens": 2}
    assert events(trace, "schedule")[0]["args"]["requests"] == 2
    assert events(trace, "step")[0]["args"]["waiting"] == 0
    for step, start in zip(events(trace, "step"), events(trace, "start"), strict=True):
        assert step["ts"] <= start["ts"] and start["ts"] + start["dur"] <= step["ts"] + step["dur"]
        assert step["ph"] == "X" and step["dur"] > 0 and step["tid"] == start["tid"]


def test_without_leave_there_is_none() -> None:
    made = null_client()
    with pytest.raises(ValueError, match="traces are off; allow them with profiler_config="):
        made.engine.profiler.start()
    with pytest.raises(ValueError, match="no trace runs; start one"):
        made.engine.profiler.stop()


def test_there_are_never_two_at_once(tmp_path: Path) -> None:
    made = client(tmp_path, torch_profiler_use_gzip=False)
    made.engine.profiler.start()
    with pytest.raises(ValueError, match="a trace runs already; stop it before another starts"):
        made.engine.profiler.start()
    assert complete(made, PROMPT, greedy()).outputs[0].token_ids == expected(PROMPT, 8)
    first = made.engine.profiler.stop()
    with pytest.raises(ValueError, match="no trace runs"):
        made.engine.profiler.stop()
    made.engine.profiler.start()
    second = made.engine.profiler.stop()
    assert first.path != second.path and read(first.path)["otherData"]["steps"] == 8 and second.steps == 0


def test_steps_bound_it_and_it_says_so(tmp_path: Path) -> None:
    made = client(tmp_path, max_iterations=3, delay_iterations=2)
    made.engine.profiler.start()
    complete(made, PROMPT, greedy(max_tokens=20))
    assert not made.engine.profiler.running
    found = made.engine.profiler.stop()
    assert (found.steps, found.reason) == (3, "it had max_iterations=3 steps")
    assert len(events(read(found.path), "schedule")) == 3
    with pytest.raises(ValueError, match="no trace runs"):
        made.engine.profiler.stop()


def test_seconds_bound_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made, now = client(tmp_path, max_seconds=5), [0.0]
    clock = SimpleNamespace(monotonic=lambda: now[0], time_ns=time.time_ns, strftime=time.strftime)
    monkeypatch.setattr(profiler, "time", clock)
    made.engine.profiler.start()
    complete(made, PROMPT, greedy())
    now[0] = 5.0
    complete(made, PROMPT, greedy())
    found = made.engine.profiler.stop()
    assert (found.steps, found.reason) == (9, "it took max_seconds=5")


def test_bytes_bound_it_and_the_file(tmp_path: Path) -> None:
    made = client(tmp_path, max_bytes=2**16, torch_profiler_use_gzip=False)
    made.engine.profiler.start()
    for _ in range(50):
        complete(made, PROMPT, greedy(max_tokens=100))
        if not made.engine.profiler.running:
            break
    found = made.engine.profiler.stop()
    trace = read(found.path)
    assert "max_bytes=65536" in found.reason and found.path.stat().st_size < 2**16 + 2000
    assert "events left out" in trace["otherData"]


@pytest.mark.parametrize("bound", [0, 3])
def test_a_trace_that_cannot_be_written_ends_and_the_engine_goes_on(tmp_path: Path, bound: int) -> None:
    where = tmp_path / "gone"
    made = client(where, max_iterations=bound)
    made.engine.profiler.start()
    where.rmdir()
    assert complete(made, PROMPT, greedy()).outputs[0].token_ids == expected(PROMPT, 8)
    with pytest.raises(ValueError if bound else OSError) as raised:
        made.engine.profiler.stop()
    assert str(tmp_path) not in str(raised.value)
    assert bound or "the trace could not be written, and is lost: No such file" in str(raised.value)
    where.mkdir()
    made.engine.profiler.start()
    assert made.engine.profiler.stop().path.exists()


@pytest.mark.parametrize(
    ("entries", "why"),
    [
        ({"profiler": "torch"}, "torch_profiler_dir must be given"),
        ({"torch_profiler_dir": "x"}, "is of no use without profiler='torch'"),
        ({"profiler": "cuda", "torch_profiler_dir": "x"}, "use 'torch'"),
        ({"profiler": "torch", "torch_profiler_dir": "s3://x"}, "must be a folder of this machine"),
        ({"profiler": "torch", "torch_profiler_dir": "x", "warmup_iterations": 2}, "use delay_iterations"),
        ({"max_iteration": 1}, "did you mean 'max_iterations'"),
    ],
)
def test_what_cannot_be_is_refused_in_words(entries: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        EngineConfig(profiler_config=entries)  # type: ignore[arg-type]  # as a caller gives it


def test_a_folder_that_cannot_be_is_said_before_anything_is_loaded(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="torch_profiler_dir .* cannot be made"):
        client(tmp_path / "file" / "below")


def test_an_llm_gives_traces_and_so_does_an_async_one(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"device": "null", "load_format": "dummy", "skip_tokenizer_init": True}
    llm = LLM(str(folder()), use_tqdm=False, **settings, **allowed(tmp_path))
    llm.start_profile()
    llm.generate([PROMPT], greedy(), use_tqdm=False)
    assert len(events(read(Path(llm.stop_profile())), "step")) == 8

    async def run() -> str:
        other = AsyncLLM(str(folder()), **settings, **allowed(tmp_path))
        await other.start_profile()
        async for _ in other.generate(PROMPT, greedy()):
            pass
        found = await other.stop_profile()
        other.shutdown()
        return found

    assert len(events(read(Path(asyncio.run(run()))), "step")) == 8
