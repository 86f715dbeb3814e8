"""AsyncLLM on the null platform: requests from coroutines, who may leave, be cancelled, or come back at any moment."""

import asyncio
import threading
import time
from concurrent.futures import Future
from typing import Any

import pytest

from quintet import AsyncLLM, RequestOutputKind
from tests.helpers.platforms.null_engine import Gate, expected, folder, greedy, until

DELTA = RequestOutputKind.DELTA


def start() -> AsyncLLM:
    return AsyncLLM(str(folder()), device="null", load_format="dummy", skip_tokenizer_init=True)


def idle(engine: AsyncLLM) -> bool:
    """Whether nothing runs and nobody is remembered; asked after shutdown()."""
    return not engine._client.busy and not engine._followers and engine._calls.empty()


def queued(engine: AsyncLLM) -> int:
    """How many calls wait for the engine's thread."""
    return engine._calls.qsize()


async def follow(engine: AsyncLLM, prompt: list[int], request_id: str | None = None, **settings: Any) -> list[int]:
    tokens: list[int] = []
    async for output in engine.generate(prompt, greedy(output_kind=DELTA, **settings), request_id=request_id):
        tokens += output.outputs[0].token_ids
    return tokens


def test_async_requests_run_together_and_leaving_one_ends_it() -> None:
    engine = start()

    async def leave() -> None:
        async for _ in engine.generate([3], greedy(max_tokens=400, output_kind=DELTA)):
            return

    async def main() -> None:
        results = await asyncio.gather(*(follow(engine, [i, i + 1], max_tokens=20) for i in range(9)), leave())
        for i, tokens in enumerate(results[:9]):
            assert tokens == expected([i, i + 1], 20)
        with pytest.raises(ValueError, match="n must"):
            await follow(engine, [1], n=0)
        with pytest.raises(ValueError, match="max_model_len"):
            await follow(engine, [1] * 600)

    asyncio.run(main())
    engine.shutdown()
    assert engine.get_stats()["num_running"] == 0


@pytest.mark.parametrize("failure", [ZeroDivisionError(), SystemExit(3)])
def test_a_failed_engine_thread_tells_everyone(monkeypatch: pytest.MonkeyPatch, failure: BaseException) -> None:
    engine = start()

    def fail() -> None:
        raise failure

    monkeypatch.setattr(engine._client.engine, "compute", fail)

    async def main() -> None:
        with pytest.raises(RuntimeError, match=f"engine failed: {type(failure).__name__}"):
            await follow(engine, [1])
        with pytest.raises(RuntimeError, match="engine failed"):
            await follow(engine, [1])

    asyncio.run(main())


def test_leaving_ends_the_request_before_aclose_returns() -> None:
    engine = start()

    async def main() -> None:
        outputs = engine.generate([3], greedy(max_tokens=500, output_kind=DELTA))
        await anext(outputs)
        await outputs.aclose()
        assert engine.get_stats()["num_running"] == 0

    asyncio.run(main())
    engine.shutdown()


def test_one_cancelled_while_it_is_added_does_not_run() -> None:
    engine = start()
    gate, held = Gate(engine), threading.Event()
    engine._calls.put((held.wait, Future()))  # type: ignore[arg-type]  # so that two are added before the first step

    async def main() -> None:
        await until(lambda: queued(engine) == 0)  # the engine's thread is held
        first = asyncio.create_task(follow(engine, [1], max_tokens=20))
        second = asyncio.create_task(follow(engine, [2], max_tokens=400))
        await until(lambda: queued(engine) == 2)
        held.set()
        await until(gate.reached.is_set)
        third = asyncio.create_task(follow(engine, [3], max_tokens=400))
        await until(lambda: queued(engine) == 1)
        second.cancel(), third.cancel()
        await until(lambda: queued(engine) == 3)
        gate.opened.set()
        assert await first == expected([1], 20)
        await asyncio.gather(second, third, return_exceptions=True)

    asyncio.run(main())
    engine.shutdown()
    assert idle(engine) and engine.get_stats()["num_generation_tokens"] < 50


