"""Pauses: no step starts, requests end, finish or stand still, and what comes meanwhile waits; on the null platform."""

import asyncio
from typing import Any

import pytest

from quintet import LLM, AsyncLLM
from quintet.chat.prompts import Prompt
from quintet.engine.client import EngineClient
from quintet.engine.weight_transfer import orders
from quintet.outputs import RequestOutput
from tests.helpers.platforms.null_engine import complete, expected, folder, greedy, null_client

PROMPT = list(range(40))
OTHER = list(range(7, 40))


def steps(client: EngineClient, count: int) -> dict[str, RequestOutput]:
    """The last output of each request in so many steps."""
    found = {}
    for _ in range(count):
        for output in client.step():
            found[output.request_id] = output
    return found


def tokens(output: RequestOutput) -> list[int]:
    return list(output.outputs[0].token_ids)


def test_requests_that_are_kept_go_on_where_they_stood() -> None:
    client = null_client()
    client.add("a", Prompt(PROMPT), greedy(max_tokens=20))
    steps(client, 6)
    assert client.engine.controls.run(orders.PauseCommand("keep"))
    client.collect()
    before = client.engine.stats().steps.num_steps
    client.add("b", Prompt(OTHER), greedy(max_tokens=5))
    assert steps(client, 3) == {} and client.engine.stats().steps.num_steps == before
    assert client.engine.stats().weights.paused == 1 and client.busy
    client.engine.controls.run(orders.ResumeCommand())
    done = steps(client, 30)
    assert tokens(done["a"]) == expected(PROMPT, 20) and tokens(done["b"]) == expected(OTHER, 5)
    client.engine.check_integrity()


def test_requests_that_are_aborted_end_with_the_tokens_that_they_have() -> None:
    client = null_client()
    client.add("a", Prompt(PROMPT), greedy(max_tokens=20))
    steps(client, 6)
    client.engine.controls.run(orders.PauseCommand("abort"))
    (output,) = client.collect()
    assert output.finished and output.outputs[0].finish_reason == "abort"
    assert 0 < len(tokens(output)) < 20 and tokens(output) == expected(PROMPT, 20)[: len(tokens(output))]
    client.add("b", Prompt(PROMPT), greedy(max_tokens=5))
    assert steps(client, 3) == {}
    client.engine.controls.run(orders.ResumeCommand())
    queries = client.engine.stats().scheduler.prefix_hits
    assert tokens(steps(client, 20)["b"]) == expected(PROMPT, 5)
    assert client.engine.stats().scheduler.prefix_hits == queries, "clear_cache: nothing was found"


def test_requests_that_are_ended_by_name_leave_the_others_running() -> None:
    client = null_client()
    client.add("a", Prompt(PROMPT), greedy(max_tokens=20))
    client.add("b", Prompt(OTHER), greedy(max_tokens=20))
    steps(client, 6)
    assert client.engine.controls.run(orders.EndRequestsCommand(["a", "nothing"])) == 1
    done = steps(client, 30)
    assert done["a"].outputs[0].finish_reason == "abort" and 0 < len(tokens(done["a"])) < 20
    assert tokens(done["b"]) == expected(OTHER, 20)
    client.add("c", Prompt(PROMPT), greedy(max_tokens=20))
    client.add("d", Prompt(OTHER), greedy(max_tokens=20))
    assert client.engine.controls.run(orders.EndRequestsCommand()) == 2
    assert {output.outputs[0].finish_reason for output in client.collect()} == {"abort"} and not client.busy
    client.engine.check_integrity()


def test_waiting_lets_requests_finish_and_starts_no_others() -> None:
    client = null_client()
    client.add("a", Prompt(PROMPT), greedy(max_tokens=10))
    steps(client, 2)
    assert client.engine.controls.run(orders.PauseCommand("wait")) is False
    client.add("b", Prompt(OTHER), greedy(max_tokens=5))
    done: dict[str, RequestOutput] = {}
    while not client.engine.controls.run(orders.PauseCommand("wait")):
        done |= steps(client, 1)
    done |= {output.request_id: output for output in client.collect()}
    assert list(done) == ["a"] and tokens(done["a"]) == expected(PROMPT, 10)
    assert steps(client, 3) == {}
    client.engine.controls.run(orders.ResumeCommand())
    assert tokens(steps(client, 20)["b"]) == expected(OTHER, 5)


def test_running_requests_are_computed_again_if_asked() -> None:
    client = null_client()
    client.add("a", Prompt(PROMPT), greedy(max_tokens=20))
    steps(client, 6)
    before = client.engine.stats().steps.num_prompt_tokens
    client.engine.controls.run(orders.RecomputeCommand())
    done = steps(client, 40)
    assert tokens(done["a"]) == expected(PROMPT, 20)
    assert client.engine.stats().steps.num_prompt_tokens == before + len(PROMPT)
    assert done["a"].outputs[0].finish_reason == "length"


def test_aborting_a_request_that_waits_for_the_end_of_a_pause() -> None:
    client = null_client()
    client.engine.controls.run(orders.PauseCommand("keep"))
    client.add("a", Prompt(PROMPT), greedy())
    client.abort(["a"])
    assert not client.busy
    client.engine.controls.run(orders.ResumeCommand())
    assert list(complete(client, PROMPT, greedy()).outputs[0].token_ids) == expected(PROMPT, 8)


def test_a_thread_that_paused_is_refused_what_it_would_wait_for_for_ever() -> None:
    with LLM(str(folder()), device="null", load_format="dummy", skip_tokenizer_init=True, use_tqdm=False) as llm:
        prompt: Any = {"prompt_token_ids": PROMPT}
        with pytest.raises(ValueError, match="mode is abort, wait or keep, not 'soon'"):
            llm.pause("soon")  # type: ignore[arg-type]
        for mode in ("abort", "wait", "keep"):
            llm.pause(mode)  # type: ignore[arg-type]
            assert llm.is_paused()
            with pytest.raises(ValueError, match=r"the engine is paused, and no step runs; call resume\(\) first"):
                llm.generate(prompt, greedy())
            llm.resume()
            assert list(llm.generate(prompt, greedy())[0].outputs[0].token_ids) == expected(PROMPT, 8)
        assert llm.get_world_size() == 1 and llm.reset_prefix_cache(reset_running_requests=True)


def test_an_async_engine_pauses_while_streams_run() -> None:
    engine = AsyncLLM(str(folder()), device="null", load_format="dummy", skip_tokenizer_init=True)

    async def main() -> None:
        outputs = engine.generate(PROMPT, greedy(max_tokens=200))
        await anext(outputs)
        await engine.pause_generation(mode="keep")
        assert await engine.is_paused()
        other = asyncio.ensure_future(anext(engine.generate(OTHER, greedy())))
        await engine.resume_generation()
        assert tokens([each async for each in outputs][-1]) == expected(PROMPT, 200)
        assert (await other).outputs[0].token_ids
        await engine.pause_generation(mode="wait")
        await engine.resume_generation()

    asyncio.run(main())
    engine.shutdown()
