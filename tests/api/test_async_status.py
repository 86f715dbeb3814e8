"""AsyncLLM's state and queue on the null platform, and requests whose outputs are fetched one by one."""

import asyncio
import threading
from concurrent.futures import Future

import numpy as np
import pytest

from quintet import AsyncLLM, RequestOutputKind
from quintet.api.async_status import EngineStopped, OutputStream, RequestOutputCollector
from quintet.outputs import RequestOutput
from quintet.pooling_outputs import PoolingRequestOutput, Unanswered
from tests.helpers.platforms.null_engine import Gate, expected, folder, greedy, until

DELTA = RequestOutputKind.DELTA


def start() -> AsyncLLM:
    return AsyncLLM(str(folder()), device="null", load_format="dummy", skip_tokenizer_init=True)


def test_state_until_shutdown() -> None:
    engine = start()
    assert engine.is_running and not engine.is_stopped and not engine.errored and engine.tokenizer is None
    engine.check_admission(2, "a")
    assert asyncio.run(engine.get_supported_tasks()) == ("generate",)
    assert asyncio.run(engine.is_tracing_enabled()) is False
    engine.shutdown()
    assert engine.is_stopped and engine.errored and not engine.is_running
    with pytest.raises(EngineStopped, match="shut down"):
        engine.check_admission()


def test_a_failure_is_the_dead_error(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = start()

    def fail() -> None:
        raise ZeroDivisionError("what broke")

    async def main() -> None:
        monkeypatch.setattr(engine._client, "step", fail)
        added = await engine.add_request("a", [1, 2], greedy(max_tokens=5))
        with pytest.raises(EngineStopped, match="what broke"):
            await added.get()

    asyncio.run(main())
    assert engine.errored and "what broke" in str(engine.dead_error)
    engine.shutdown()


def test_an_added_request_gives_its_outputs_one_by_one() -> None:
    engine = start()

    async def main() -> list[int]:
        added = await engine.add_request("mine", [4, 5], greedy(max_tokens=6, output_kind=DELTA))
        tokens: list[int] = []
        while True:
            output = await added.get()
            assert output.request_id == "mine"
            tokens += output.outputs[0].token_ids
            if output.finished:
                assert added.get_nowait() is None
                return tokens

    assert asyncio.run(main()) == expected([4, 5], 6)
    with pytest.raises(ValueError, match="n must"):
        asyncio.run(engine.add_request("b", [1], greedy(n=0)))  # type: ignore[arg-type]
    engine.shutdown()


def test_a_request_whose_caller_is_cancelled_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, opened, left = start(), threading.Event(), []
    abort = engine._client.abort
    monkeypatch.setattr(engine._client, "abort", lambda ids: left.extend(ids) or abort(ids))

    async def main() -> None:
        engine._calls.put((opened.wait, Future()))  # the engine's thread is at work
        adding = asyncio.ensure_future(engine.add_request("a", [1, 2], greedy(max_tokens=400)))
        await asyncio.sleep(0.05)
        adding.cancel()
        await asyncio.sleep(0.05)
        opened.set()
        with pytest.raises(asyncio.CancelledError):
            await adding
        assert left == ["a"]

    asyncio.run(main())
    engine.shutdown()


def test_numbers_of_an_added_request_are_a_pooling_output() -> None:
    async def main() -> None:
        stream = OutputStream(asyncio.get_running_loop(), asyncio.Queue())
        collector = RequestOutputCollector("a", stream, pools=True)
        for pooled in (np.ones(3, np.float32), None):
            stream.outputs.put_nowait(RequestOutput("a", None, [1], None, [], True, pooled=pooled))
        found = await collector.get()
        assert isinstance(found, PoolingRequestOutput) and found.outputs.data.tolist() == [1, 1, 1]
        with pytest.raises(Unanswered):
            collector.get_nowait()

    asyncio.run(main())


def test_an_added_request_can_be_aborted_and_counts_while_it_waits() -> None:
    engine = start()
    gate = Gate(engine)

    async def main() -> None:
        added = await engine.add_request("a", [1, 2, 3], greedy(max_tokens=400, output_kind=DELTA))
        assert engine.get_num_queued_tokens() == 3
        gate.opened.set()
        await added.get()
        assert engine.get_num_queued_tokens() == 0
        await engine.abort("a")
        while not (await added.get()).finished:
            pass
        await until(lambda: engine.get_num_unfinished_requests() == 0)

    asyncio.run(main())
    engine.shutdown()
