"""The engine on the null platform: who gets which tokens, when a request ends, and what a failure costs."""

import asyncio
from typing import Any

import pytest

from quintet import LLM, AsyncLLM, RequestOutputKind, SamplingParams
from quintet.engine.prompts import Prompt
from tests.helpers.null_engine import VOCAB, complete, drain, expected, folder, greedy, null_client


def test_tokens_are_the_platforms() -> None:
    output = complete(null_client(), [5, 6, 7], greedy())
    assert list(output.outputs[0].token_ids) == expected([5, 6, 7], 8)
    assert output.outputs[0].finish_reason == "length" and output.finished


@pytest.mark.parametrize(
    "settings",
    [
        {"max_num_batched_tokens": 5},
        {"num_pages": 13},
        {"enable_prefix_caching": False},
        {"max_num_seqs": 2},
        {"page_size": 4, "num_pages": 40},
        {"enable_chunked_prefill": False, "max_num_batched_tokens": 16},
    ],
    ids=str,
)
def test_settings_do_not_change_tokens(settings: dict[str, Any]) -> None:
    client = null_client(**{"max_model_len": 96, **settings})
    prompts = {str(i): [(i * 7 + j * 3) % VOCAB for j in range(5 + 9 * i)] for i in range(6)}
    for name, prompt in prompts.items():
        client.add(name, Prompt(prompt), greedy(max_tokens=30))
    outputs = drain(client)
    for name, prompt in prompts.items():
        assert list(outputs[name].outputs[0].token_ids) == expected(prompt, 30), name
    assert client.engine.scheduler.pool.num_used == 0


def test_a_stop_token_ends_and_stays() -> None:
    tokens = expected([9], 6)
    output = complete(null_client(), [9], greedy(stop_token_ids=[tokens[3]])).outputs[0]
    assert list(output.token_ids) == tokens[:4]
    assert (output.finish_reason, output.stop_reason) == ("stop", tokens[3])


def test_end_of_text_ends_unless_ignored() -> None:
    start = next(t for t in range(VOCAB) if 2 in expected([t], 20))
    at = expected([start], 20).index(2)
    output = complete(null_client(), [start], greedy(ignore_eos=False, max_tokens=20)).outputs[0]
    assert (len(output.token_ids), output.finish_reason, output.stop_reason) == (at + 1, "stop", None)
    output = complete(null_client(), [start], greedy(max_tokens=20)).outputs[0]
    assert (len(output.token_ids), output.finish_reason) == (20, "length")


def test_min_tokens_holds_a_stop_token_back() -> None:
    tokens = expected([9], 6)
    output = complete(null_client(), [9], greedy(stop_token_ids=[tokens[1]], min_tokens=5)).outputs[0]
    assert len(output.token_ids) >= 5 and tokens[1] not in output.token_ids[:5]


def test_output_ends_at_the_models_length() -> None:
    output = complete(null_client(max_model_len=32), list(range(30)), greedy(max_tokens=None)).outputs[0]
    assert (len(output.token_ids), output.finish_reason) == (2, "length")


def test_n_completions_share_the_prompt() -> None:
    client = null_client()
    output = complete(client, list(range(40)), greedy(n=3))
    assert [c.index for c in output.outputs] == [0, 1, 2]
    assert all(list(c.token_ids) == expected(list(range(40)), 8) for c in output.outputs)
    assert client.engine.stats().num_prompt_tokens < 60  # of 120


def test_an_abort_between_steps_ends_once_and_frees_pages() -> None:
    client = null_client()
    client.add("a", Prompt([1, 2, 3]), greedy(max_tokens=50))
    client.add("b", Prompt([4, 5, 6]), greedy(max_tokens=5))
    client.step()
    (last,) = client.abort(["a", "nobody"])
    assert last.finished and last.outputs[0].finish_reason == "abort"
    assert set(drain(client)) == {"b"} and client.engine.scheduler.pool.num_used == 0


def test_a_failing_step_ends_those_in_it_and_the_engine_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    client = null_client()
    good = client.engine._runner.run
    client.add("a", Prompt(list(range(40))), greedy())

    def fail(plan: Any) -> Any:
        raise RuntimeError("the device is on fire")

    monkeypatch.setattr(client.engine._runner, "run", fail)
    (output,) = client.step()
    assert output.outputs[0].finish_reason == "error" and "on fire" in (output.outputs[0].error or "")
    monkeypatch.setattr(client.engine._runner, "run", good)
    client.engine.check_integrity()
    again = complete(client, list(range(40)), greedy())
    assert list(again.outputs[0].token_ids) == expected(list(range(40)), 8)
    assert again.num_cached_tokens == 0


def test_reset_prefix_cache_forgets() -> None:
    client = null_client()
    complete(client, list(range(40)), greedy())
    assert complete(client, list(range(40)), greedy()).num_cached_tokens == 32
    client.engine.reset_prefix_cache()
    assert complete(client, list(range(40)), greedy()).num_cached_tokens == 0


