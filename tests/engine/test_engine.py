"""The engine on the null platform: who gets which tokens, when a request ends, and what a failure costs."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from quintet import LLM, BeamSearchParams, RequestOutputKind, SamplingParams
from quintet.api.thread_sharing import SharedClient
from quintet.chat.prompts import Prompt
from quintet.engine.observability.stats import STEP_BOUNDS
from quintet.sampling_params import ParameterError
from tests.helpers.platforms.null_engine import VOCAB, CtrlC, complete, drain, expected, folder, greedy, null_client


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
    assert client.engine.stats().steps.num_prompt_tokens < 60  # of 120


def test_an_abort_between_steps_ends_once_and_frees_pages() -> None:
    client = null_client()
    client.add("a", Prompt([1, 2, 3]), greedy(max_tokens=50))
    client.add("b", Prompt([4, 5, 6]), greedy(max_tokens=5))
    client.step()
    (last,) = client.abort(["a", "nobody"])
    assert last.finished and last.outputs[0].finish_reason == "abort"
    assert set(drain(client)) == {"b"} and client.engine.scheduler.pool.num_used == 0


def test_an_id_is_free_again_after_an_abort() -> None:
    client = null_client()
    client.add("a", Prompt([1, 2, 3]), greedy())
    client.step()
    client.abort(["a"])
    client.add("a", Prompt([4, 5]), greedy())
    output = drain(client)["a"].outputs[0]
    assert (list(output.token_ids), output.finish_reason) == (expected([4, 5], 8), "length")


def test_prompt_logprobs_come_once_even_if_preempted() -> None:
    client = null_client(max_model_len=96, num_pages=9, enable_prefix_caching=False, max_num_batched_tokens=25)
    for name in "abc":
        client.add(name, Prompt([ord(name) - 90] * 30), greedy(max_tokens=40, prompt_logprobs=0))
    outputs = drain(client)
    assert client.engine.stats().scheduler.num_preemptions > 0
    for output in outputs.values():
        assert output.prompt_logprobs is not None and output.prompt_logprobs[0] is None
        assert [list(at or ()) for at in output.prompt_logprobs[1:]] == [[each] for each in output.prompt_token_ids[1:]]


def test_n_completions_compute_prompt_logprobs_once() -> None:
    client = null_client()
    output = complete(client, list(range(40)), greedy(n=3, prompt_logprobs=1))
    assert len(output.prompt_logprobs or ()) == 40
    assert client.engine.stats().steps.num_prompt_tokens == 40 + 2 * 8  # 32 of 40 are found by the others


def test_counters_tell_prompt_from_output() -> None:
    client = null_client(max_num_batched_tokens=7)
    complete(client, list(range(10)), greedy(max_tokens=5))
    stats = client.engine.stats()
    assert (stats.steps.num_prompt_tokens, stats.steps.num_generation_tokens) == (10, 5)


def test_a_failing_step_ends_those_in_it_and_the_engine_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    client = null_client()
    good = client.engine._runner.forward
    client.add("a", Prompt(list(range(40))), greedy())

    def fail(plan: Any) -> Any:
        raise RuntimeError("the device is on fire")

    monkeypatch.setattr(client.engine._runner, "forward", fail)
    (output,) = client.step()
    assert output.outputs[0].finish_reason == "error" and "on fire" in (output.outputs[0].error or "")
    monkeypatch.setattr(client.engine._runner, "forward", good)
    client.engine.check_integrity()
    again = complete(client, list(range(40)), greedy())
    assert list(again.outputs[0].token_ids) == expected(list(range(40)), 8)
    assert again.num_cached_tokens == 0


@pytest.fixture
def behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """The null platform says that it works behind the host."""
    from dataclasses import replace

    from quintet.platforms.null import PLATFORM

    facts = replace(PLATFORM.probe(), overlap=True)  # type: ignore[type-var]
    monkeypatch.setattr(PLATFORM, "probe", classmethod(lambda cls: facts))


def test_a_device_behind_the_host_gives_the_same(behind: None) -> None:
    """Each call starts the next step and returns what the last one gave."""
    client = null_client(max_num_seqs=3, max_num_batched_tokens=20, num_pages=20)
    prompts = {str(i): list(range(i, i + 9 + i)) for i in range(6)}
    for name, prompt in prompts.items():
        client.add(name, Prompt(prompt), greedy(max_tokens=6 + int(name)))
    assert client.step() == [], "the first step runs"
    outputs = drain(client)
    for name, prompt in prompts.items():
        assert list(outputs[name].outputs[0].token_ids) == expected(prompt, 6 + int(name))
    assert client.engine.scheduler.pool.num_used == 0


def test_a_request_taken_back_while_its_step_runs_is_forgotten(behind: None) -> None:
    client = null_client()
    for name in "ab":
        client.add(name, Prompt([1, 2, int(name, 16)]), greedy(max_tokens=9))
    client.step()
    assert [output.outputs[0].finish_reason for output in client.abort(["a"])] == ["abort"]
    client.add("a", Prompt([5, 6]), greedy(max_tokens=4))  # the same id again, before that step has come back
    outputs = drain(client)
    assert list(outputs["a"].outputs[0].token_ids) == expected([5, 6], 4)
    assert list(outputs["b"].outputs[0].token_ids) == expected([1, 2, 11], 9)
    assert client.engine.scheduler.pool.num_used == 0
    assert client.engine.stats().steps.num_generation_tokens == 13


def test_a_step_that_fails_behind_the_host_ends_those_in_it(behind: None, monkeypatch: pytest.MonkeyPatch) -> None:
    client = null_client()
    good = client.engine._runner.sample

    def fail() -> Any:
        raise RuntimeError("the device is on fire")

    monkeypatch.setattr(client.engine._runner, "sample", lambda forward: fail)
    client.add("a", Prompt(list(range(40))), greedy())
    assert client.step() == []
    client.add("b", Prompt(list(range(40))), greedy())
    monkeypatch.setattr(client.engine._runner, "sample", good)
    outputs = drain(client)
    assert outputs["a"].outputs[0].finish_reason == "error"
    assert list(outputs["b"].outputs[0].token_ids) == expected(list(range(40)), 8)
    assert client.engine.stats().steps.num_prompt_tokens == 40, "what the failed step should have written is not found"


def test_a_delta_that_nobody_saw_goes_with_its_request(behind: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C between a step's end and the next one's start; then the id is used again."""
    client = null_client()
    good = client.engine._runner.forward
    client.add("a", Prompt([5, 6, 7]), greedy(max_tokens=9))
    client.step()
    monkeypatch.setattr(client.engine._runner, "forward", interrupt)
    with pytest.raises(KeyboardInterrupt):
        client.step()
    monkeypatch.setattr(client.engine._runner, "forward", good)
    assert client.busy
    client.abort(["a"])
    assert not client.busy
    client.add("a", Prompt([8, 9]), greedy(max_tokens=4))
    assert list(drain(client)["a"].outputs[0].token_ids) == expected([8, 9], 4)