def test_the_loop_goes_on_while_a_step_runs() -> None:
    engine = start()
    gate = Gate(engine)

    async def main() -> None:
        running = asyncio.create_task(follow(engine, [1]))
        await until(gate.reached.is_set)
        waiting = [asyncio.create_task(engine.abort("nobody")), asyncio.create_task(engine.reset_prefix_cache())]
        await until(lambda: queued(engine) == 2)  # were it to wait for the step, nobody would open the gate
        assert not any(each.done() for each in (running, *waiting))
        gate.opened.set()
        await asyncio.gather(running, *waiting)

    asyncio.run(main())
    engine.shutdown()


def test_an_id_is_free_again_although_the_last_output_was_not_read() -> None:
    engine = start()

    async def main() -> None:
        slow = engine.generate([3], greedy(max_tokens=3, output_kind=DELTA), request_id="a")
        await anext(slow)
        await until(lambda: not engine._followers)
        gate = Gate(engine)
        again = asyncio.create_task(follow(engine, [5], request_id="a", max_tokens=400))
        await until(lambda: engine._followers)
        assert len([output async for output in slow]) == 2
        gate.opened.set()
        assert await again == expected([5], 400)

    asyncio.run(main())
    engine.shutdown()
    assert idle(engine)


def test_an_id_in_use_is_refused_and_its_request_goes_on() -> None:
    engine = start()
    gate = Gate(engine, until_output=True)

    async def main() -> None:
        running = engine.generate([3], greedy(max_tokens=100, output_kind=DELTA), request_id="a")
        tokens = list((await anext(running)).outputs[0].token_ids)  # it runs on when the other has asked
        other = asyncio.ensure_future(follow(engine, [5], request_id="a"))
        await until(lambda: queued(engine) or other.done())
        gate.opened.set()
        with pytest.raises(ValueError, match="in use"):
            await other
        tokens += [token async for output in running for token in output.outputs[0].token_ids]
        assert tokens == expected([3], 100)

    asyncio.run(main())
    engine.shutdown()


def test_a_loop_that_was_closed_ends_its_request_and_nobody_elses() -> None:
    engine = start()
    gate = Gate(engine, until_output=True)
    loop = asyncio.new_event_loop()
    outputs = engine.generate([3], greedy(max_tokens=400, output_kind=DELTA))
    loop.run_until_complete(anext(outputs))  # type: ignore[arg-type]
    loop.close()
    loop.is_closed = lambda: False  # type: ignore[method-assign]  # closed just after it was asked
    gate.opened.set()
    assert asyncio.run(follow(engine, [5, 6], max_tokens=20)) == expected([5, 6], 20)
    engine.shutdown()
    assert idle(engine)
    del loop.is_closed  # the interpreter asks it when it clears up


def test_shutdown_tells_all_loops_and_refuses_new_requests() -> None:
    engine = start()
    gate, failures = Gate(engine), []

    def run(prompt: list[int]) -> None:
        with pytest.raises(RuntimeError, match="shut down") as failed:
            asyncio.run(follow(engine, prompt, max_tokens=400))
        failures.append(failed)

    threads = [threading.Thread(target=run, args=([i],)) for i in range(3)]
    for thread in threads:
        thread.start()
    gate.reached.wait()
    while len(engine._followers) + queued(engine) < 3:  # all have asked; one at least is added
        time.sleep(0.001)
    stopping = threading.Thread(target=engine.shutdown)
    stopping.start()
    while not engine._closed:
        time.sleep(0.001)
    gate.opened.set()
    for thread in (stopping, *threads):
        thread.join()
    assert len(failures) == 3 and idle(engine)
    asyncio.run(engine.abort("nobody"))
    engine.shutdown()


def test_the_callers_params_may_change_while_the_request_runs() -> None:
    engine = start()

    async def main() -> None:
        params = greedy(max_tokens=30, logprobs=1, output_kind=DELTA)
        outputs = engine.generate([3], params)
        await anext(outputs)
        params.logprobs = None
        assert all([output.outputs[0].logprobs async for output in outputs])

    asyncio.run(main())
    engine.shutdown()
