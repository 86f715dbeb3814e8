"""An engine on the fake device warms up before the first request, and leaves nothing of it behind."""

from pathlib import Path
from typing import Any

import pytest
import torch

from quintet.chat.prompts import Prompt
from quintet.cli.commands import serve
from quintet.config import EngineConfig
from quintet.config.schema import flags
from quintet.engine import startup as start
from quintet.engine.client import EngineClient
from quintet.engine.executor.model_runner import ModelRunner
from quintet.engine.memory_planner import NUM_USUAL_WIDTHS
from quintet.engine.sampling.logits_processors import BatchUpdate, LogitsProcessor
from quintet.engine.step_plan import StepPlan
from quintet.platforms.gpu.capture_sizes import decode_sizes
from quintet.pooling_params import PoolingParams
from quintet.sampling_params import SamplingParams
from quintet_tools.checkpoints.tiny import EVERY, PLAIN, make, variant
from tests.helpers.checkpoints.adapter_files import adapter_request
from tests.helpers.platforms.null_engine import null_client
from tests.platforms.gpu.test_sleep import Make, client, tokens

__all__ = ["client"]  # a fixture
FIRST = {key: next(iter(EVERY[key])) for key in ("llama", "mamba2", "lfm2", "gemma2")}


def drawn(engine: EngineClient) -> list[int]:
    """The tokens of a request that gives no seed."""
    params = SamplingParams(temperature=1.0, max_tokens=9, detokenize=False, ignore_eos=True)
    engine.add("drawn", Prompt([5, 6, 7]), params)
    found: list[int] = []
    while engine.busy:
        for each in engine.step():
            found = list(each.outputs[0].token_ids)
    return found


def test_graphs_are_there_before_the_first_request_and_it_captures_none(client: Make) -> None:
    engine, fake = client()
    before = fake.captures
    assert before == 2, "a prompt, and a token"
    engine.add("0", Prompt(list(range(40))), SamplingParams(temperature=0, max_tokens=9, detokenize=False))
    while engine.busy:
        engine.step()
    assert fake.captures == before and fake.replays >= 9
    cold, fake = client(warm_up=False)
    assert fake.captures == fake.replays == 0
    assert tokens(cold) == tokens(engine)


def test_steps_with_adapters_are_there_before_the_first_request_too(client: Make, tmp_path: Path) -> None:
    tiny = variant("llama", "plain")
    engine, fake = client(tiny, enable_lora=True, max_lora_rank=4)
    before = fake.captures
    assert before == 4, "a prompt and a token, without adapters and with them"
    request, params = adapter_request(tiny, tmp_path, 1), SamplingParams(temperature=0, max_tokens=9, detokenize=False)
    for number, lora in enumerate((None, engine.adapters.reference(request))):
        engine.add(str(number), Prompt(list(range(40)), lora=lora), params)
        while engine.busy:
            engine.step()
    assert fake.captures == before and fake.replays >= 18


@pytest.mark.parametrize("family", FIRST)
@pytest.mark.parametrize("settings", [{}, {"kv_events_config": {"enable_kv_cache_events": False}}], ids=len)
def test_nothing_is_left_behind(family: str, settings: dict[str, Any], client: Make) -> None:
    """Counters, cache, metrics and random numbers are those of an engine that did not warm up, and so are tokens."""
    tiny = variant(family, FIRST[family])
    random = torch.get_rng_state()
    cold, warm = (client(tiny, warm_up=warm_up, seed=3, **settings)[0] for warm_up in (False, True))
    assert torch.equal(torch.get_rng_state(), random)
    assert warm.engine.stats() == cold.engine.stats()
    pool = warm.engine.scheduler.pool
    assert pool.num_used == 0 and pool.num_free == cold.engine.scheduler.pool.num_free
    assert warm.engine._num_added == 0 and not warm.engine._answers.requests and warm.next_id() == "0"
    assert warm.metrics() == cold.metrics()
    assert tokens(warm) == tokens(cold) and drawn(warm) == drawn(cold)
    assert warm.engine.stats() == cold.engine.stats()
    warm.engine.check_integrity()


