"""What one call adds: exact counts for streams and whole answers, for several completions, failures and ends."""

import asyncio
from collections.abc import AsyncIterator, Iterable
from dataclasses import replace
from typing import Any

import pytest

from quintet.chat.prompts import Prompt
from quintet.engine.observability.request_stats import RequestStats, RequestTimer
from quintet.outputs import CompletionOutput, RequestMetrics, RequestOutput
from quintet.sampling_params import RequestOutputKind, SamplingParams
from quintet.server.config import ServerConfig
from quintet.server.http.app_state import AppState
from quintet.server.http.engine_call import PromptRequest
from quintet.server.http.errors import ApiError, ClientGone
from quintet.server.metrics.prometheus import scrape
from tests.server.metrics.scrapes import STATS, TellingBackend, samples

STREAM, WHOLE = RequestOutputKind.DELTA, RequestOutputKind.FINAL_ONLY


@pytest.fixture
async def service() -> AsyncIterator[AppState]:
    yield AppState(TellingBackend(), ServerConfig())


def ask(kind: RequestOutputKind, prompt: int = 5, **fields: Any) -> PromptRequest:
    return asks(kind, range(40, 40 + prompt), **fields)[0]


def asks(kind: RequestOutputKind, *prompts: Iterable[int], **fields: Any) -> list[PromptRequest]:
    """Of one call: their parameters are the same."""
    params = SamplingParams(output_kind=kind, **fields)
    return [PromptRequest(Prompt(list(prompt)), params) for prompt in prompts]


async def run(service: AppState, *asks: PromptRequest) -> None:
    async with service.call(None, asks) as call:
        async for _ in call:
            pass


async def counts(service: AppState) -> dict[str, float]:
    return samples((await scrape(service)).decode())


@pytest.mark.parametrize("kind", [STREAM, WHOLE])
async def test_a_call_of_several_requests_and_completions_is_counted_exactly(
    service: AppState, kind: RequestOutputKind
) -> None:
    await run(service, *asks(kind, range(40, 45), range(40, 52), n=3, max_tokens=7))
    await run(service, ask(kind, prompt=3, max_tokens=1))
    found = await counts(service)
    assert found["vllm:request_success_total{finished_reason=length}"] == 7
    assert found["vllm:request_success_total{finished_reason=stop}"] == 0
    assert found["vllm:time_to_first_token_seconds_count"] == 3
    assert found["vllm:inter_token_latency_seconds_count"] == 2 * 3 * 6
    assert found["vllm:request_time_per_output_token_seconds_count"] == 2  # the last has one token
    assert found["vllm:e2e_request_latency_seconds_count"] == 3
    assert (found["vllm:request_prompt_tokens_count"], found["vllm:request_prompt_tokens_sum"]) == (3, 20)
    assert (found["vllm:request_generation_tokens_count"], found["vllm:request_generation_tokens_sum"]) == (7, 43)
    assert (found["vllm:request_params_n_count"], found["vllm:request_params_n_sum"]) == (3, 7)
    assert found["vllm:request_params_max_tokens_sum"] == 7 + 7 + 1
    preemptions = "vllm:request_num_preemptions"
    assert (found[f"{preemptions}_count"], found[f"{preemptions}_sum"]) == (3, 0)
    longest = "vllm:request_max_num_generation_tokens"
    assert (found[f"{longest}_count"], found[f"{longest}_sum"]) == (3, 7 + 7 + 1)
    assert found["vllm:request_prefill_kv_computed_tokens_sum"] == 20
    assert found["quintet:requests_aborted_total"] == found["quintet:requests_failed_total"] == 0


async def test_streamed_or_whole_the_times_mean_the_same(service: AppState) -> None:
    """The same tokens at the same times: each gap, or their mean as often."""
    backend = service.backend
    assert isinstance(backend, TellingBackend)
    await asyncio.gather(run(service, ask(STREAM, max_tokens=40)), run(service, ask(WHOLE, max_tokens=40)))
    found = await counts(service)
    whole, mean = found["vllm:inter_token_latency_seconds_sum"], found["vllm:request_time_per_output_token_seconds_sum"]
    assert found["vllm:inter_token_latency_seconds_count"] == 78
    assert whole == pytest.approx(39 * mean)
    assert 0 < whole + found["vllm:time_to_first_token_seconds_sum"]
    assert whole + found["vllm:time_to_first_token_seconds_sum"] <= found["vllm:e2e_request_latency_seconds_sum"] + 1e-9