def test_plain_requests_pass_by_those_whose_scores_must_wait() -> None:
    client = null_client(max_num_seqs=256, max_num_batched_tokens=2048, max_model_len=512, num_pages=9000)
    for i in range(60):
        prompt = [(i + j) % 97 for j in range(500)]
        client.add(f"scored {i}", Prompt(prompt), greedy(max_tokens=1, prompt_logprobs=0))
    client.add("plain", Prompt([1, 2, 3]), greedy(max_tokens=1))
    done: dict[str, int] = {}
    while client.busy:
        for output in client.step():
            if output.finished:
                done[output.request_id] = client.engine.stats().steps.num_steps
    assert done["plain"] <= 2
    assert max(done.values()) <= 60 * 500 / 250


def interrupt(*_: object) -> Any:
    raise KeyboardInterrupt


def test_an_interrupted_step_leaves_nothing_in_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, prompt = llm(), list(range(40))
    other = engine.stream([prompt], greedy(max_tokens=30))
    got = list(next(other).outputs[0].token_ids)
    engine.reset_prefix_cache()
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(engine._client.engine._runner, "forward", interrupt)
        engine.generate([prompt], greedy(), use_tqdm=False)
    engine._client.engine.check_integrity()
    assert engine._client.engine.scheduler.pool.num_cached == 0
    got += [token for output in other for token in output.outputs[0].token_ids]
    assert got == expected(prompt, 30)  # its step was interrupted too, and it goes on
    assert engine.get_stats()["kv_usage"] == 0


