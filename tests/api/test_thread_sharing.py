"""One LLM on the null platform, called from several threads at once."""

import signal
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from quintet import LLM, BeamSearchParams
from tests.helpers.platforms.null_engine import CtrlC, expected, folder, greedy

PATIENCE = 60  # seconds after which a test fails that would hang


def llm(**settings: Any) -> LLM:
    return LLM(str(folder()), device="null", load_format="dummy", skip_tokenizer_init=True, use_tqdm=False, **settings)


def tokens(engine: LLM, prompts: list[list[int]], count: int, **settings: Any) -> list[list[int]]:
    outputs = engine.generate(prompts, greedy(max_tokens=count, **settings), use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


class Threads:
    """Calls in threads of their own, which wait in vain for no longer than PATIENCE."""

    def __enter__(self) -> "Threads":
        self.pool = ThreadPoolExecutor(16)
        return self

    def __call__(self, function: Callable[..., Any], *given: Any, **settings: Any) -> "Future[Any]":
        return self.pool.submit(function, *given, **settings)

    def __exit__(self, *_: object) -> None:
        self.pool.shutdown(wait=False)


class Held:
    """The engine's next step waits until so many other calls wait for their turns, or for outputs."""

    def __init__(self, engine: LLM, monkeypatch: pytest.MonkeyPatch, waiting: int) -> None:
        shared, compute = engine._shared, engine._client.engine.compute
        self.begun, self._queued, self._left = threading.Event(), threading.Semaphore(0), waiting

        class Line(list):  # type: ignore[type-arg]
            def append(line, caller: Any) -> None:
                super().append(caller)
                self._queued.release()

        def held() -> None:
            self.begun.set()
            while self._left:
                assert self._queued.acquire(timeout=PATIENCE), "nobody came"
                self._left -= 1
            compute()

        monkeypatch.setattr(shared, "_line", Line())
        monkeypatch.setattr(engine._client.engine, "compute", held)


def test_many_calls_of_many_threads_get_what_they_get_alone() -> None:
    engine = llm(max_num_seqs=8)

    def calls(thread: int) -> None:
        for turn in range(12):
            prompts = [[thread, turn, i] for i in range(1 + (thread + turn) % 4)]
            if turn % 3 == 2:
                parts: dict[str, list[int]] = {}
                for output in engine.stream(prompts, greedy(max_tokens=9)):
                    parts.setdefault(output.request_id, []).extend(output.outputs[0].token_ids)
                assert [parts[each] for each in sorted(parts, key=int)] == [expected(each, 9) for each in prompts]
            else:
                assert tokens(engine, prompts, 5 + turn) == [expected(each, 5 + turn) for each in prompts]
        engine.beam_search([[thread]], BeamSearchParams(beam_width=2, max_tokens=3))

    with Threads() as start:
        for each in [start(calls, thread) for thread in range(6)]:
            each.result(PATIENCE)
    assert not engine._client.busy and not engine._shared._kept and engine._shared._turn is None


def test_calls_of_several_threads_run_in_the_same_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = llm()
    Held(engine, monkeypatch, waiting=5)
    with Threads() as start:
        runs = [start(tokens, engine, [[i]], 40) for i in range(6)]
        assert [run.result(PATIENCE) for run in runs] == [[expected([i], 40)] for i in range(6)]
    assert engine.get_stats()["num_steps"] == 41, "all but the first begin in the second step"


def test_an_error_reaches_its_own_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a parameter, which is found beside the steps, and of a step, which ends those in it alone."""
    engine = llm(max_num_seqs=2)
    held = Held(engine, monkeypatch, waiting=2)
    with Threads() as start:
        good = start(tokens, engine, [[1], [2]], 30)
        assert held.begun.wait(PATIENCE)
        bad = start(tokens, engine, [[3]], 8, stop_token_ids=[1000])
        waits = start(tokens, engine, [[4]], 8)
        with pytest.raises(ValueError, match="stop_token_ids names token 1000"):
            bad.result(PATIENCE)
        assert good.result(PATIENCE) == [expected([1], 30), expected([2], 30)]
        assert waits.result(PATIENCE) == [expected([4], 8)]


def test_an_engine_that_breaks_in_ones_step_leaves_the_others_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = llm()
    held = Held(engine, monkeypatch, waiting=1)
    compute, failures = engine._client.engine.compute, [SystemExit("a logits processor wants to go")]

    def breaks() -> None:
        compute()
        if failures:
            raise failures.pop()

    monkeypatch.setattr(engine._client.engine, "compute", breaks)
    with Threads() as start:
        first = start(tokens, engine, [[1]], 30)
        assert held.begun.wait(PATIENCE)
        second = start(tokens, engine, [[2]], 30)
        with pytest.raises(SystemExit):
            first.result(PATIENCE)
        assert second.result(PATIENCE) == [expected([2], 30)]
    assert not engine._client.busy


def test_closing_ends_calls_that_wait_and_refuses_later_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = llm()
    held = Held(engine, monkeypatch, waiting=2)
    with Threads() as start:
        stepping = start(tokens, engine, [[1]], 100)
        assert held.begun.wait(PATIENCE)
        waiting = start(tokens, engine, [[2]], 100)
        closing = start(engine.close)
        closing.result(PATIENCE)
        for each in (stepping, waiting):
            with pytest.raises(RuntimeError, match="closed"):
                each.result(PATIENCE)
    for call in (lambda: tokens(engine, [[1]], 2), engine.reset_prefix_cache, lambda: next(engine.stream([[1]]))):
        with pytest.raises(RuntimeError, match="this LLM is closed; make a new one"):
            call()
    engine.close()
    assert not engine._client.busy


def test_leaving_the_with_block_closes() -> None:
    with llm() as engine:
        stream = engine.stream([[1]], greedy(max_tokens=100))
        next(stream)
    with pytest.raises(RuntimeError, match="closed"):
        next(stream)


def test_a_call_from_within_a_step_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = llm()
    monkeypatch.setattr(engine._client.engine, "compute", engine.reset_prefix_cache)
    with pytest.raises(RuntimeError, match="from outside of a step"):
        tokens(engine, [[1]], 2)


def test_a_generator_that_is_collected_in_a_step_ends_its_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = llm()
    stream = engine.stream([[1]], greedy(max_tokens=400))
    next(stream)
    compute, running = engine._client.engine.compute, list[float]()

    def collects() -> None:
        stream.close()  # type: ignore[attr-defined]
        compute()
        running.append(engine.get_stats()["num_running"])

    monkeypatch.setattr(engine._client.engine, "compute", collects)
    assert tokens(engine, [[2]], 8) == [expected([2], 8)]
    assert running == [2, *[1] * 6, 0], "it ends with the step in which it was left"
    assert not engine._client.busy


def test_requests_that_the_engine_has_lost_are_not_waited_for() -> None:
    engine = llm()
    stream = engine.stream([[1]], greedy(max_tokens=400))
    next(stream)
    engine._client.abort(["0"])
    with pytest.raises(RuntimeError, match="the engine has none of the requests 0"):
        next(stream)


def test_ctrl_c_at_any_line_leaves_other_threads_theirs() -> None:
    engine = llm()
    with Threads() as start:
        for at in range(0, 100_000, 7):
            other = start(tokens, engine, [[3], [4]], 6)
            with CtrlC(at) as ctrl_c:
                tokens(engine, [[1]], 4)
            assert other.result(PATIENCE) == [expected([3], 6), expected([4], 6)], at
            assert tokens(engine, [[5]], 2) == [expected([5], 2)]
            assert engine._shared._turn is None and not engine._shared._line and not engine._client.busy, at
            if not ctrl_c.came:
                break
    assert at > 300


def test_ctrl_c_ends_a_call_while_another_threads_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, steps, main = llm(), iter(range(1000)), threading.get_ident()
    held = Held(engine, monkeypatch, waiting=1)
    compute = engine._client.engine.compute

    def interrupts() -> None:
        compute()
        if next(steps) in (9, 200):  # Python drops one that comes within a finalizer: then the second ends the call
            signal.pthread_kill(main, signal.SIGINT)

    monkeypatch.setattr(engine._client.engine, "compute", interrupts)
    with Threads() as start:
        other = start(tokens, engine, [[1]], 30)
        assert held.begun.wait(PATIENCE)
        with pytest.raises(KeyboardInterrupt):
            tokens(engine, [[2]], 500)
        assert other.result(PATIENCE) == [expected([1], 30)]
    assert not engine._client.busy
