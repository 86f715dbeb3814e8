"""Whole engines on the fake device that sleep, wake, and capture ahead: tokens, memory, and what is said."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from quintet import SamplingParams
from quintet.chat.prompts import Prompt
from quintet.config import EngineConfig
from quintet.engine.client import EngineClient
from quintet.interface.platform import Capabilities
from quintet.interface.types import Memory
from quintet.platforms import SelectedPlatform
from quintet.platforms.gpu import memory
from quintet.platforms.gpu.capture_sizes import decode_sizes, mixed_sizes
from quintet_tools.checkpoints.tiny import PLAIN, Tiny, make, variant
from tests.platforms.gpu.fake_torch import FakeGPU, FakeRuntime, fake_platform

Make = Callable[..., tuple[EngineClient, FakeRuntime]]
SETTINGS: dict[str, Any] = {"max_model_len": 64, "num_pages": 40, "max_num_seqs": 8}


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> Make:
    """Makes an engine, and the device it is on."""

    def made(tiny: Tiny | None = None, **settings: Any) -> tuple[EngineClient, FakeRuntime]:
        platform: type[FakeGPU] = type(fake_platform())
        facts = platform.probe()
        assert isinstance(facts, Capabilities)
        monkeypatch.setattr("quintet.engine.startup.choose", lambda name: SelectedPlatform(platform, facts, "a test"))
        config = EngineConfig.from_kwargs(
            model=str((tiny or variant("llama", "plain")).folder), device="fake", skip_tokenizer_init=True,
            dtype="float32", **{**SETTINGS, **settings},
        )  # fmt: skip
        return EngineClient(config, progress=False), platform._fake

    return made


def tokens(client: EngineClient, count: int = 3) -> list[list[int]]:
    """Of requests that decode together."""
    params = SamplingParams(temperature=0, max_tokens=9, detokenize=False, ignore_eos=True)
    for name in range(count):
        client.add(str(name), Prompt([5 + name, 6, 7]), params)
    found = {}
    while client.busy:
        found.update({each.request_id: list(each.outputs[0].token_ids) for each in client.step() if each.finished})
    return [found[str(name)] for name in range(count)]


@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize("settings", [{}, {"quantization": "int8"}, {"tensor_parallel_size": 2}], ids=str)
def test_asleep_its_memory_is_free_and_awake_it_goes_on(level: int, settings: dict[str, Any], client: Make) -> None:
    tiny = make("llama", {**PLAIN, "num_attention_heads": 4, "num_key_value_heads": 2})
    engine, fake = client(tiny, warm_up=False, **settings)
    before, used, captures = tokens(engine), fake.used(), fake.captures
    freed = engine.engine.sleep(level)
    assert 0 < freed <= used - fake.used() and fake.used() < used / 20
    assert "release" in fake.calls, "what torch keeps was given back to the device"
    engine.wake_up()
    assert tokens(engine) == before and fake.captures == 2 * captures, "graphs hold addresses"
    assert fake.used() == used


def test_level_two_puts_nothing_aside(client: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, _ = client()
    monkeypatch.setattr(memory, "host_memory", lambda: Memory(1000, 2000, 0))
    before = tokens(engine)
    with pytest.raises(MemoryError, match=r"weights aside needs .* GiB of host memory, 0.00 GiB are free; .* level 2"):
        engine.engine.sleep(1)
    assert engine.engine.asleep == 0 and tokens(engine) == before
    engine.engine.sleep(2)
    engine.wake_up()
    assert tokens(engine) == before


@pytest.mark.parametrize("level", [1, 2])
def test_who_took_its_memory_is_told_of_and_it_may_try_again(level: int, client: Make) -> None:
    engine, fake = client()
    before = tokens(engine)
    engine.engine.sleep(level)
    limit, fake.limit = fake.limit, fake.used() + 1000  # somebody has all but that; here it would be the host's memory
    said = "others took the memory that sleep released" if level == 1 else "a weight needs .* are free"
    with pytest.raises(MemoryError, match=said):
        engine.wake_up()
    assert engine.engine.asleep == level
    fake.limit = limit
    engine.wake_up()
    assert tokens(engine) == before


def test_fragments_are_noticed_and_all_sleeps_on(client: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sum is free, and one allocation finds no room."""
    engine, fake = client()
    before = tokens(engine)
    engine.engine.sleep(1)
    asleep, resize, calls = fake.used(), torch.UntypedStorage.resize_, list[int]()

    def refuse(self: torch.UntypedStorage, size: int) -> Any:
        calls.append(size)
        if len(calls) == 5:
            raise torch.OutOfMemoryError("out of memory")
        return resize(self, size)

    with monkeypatch.context() as patch, pytest.raises(MemoryError, match=r"waking needs .* \(out of memory\)"):
        patch.setattr(torch.UntypedStorage, "resize_", refuse)
        engine.wake_up()
    assert fake.used() == asleep
    engine.wake_up()
    assert tokens(engine) == before