def test_interrupted_adding_takes_back_what_was_added(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = llm()
    add: Callable[..., None] = engine._client.add
    monkeypatch.setattr(engine._client, "add", lambda *given: interrupt() if given[1].token_ids == [2] else add(*given))
    with pytest.raises(KeyboardInterrupt):
        engine.generate([[1], [2]], greedy(), use_tqdm=False)
    assert engine.get_stats()["num_waiting"] == 0


def test_what_ctrl_c_left_half_added_is_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its text side is there, and nothing counts its tokens yet."""
    client = null_client()
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("quintet.engine.client.RequestTimer", interrupt)
        client.add("only", Prompt([3]), greedy())
    (output,) = client.abort(["only"])
    assert output.finished and output.outputs[0].finish_reason == "abort" and len(client.output_processor) == 0
    complete(client, [3], greedy())
    assert not client._timers and client.request_stats.latency.sum > 0


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
    ranks = client.engine_plan.ranks
    run = ranks.run
    monkeypatch.setattr(
        ranks, "run", lambda host, carried: shapes.add(tuple(a.shape for a in host.leaves())) or run(host, carried)
    )
    for i in range(5):
        client.add(str(i), Prompt(list(range(i, i + 11))), greedy(max_tokens=12))
    outputs = drain(client)
    for i in range(5):
        assert list(outputs[str(i)].outputs[0].token_ids) == expected(list(range(i, i + 11)), 12)
    assert {shape[0][0] for shape in shapes} <= {16, 24}
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
    assert engine.get_stats()["num_waiting"] == engine.get_stats()["num_running"] == 0


def test_streamed_deltas_join_to_the_whole_and_leaving_early_frees() -> None:
    engine = llm()
    parts = [output.outputs[0].token_ids for output in engine.stream([5, 6], greedy())]
    assert len(parts) == 8 and [t for part in parts for t in part] == expected([5, 6], 8)
    next(stream := engine.stream([5, 6], greedy(max_tokens=50)))
    stream.close()
    assert engine.get_stats()["num_running"] == 0
    assert engine.generate([[5]], greedy(), use_tqdm=False)[0].finished


def test_calls_between_the_outputs_of_a_stream_take_nothing_from_it() -> None:
    engine = llm()
    first, second = engine.stream([5, 6], greedy(max_tokens=30)), engine.stream([7], greedy(max_tokens=3))
    got = {5: list(next(first).outputs[0].token_ids), 7: list(next(second).outputs[0].token_ids)}
    assert engine.generate([[1]], greedy(), use_tqdm=False)[0].outputs[0].token_ids == expected([1], 8)
    engine.beam_search([[1]], BeamSearchParams(beam_width=2, max_tokens=2))
    got[7] += [token for output in second for token in output.outputs[0].token_ids]
    got[5] += [token for output in first for token in output.outputs[0].token_ids]
    assert got == {5: expected([5, 6], 30), 7: expected([7], 3)}


def test_a_stream_that_nobody_reads_runs_nothing_and_one_that_is_left_keeps_nothing() -> None:
    engine = llm()
    engine.stream([5], greedy())
    assert engine.get_stats()["num_waiting"] == 0
    next(left := engine.stream([5], greedy(max_tokens=50)))
    engine.generate([[1]], greedy(), use_tqdm=False)
    left.close()
    assert not engine._shared._kept and not engine._client.busy


@pytest.mark.parametrize(
    ("settings", "prompt", "params", "says"),
    [
        ({}, [1], {"beam_width": 11}, "beam_width must be at most 10, not 11; the engine's max_logprobs=22"),
        ({}, [1], {"temperature": 0.5}, "temperature changes no score .*processed_logprobs"),
        ({"logprobs_mode": "raw_logits"}, [1], {}, "logprobs_mode='raw_logits' gives none"),
        ({"max_model_len": 32}, [1] * 32, {}, "the prompt has 32 tokens"),
    ],
)
def test_a_beam_search_that_cannot_be_says_why(
    settings: dict[str, Any], prompt: list[int], params: dict[str, Any], says: str
) -> None:
    with pytest.raises(ValueError, match=says):
        llm(**settings).beam_search([prompt], BeamSearchParams(**params))


def test_a_failed_step_is_not_a_beam_searchs_result(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = llm()
    monkeypatch.setattr(engine._client.engine._runner, "forward", lambda plan: 1 / 0)
    with pytest.raises(RuntimeError, match="beam search failed: ZeroDivisionError"):
        engine.beam_search([[1]], BeamSearchParams())
    assert not engine._client.busy


def test_a_text_prompt_without_a_tokenizer_says_so() -> None:
    with pytest.raises(ValueError, match="tokenizer"):
        llm().generate("hello", SamplingParams(detokenize=False))


def test_an_interruption_between_two_caches_loses_nothing() -> None:
    """Ctrl-C may come when the old cache was let go and the new one is not there yet."""
    client = null_client()
    wanted = complete(client, [3], greedy()).outputs[0].token_ids
    client.engine_plan.ranks.workers[0]._state = ()
    assert complete(client, [3], greedy()).outputs[0].token_ids == wanted
    assert len(client.engine_plan.ranks.workers[0]._state) == 2


@pytest.mark.parametrize("overlap", [False, True])
def test_ctrl_c_at_any_line_leaves_the_books_in_order(overlap: bool, request: pytest.FixtureRequest) -> None:
    """From the adding of a request to its end; then it is taken back, and the next one of its name is served."""
    if overlap:
        request.getfixturevalue("behind")
    client = null_client(page_size=4, max_num_batched_tokens=8)
    prompt, params = list(range(5, 14)), greedy(n=2, max_tokens=3)
    for at in range(0, 100_000, 17):  # all of them would take half a minute
        with CtrlC(at) as ctrl_c:
            client.add("only", Prompt(prompt), params)
            while client.busy:
                client.step()
        if not ctrl_c.came:
            break
        client.abort(["only"])
        client.engine.check_integrity()
        outputs = complete(client, prompt, params).outputs
        assert [list(each.token_ids) for each in outputs] == [expected(prompt, 3)] * 2, at
        assert client.engine.scheduler.pool.num_used == 0 and len(client.output_processor) == 0
        client.engine.reset_prefix_cache()
    assert at > 500


@pytest.mark.parametrize("overlap", [False, True])
def test_ctrl_c_in_one_stream_takes_nothing_from_another(overlap: bool, request: pytest.FixtureRequest) -> None:
    """Whichever line it meets: what a step gave the other is given out, once, and it ends."""
    if overlap:
        request.getfixturevalue("behind")
    client, params = null_client(page_size=4), greedy(max_tokens=4, output_kind=RequestOutputKind.DELTA)
    shared = SharedClient(client)
    wanted = expected([3, 4, 5], 4)
    for at in range(0, 100_000, 29):
        client.add("theirs", Prompt([3, 4, 5]), params)
        client.add("mine", Prompt([7]), params)
        with CtrlC(at) as ctrl_c:
            while not any(output.finished for output in shared.receive({"mine"})):
                pass
        shared.abort(["mine"])
        got: list[int] = []
        for _ in range(20):
            outputs = shared.receive({"theirs"})
            got += [token for output in outputs for token in output.outputs[0].token_ids]
            if outputs and outputs[-1].finished:
                break
        assert got == wanted, at
        client.engine.check_integrity()
        assert client.engine.scheduler.pool.num_used == 0 and len(client.output_processor) == 0
        client.engine.reset_prefix_cache()
        if not ctrl_c.came:
            break
    assert at > 200


def test_ctrl_c_after_a_stop_string_ends_the_engines_request_too() -> None:
    llm = LLM("bundled", device="null", load_format="dummy", use_tqdm=False)
    client = llm._client
    for at in range(0, 100_000, 37):
        with CtrlC(at) as ctrl_c:
            llm.generate("a", SamplingParams(temperature=0, max_tokens=60, stop=["e", "a", " "]))
        assert not client.busy and len(client.output_processor) == 0, at
        if not ctrl_c.came:
            break
    assert at > 100


def test_a_request_whose_tokens_are_all_banned_is_told_so() -> None:
    """Not that the weights may be at fault: whether any is left may depend on what was said."""
    client = null_client()
    [admitted] = client.input_processor.admit("a", Prompt([1]), greedy(temperature=1.0, seed=1, allowed_token_ids=[5]))
    client.engine.add(dataclasses.replace(admitted, bad_words_ids=((5, 5),)))
    deltas = []
    while client.engine.busy:
        deltas += client.engine.step()
    assert [each.token_ids for each in deltas] == [[5], []]
    assert deltas[-1].finish_reason == "error" and "no token is left to draw" in (deltas[-1].error or "")


@pytest.mark.parametrize(
    ("given", "blamed"),
    [
        ({"allowed_token_ids": [2], "ignore_eos": False, "min_tokens": 1}, "allowed_token_ids"),
        ({"allowed_token_ids": [5, 6], "stop_token_ids": [5, 6, 7], "min_tokens": 1}, "allowed_token_ids"),
        ({"stop_token_ids": list(range(97)), "min_tokens": 1}, "min_tokens"),
    ],
)
def test_parameters_that_leave_nothing_to_draw_are_refused(given: dict[str, Any], blamed: str) -> None:
    client = null_client()
    with pytest.raises(ParameterError, match=f"{blamed} leave no token to draw"):
        client.add("a", Prompt([1]), greedy(**given))
    client.add("b", Prompt([1]), greedy(**{**given, "min_tokens": 0}))


@pytest.mark.parametrize(
    ("settings", "steps"),
    [
        ({}, [75]),
        ({"long_prefill_token_threshold": 40}, [65, 10]),
        ({"max_num_partial_prefills": 2}, [10, *[5] * 8, 10]),  # 4% of 128: prompts of more than 5 tokens are long
        ({"max_num_partial_prefills": 2, "max_long_partial_prefills": 2}, [15, 10, 10, 10, 5]),
        ({"prefill_tokens_beside_decode": 8}, [75]),  # nothing decodes
    ],
)
def test_settings_of_long_prompts_reach_the_steps(settings: dict[str, Any], steps: list[int]) -> None:
    client = null_client(enable_prefix_caching=False, **settings)
    for name, length in {"long": 50, "other": 20, "short": 5}.items():
        client.add(name, Prompt([1] * length), greedy(max_tokens=1))
    found = []
    while client.busy:
        client.step()
        found.append(client.engine.stats().steps.step_tokens)
    assert found[: len(steps)] == steps


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"long_prefill_token_threshold": 200}, "beyond max_model_len=128"),
        (
            {"long_prefill_token_threshold": 8, "enable_chunked_prefill": False},
            "enable_chunked_prefill=False cuts none",
        ),
        ({"max_num_partial_prefills": 2, "max_long_partial_prefills": 3}, "more than max_num_partial_prefills=2"),
        ({"max_long_partial_prefills": 1}, "means nothing without long_prefill_token_threshold"),
        ({"stream_interval": 0}, "stream_interval must be at least 1"),
    ],
)
def test_settings_of_steps_that_mean_nothing_are_refused(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        null_client(**settings)


def test_a_stream_comes_in_the_interval_that_was_asked_for() -> None:
    engine = llm(stream_interval=4)
    outputs = [list(each.outputs[0].token_ids) for each in engine.stream([1], greedy(max_tokens=10))]
    assert [len(each) for each in outputs] == [1, 4, 4, 1] and sum(outputs, []) == expected([1], 10)


def test_a_request_knows_when_it_was_first_in_a_step() -> None:
    """The second waits for a place; preemption and a new start do not move the time."""
    client = null_client(max_num_seqs=1)
    for name in "ab":
        client.add(name, Prompt([5, 6, 7]), greedy(max_tokens=4))
    client.step()
    client.engine._start_over()
    first, second = (output.metrics for output in drain(client).values())
    for each in (first, second):
        assert each.arrival_time <= each.first_scheduled_time <= each.first_token_time <= each.last_token_time
        assert each.time_in_queue + each.prefill_time == pytest.approx(each.time_to_first_token)
        assert each.prefill_time + each.decode_time == pytest.approx(each.inference_time)
    assert first.finished_time <= second.first_scheduled_time


def test_of_several_completions_the_first_that_runs_ends_the_wait() -> None:
    client = null_client(max_num_seqs=1)
    client.add("a", Prompt([5, 6, 7]), greedy(n=3, max_tokens=2))
    scheduled = {output.metrics.first_scheduled_time for _ in range(6) for output in client.step()}
    assert len(scheduled) == 1 and not client.busy


def test_an_abort_before_the_first_step_has_no_times() -> None:
    client = null_client(max_num_seqs=1)
    client.add("a", Prompt([5]), greedy())
    (output,) = client.abort(["a"])
    times = output.metrics
    assert (times.first_scheduled_time, times.time_in_queue, times.prefill_time, times.decode_time) == (None,) * 4


def test_steps_are_counted_by_their_tokens() -> None:
    client = null_client(max_num_batched_tokens=32)
    client.add("a", Prompt(list(range(40))), greedy(max_tokens=3))
    client.add("b", Prompt([5]), greedy(max_tokens=3))
    drain(client)
    stats = client.engine.stats()
    by_bound = dict(zip((*STEP_BOUNDS, None), stats.steps.step_sizes, strict=False))
    assert by_bound[32] == 1 and by_bound[16] == 1  # a chunk of 32, then the other 8 and a token of b's
    assert sum(stats.steps.step_sizes) == stats.steps.num_steps and stats.steps.num_tokens == 40 + 1 + 2 + 2
    assert "step_sizes" not in client.metrics() and client.metrics()["num_steps"] == stats.steps.num_steps