def test_ranks_warm_up_together(client: Make) -> None:
    tiny = make("llama", {**PLAIN, "num_attention_heads": 4, "num_key_value_heads": 2})
    shared, alone = (client(tiny, tensor_parallel_size=size)[0] for size in (2, 1))
    assert tokens(shared) == tokens(alone)


class Seen(LogitsProcessor):
    """Notes whom it is told of."""

    updates: list[Any] = []

    def is_argmax_invariant(self) -> bool:
        return False

    def update(self, update: BatchUpdate | None) -> None:
        self.updates.append(update)

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        return logits


def test_processors_of_users_are_not_told_of_it(client: Make) -> None:
    Seen.updates.clear()
    engine, fake = client(logits_processors=[Seen])
    assert not Seen.updates and fake.captures == 2
    tokens(engine)
    assert Seen.updates


def test_one_that_fails_is_logged_and_requests_are_served(
    client: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    forward, calls = ModelRunner.forward, list[int]()

    def fails(self: ModelRunner, plan: StepPlan) -> Any:
        calls.append(1)
        if len(calls) == 1:
            raise torch.OutOfMemoryError("no room")
        return forward(self, plan)

    monkeypatch.setattr(ModelRunner, "forward", fails)
    engine, _ = client()
    assert "users may fail alike: OutOfMemoryError: no room" in caplog.text and "warmed up" not in caplog.text
    wanted, _ = client(warm_up=False)
    assert tokens(engine) == tokens(wanted)


def test_a_pooling_model_runs_one_text(client: Make) -> None:
    cold, warm = (client(runner="pooling", warm_up=warm_up) for warm_up in (False, True))
    assert cold[1].captures == 0 < warm[1].captures
    found = []
    for engine, _ in (cold, warm):
        engine.add("text", Prompt([5, 6, 7]), PoolingParams())
        while engine.busy:
            found += [each.outputs for each in engine.step() if each.finished]
    assert str(found[0]) == str(found[1])
    assert warm[0].engine.stats() == cold[0].engine.stats()


def test_a_platform_that_compiles_no_kernel_late_runs_no_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: Any) -> None:
        raise AssertionError("a platform that has its kernels, or compiles them for fixed sizes")

    monkeypatch.setattr(start, "warm_up", never)
    assert null_client().engine.stats().steps.num_steps == 0


# ------------------------------------------------------------------------------------------ decode steps, by `serve`


def test_decode_steps_are_captured_before_a_request_comes(client: Make, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="quintet"):
        engine, fake = client(max_num_seqs=12, capture_decode_ahead=True, warm_up=False)
    sizes = decode_sizes(12)
    assert fake.captures == len(sizes) and f"captured {len(sizes)} steps ahead in" in caplog.text
    wanted = tokens(client(max_num_seqs=12)[0], 7)
    assert tokens(engine, 7) == wanted
    prompts = fake.captures - len(sizes)
    assert 0 < prompts <= 2, "steps with prompts are captured when they come, and no decode step is"
    engine.engine.sleep()
    engine.wake_up()
    assert fake.captures == prompts + 2 * len(sizes)


def test_they_are_those_of_requests_of_a_usual_length(client: Make) -> None:
    settings: dict[str, Any] = {"max_model_len": 2000, "page_size": 1, "num_pages": 4100, "max_num_seqs": 2}
    tiny = make("llama", {**PLAIN, "max_position_embeddings": 2048})
    engine, fake = client(tiny, **settings, capture_decode_ahead=True, warm_up=False)
    widths = {each.pages for each in engine.engine_plan.memory_plan.buckets if each.decode}
    assert widths == {(64,), (256,), (1024,), (2000,)} and fake.captures == 2 * NUM_USUAL_WIDTHS


def settled(*argv: str) -> EngineConfig:
    parser = flags.Parser()
    serve.add_arguments(parser)
    return serve._settings(parser.parse(argv))[1]


def test_serve_captures_them_and_others_do_not() -> None:
    assert settled().capture_decode_ahead is True
    assert settled("--no-capture-decode-ahead").capture_decode_ahead is False
    assert EngineConfig().capture_decode_ahead is False


def test_eager_steps_are_captured_by_no_setting(client: Make) -> None:
    _, fake = client(enforce_eager=True, capture_decode_ahead=True)
    assert fake.captures == 0