def test_ahead_every_step_is_captured_before_a_request_comes(client: Make, caplog: pytest.LogCaptureFixture) -> None:
    settings: dict[str, Any] = {"max_num_seqs": 12, "max_num_batched_tokens": 40}
    lazy, _ = client(**settings)
    wanted = tokens(lazy, 7)
    with caplog.at_level("INFO", logger="quintet"):
        engine, fake = client(**settings, capture_ahead=True)
    sizes = engine.engine_plan.memory_plan.buckets
    assert [each.tokens for each in sizes if each.decode] == list(reversed(decode_sizes(12)))
    assert {each.tokens for each in sizes if not each.decode} == set(mixed_sizes(40))
    assert fake.captures == len(sizes) and f"captured {len(sizes)} steps ahead in" in caplog.text
    assert "captured a step of" not in caplog.text, "one line for all"
    assert tokens(engine, 7) == wanted and fake.captures == len(sizes) and fake.replays > 0
    engine.engine.sleep()
    engine.wake_up()
    assert fake.captures == 2 * len(sizes)


def test_ahead_reaches_as_far_as_requests_may_grow(client: Make) -> None:
    engine, fake = client(max_model_len=128, page_size=1, num_pages=600, max_num_seqs=2, capture_ahead=True)
    steps = engine.engine_plan.memory_plan.captured_ahead
    assert (
        max(each.tokens for each in steps) == 512 < max(each.tokens for each in engine.engine_plan.memory_plan.buckets)
    )
    assert fake.captures == len(steps) and {each.pages for each in steps} == {(64,), (128,)}
    assert sum(each.decode for each in steps) == 2 * 2, "two sizes, page tables of 64 and of 256 columns"
    params = SamplingParams(temperature=0, max_tokens=100, detokenize=False, ignore_eos=True)
    engine.add("long", Prompt([5, 6, 7]), params)
    while engine.busy:
        engine.step()
    assert fake.captures == len(steps) and fake.replays >= 90


@pytest.mark.slow
def test_what_is_captured_has_its_place_in_the_plan(client: Make) -> None:
    plans = {}
    for name, settings in {
        "none": {"enforce_eager": True}, "lazy": {}, "more": {"max_num_seqs": 256}, "ahead": {"capture_ahead": True}
    }.items():  # fmt: skip
        engine, fake = client(**{"num_pages": None, "enable_prefix_caching": False, **settings})
        plans[name] = engine.engine_plan.memory_plan
        assert engine.config.enforce_eager or "captured steps" in str(plans[name])
    sizes = {name: plan.model_memory.estimate.captured for name, plan in plans.items()}
    assert sizes["none"] == 0 < sizes["lazy"] == sizes["ahead"] < sizes["more"]


def test_ahead_where_nothing_is_captured_says_so(client: Make) -> None:
    with pytest.raises(ValueError, match="enforce_eager=True captures nothing"):
        client(enforce_eager=True, capture_ahead=True)


def test_weights_go_aside_through_pieces_of_pinned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A piece is not written again before it was read."""
    monkeypatch.setattr(memory, "CHUNK", 100)
    fake = FakeRuntime()
    tagged = memory.TaggedMemory(fake, 0)
    sizes = (0, 1, 99, 100, 101, 1000, 1001)
    weights = [torch.randint(0, 255, (size,), dtype=torch.uint8) for size in sizes]
    wanted = [each.clone() for each in weights]
    tagged.track("weights", weights)
    copies = fake.copies
    assert tagged.sleep(1) == sum(sizes) and fake.copies - copies == 0 + 1 + 1 + 1 + 2 + 10 + 11
    assert all(each.untyped_storage().nbytes() == 0 for each in weights)
    tagged.wake()
    assert all(map(torch.equal, weights, wanted))