@pytest.mark.parametrize("kind", [STREAM, WHOLE])
async def test_the_phases_of_a_request_add_up_to_its_latency(service: AppState, kind: RequestOutputKind) -> None:
    await run(service, ask(kind, n=2, max_tokens=30))
    await run(service, ask(kind, max_tokens=1))
    found = await counts(service)

    def sum_of(name: str) -> float:
        assert found[f"vllm:{name}_seconds_count"] == 2
        return found[f"vllm:{name}_seconds_sum"]

    queue, prefill, decode = sum_of("request_queue_time"), sum_of("request_prefill_time"), sum_of("request_decode_time")
    assert queue > 0 and prefill > 0 and decode > 0
    assert queue + prefill == pytest.approx(sum_of("time_to_first_token"))
    assert prefill + decode == pytest.approx(sum_of("request_inference_time"))
    assert queue + prefill + decode <= sum_of("e2e_request_latency") + 1e-9


async def test_what_was_found_in_the_cache_was_not_computed(service: AppState) -> None:
    assert isinstance(service.backend, TellingBackend)
    service.backend.cached = 3
    await run(service, *asks(STREAM, range(40, 45), range(40, 52), n=2, max_tokens=7))
    found = await counts(service)
    assert found["vllm:request_prefill_kv_computed_tokens_count"] == 2
    assert found["vllm:request_prefill_kv_computed_tokens_sum"] == 2 + 9


async def test_a_delta_of_several_tokens_shares_its_gap_out(service: AppState) -> None:
    assert isinstance(service.backend, TellingBackend)
    service.backend.burst = 4
    await run(service, ask(STREAM, max_tokens=12))
    found = await counts(service)
    assert found["vllm:inter_token_latency_seconds_count"] == 8  # those of the first delta have no gap
    assert found["vllm:request_generation_tokens_sum"] == 12


async def test_a_stop_is_told_from_an_end_of_length(service: AppState) -> None:
    assert isinstance(service.backend, TellingBackend)
    service.backend.reply = [50, 51]
    await run(service, ask(STREAM, max_tokens=9))
    await run(service, ask(WHOLE, max_tokens=2))
    found = await counts(service)
    assert found["vllm:request_success_total{finished_reason=stop}"] == 1
    assert found["vllm:request_success_total{finished_reason=length}"] == 1


@pytest.mark.parametrize("kind", [STREAM, WHOLE])
async def test_a_failure_is_counted_once_and_as_nothing_else(service: AppState, kind: RequestOutputKind) -> None:
    assert isinstance(service.backend, TellingBackend)
    service.backend.fail_at = 2
    with pytest.raises(ApiError):
        await run(service, ask(kind, n=2, max_tokens=9))
    found = await counts(service)
    assert found["quintet:requests_failed_total"] == 1
    assert found["quintet:requests_aborted_total"] == 0
    assert found["vllm:e2e_request_latency_seconds_count"] == found["vllm:request_generation_tokens_count"] == 0
    kinds = [name for name in found if name.startswith("vllm:request_success")]
    ends = {name.split("=")[1].rstrip("}"): found[name] for name in kinds}
    assert ends == {"stop": 0, "length": 0, "abort": 0, "error": 2, "repetition": 0}


@pytest.mark.parametrize("kind", [STREAM, WHOLE])
async def test_every_request_of_a_call_that_ends_early_is_aborted_once(
    service: AppState, kind: RequestOutputKind
) -> None:
    assert isinstance(service.backend, TellingBackend)
    service.backend.hang = 3
    prompts = range(40, 45), range(60, 65), range(60, 66)  # the fake says its prompt: the first ends by its third token
    call = service.call(None, asks(kind, *prompts, max_tokens=9, stop_token_ids=[42]))
    async with call:
        await call.peek()  # the first has ended, or the others wait by now
        while len(service.backend.running) > 2:
            await asyncio.sleep(0)
        call.fail(ClientGone())
    found = await counts(service)
    assert found["quintet:requests_aborted_total"] == 2
    assert found["vllm:request_success_total{finished_reason=stop}"] == 1
    assert found["vllm:request_success_total{finished_reason=abort}"] == 2
    assert found["vllm:e2e_request_latency_seconds_count"] == 1


async def test_an_abort_is_of_all_completions_that_had_not_ended(service: AppState) -> None:
    assert isinstance(service.backend, TellingBackend)
    service.backend.hang = 3
    call = service.call(None, [ask(STREAM, n=3, max_tokens=9)])
    async with call:
        await call.peek()
    found = await counts(service)
    assert found["quintet:requests_aborted_total"] == 1
    assert found["vllm:request_success_total{finished_reason=abort}"] == 3