def test_a_request_id_cannot_be_used_twice_at_once() -> None:
    client = null_client()
    client.add("a", Prompt([1]), greedy())
    with pytest.raises(ValueError, match="in use"):
        client.add("a", Prompt([1]), greedy())
    assert set(drain(client)) == {"a"}


def test_static_shapes_pad_and_results_do_not_change(monkeypatch: pytest.MonkeyPatch) -> None:
    from dataclasses import replace

    from quintet.platforms.null import PLATFORM

    facts = replace(PLATFORM.probe(), static_shapes=True)  # type: ignore[type-var]
    monkeypatch.setattr(PLATFORM, "probe", classmethod(lambda cls: facts))
    client = null_client(max_num_seqs=4, max_num_batched_tokens=24)
    shapes = set()
    ranks = client.prepared.ranks
    run = ranks.run
    monkeypatch.setattr(ranks, "run", lambda host: shapes.add(tuple(a.shape for a in host[:8])) or run(host))
    for i in range(5):
        client.add(str(i), Prompt(list(range(i, i + 11))), greedy(max_tokens=12))
    outputs = drain(client)
    for i in range(5):
        assert list(outputs[str(i)].outputs[0].token_ids) == expected(list(range(i, i + 11)), 12)
    assert {shape[0][0] for shape in shapes} <= {1, 2, 4, 8, 16, 24}
    assert {shape[6][1] for shape in shapes} == {8}  # every page table is as wide as the longest request


def llm(**settings: Any) -> LLM:
    return LLM(str(folder()), device="null", load_format="dummy", skip_tokenizer_init=True, use_tqdm=False, **settings)


def test_results_come_in_the_order_of_the_prompts() -> None:
    prompts = [[i] * (30 - 5 * i) for i in range(1, 6)]
    params = [greedy(max_tokens=3 * i) for i in range(1, 6)]
    outputs = llm().generate(prompts, params, use_tqdm=False)
    for prompt, each, output in zip(prompts, params, outputs, strict=True):
        assert list(output.outputs[0].token_ids) == expected(prompt, each.max_tokens or 0)


def test_generate_leaves_the_callers_params_alone_and_refuses_before_it_runs() -> None:
    engine, params = llm(), greedy(output_kind=RequestOutputKind.DELTA)
    engine.generate([[1, 2]], params, use_tqdm=False)
    assert params.output_kind is RequestOutputKind.DELTA
    with pytest.raises(ValueError, match="prompt 1"):
        engine.generate([[1], [VOCAB]], params)
    with pytest.raises(ValueError, match="max_model_len"):
        engine.generate([[1], [1] * 600], params)
    with pytest.raises(ValueError, match="2 entries for 1"):
        engine.generate([[1]], [params, params])
    assert engine.get_metrics()["num_waiting"] == engine.get_metrics()["num_running"] == 0


def test_streamed_deltas_join_to_the_whole_and_leaving_early_frees() -> None:
    engine = llm()
    parts = [output.outputs[0].token_ids for output in engine.stream([5, 6], greedy())]
    assert len(parts) == 8 and [t for part in parts for t in part] == expected([5, 6], 8)
    next(stream := engine.stream([5, 6], greedy(max_tokens=50)))
    stream.close()
    assert engine.get_metrics()["num_running"] == 0
    assert engine.generate([[5]], greedy(), use_tqdm=False)[0].finished


def test_a_text_prompt_without_a_tokenizer_says_so() -> None:
    with pytest.raises(ValueError, match="tokenizer"):
        llm().generate("hello", SamplingParams(detokenize=False))


async def follow(engine: AsyncLLM, prompt: list[int], **settings: Any) -> list[int]:
    tokens: list[int] = []
    async for output in engine.generate(prompt, greedy(output_kind=RequestOutputKind.DELTA, **settings)):
        tokens += output.outputs[0].token_ids
    return tokens


def test_async_requests_run_together_and_leaving_one_ends_it() -> None:
    engine = AsyncLLM(str(folder()), device="null", load_format="dummy", skip_tokenizer_init=True)

    async def leave() -> None:
        async for _ in engine.generate([3], greedy(max_tokens=400, output_kind=RequestOutputKind.DELTA)):
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
    assert engine.get_metrics()["num_running"] == 0


def test_a_failed_engine_thread_tells_everyone(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = AsyncLLM(str(folder()), device="null", load_format="dummy", skip_tokenizer_init=True)
    monkeypatch.setattr(engine._client.engine, "step", lambda: 1 / 0)

    async def main() -> None:
        with pytest.raises(RuntimeError, match="engine failed: ZeroDivisionError"):
            await follow(engine, [1])
        with pytest.raises(RuntimeError, match="shut down"):
            await follow(engine, [1])

    asyncio.run(main())