async def test_what_the_engine_tells_is_shown_once_and_not_added_up(service: AppState) -> None:
    await run(service, ask(STREAM, max_tokens=5))
    found = await counts(service)
    assert found["vllm:generation_tokens_total"] == 50
    assert found["vllm:prompt_tokens_total"] == 156  # computed and cached
    assert (found["vllm:num_requests_running"], found["vllm:num_requests_waiting"]) == (3, 2)
    assert found["vllm:kv_cache_usage_perc"] == 0.25
    assert (found["quintet:kv_pages_used"], found["quintet:kv_pages_total"]) == (250, 1000)
    assert (found["vllm:prefix_cache_queries_total"], found["vllm:prefix_cache_hits_total"]) == (140, 40)
    assert (found["quintet:steps_total"], found["vllm:num_preemptions_total"]) == (70, 1)
    assert (found["quintet:step_tokens"], found["quintet:engine_up"]) == (9, 1)
    assert found["vllm:prompt_tokens_by_source_total{source=local_compute}"] == 100
    assert found["vllm:prompt_tokens_by_source_total{source=local_cache_hit}"] == 40
    assert found["vllm:prompt_tokens_by_source_total{source=external_kv_transfer}"] == 16
    assert found["vllm:prompt_tokens_cached_by_source_total{source=device}"] == 40
    assert found["vllm:prompt_tokens_cached_by_source_total{source=external_unspecified}"] == 16
    outside = [found[f"vllm:external_prefix_cache_{what}_total"] for what in ("queries", "hits")]
    assert outside == [90, 16]
    kept = [found[f"quintet:kv_pages_{what}_total"] for what in ("stored", "loaded", "failed")]
    assert kept == [7, 2, 1]
    assert found["quintet:expert_balancedness"] == 0.75
    assert (found["quintet:expert_placements_total"], found["quintet:experts_moved_total"]) == (4, 11)
    assert found["vllm:prompt_tokens_cached_total"] == 56
    assert found["vllm:num_requests_waiting_by_reason{reason=capacity}"] == 1
    assert found["vllm:num_requests_waiting_by_reason{reason=deferred}"] == 1
    steps = "vllm:iteration_tokens_total"
    assert (found[f"{steps}_bucket{{le=1.0}}"], found[f"{steps}_bucket{{le=512.0}}"]) == (60, 70)
    assert (found[f"{steps}_count"], found[f"{steps}_sum"]) == (70, 150)
    accepted = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
    assert (found[f"{accepted}{{position=0}}"], found[f"{accepted}{{position=1}}"]) == (5, 3)


@pytest.mark.parametrize(("level", "shown"), [(0, (1, 0, 0)), (1, (0, 1, 0)), (2, (0, 0, 1))])
async def test_the_state_of_sleep_is_shown_as_vllm_does(
    service: AppState, level: int, shown: tuple[int, int, int]
) -> None:
    assert isinstance(service.backend, TellingBackend)
    service.backend.told = replace(service.backend.told, asleep=level)
    found = await counts(service)
    states = ("awake", "weights_offloaded", "discard_all")
    assert tuple(found[f"vllm:engine_sleep_state{{sleep_state={each}}}"] for each in states) == shown


async def test_the_cache_is_described(service: AppState) -> None:
    text = (await scrape(service)).decode()
    (line,) = (line for line in text.splitlines() if line.startswith("vllm:cache_config_info{"))
    for label in (
        'engine="0"', 'model_name="fake/model"', 'block_size="16"', 'num_gpu_blocks="1000"',
        'kv_cache_size_tokens="16000"', 'cache_dtype="auto"', 'enable_prefix_caching="True"',
    ):  # fmt: skip
        assert label in line, label
    assert line.endswith("} 1.0")


async def test_an_idle_engine_has_no_tokens_in_its_step(service: AppState) -> None:
    assert isinstance(service.backend, TellingBackend)
    service.backend.told = replace(STATS, scheduler=replace(STATS.scheduler, num_running=0))
    assert (await counts(service))["quintet:step_tokens"] == 0


async def test_a_dead_engine_is_down(service: AppState) -> None:
    assert isinstance(service.backend, TellingBackend)
    service.backend.dead = "it is gone"
    assert (await counts(service))["quintet:engine_up"] == 0


def test_preemptions_of_a_request_are_in_its_histogram() -> None:
    stats = RequestStats()
    metrics = RequestMetrics(0.0, num_preemptions=2)
    done = CompletionOutput(0, "", [1], finish_reason="stop")
    RequestTimer(stats, SamplingParams()).record(RequestOutput("a", None, [1], None, [done], True, metrics=metrics))
    assert (stats.preemptions.sum, sum(stats.preemptions.counts)) == (2, 1)
