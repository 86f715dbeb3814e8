"""The ROCm platform on the fake device: whole engines, what it keeps in its own 8-bit type, and what it leaves out."""

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch

from quintet.config import EngineConfig
from quintet.engine.client import EngineClient
from quintet.interface.platform import Capabilities, Unavailable
from quintet.interface.types import RankInfo
from quintet.platforms import SelectedPlatform
from quintet.platforms.gpu import providers
from quintet.platforms.gpu.facts import GPUFacts
from quintet.platforms.gpu.fp8_fnuz import FN, FNUZ
from quintet.platforms.rocm import PLATFORM
from quintet.platforms.rocm.platform import ROCm
from quintet_tools.checkpoints.tiny import FAMILIES, PLAIN, Tiny, make, variant
from tests.e2e.engine.test_oracle import ENGINES, WIDE, mix, run
from tests.e2e.engine.test_oracle import client as cpu_client
from tests.platforms.gpu.fake_torch import GIB, FakeRuntime
from tests.platforms.gpu.test_platform import tokens
from tests.platforms.gpu.test_sleep import SETTINGS
from tests.platforms.gpu.test_sleep import tokens as decoded

Make = Callable[..., EngineClient]
DTYPES = torch.bfloat16, torch.float16, torch.float32


def fake_platform(fp8: torch.dtype | None = FNUZ) -> Any:
    """The platform itself on a fresh device of host memory, by torch alone."""

    class Fake(ROCm):
        op_priority = {}  # by torch alone
        _fake = FakeRuntime(GIB)

        @classmethod
        def _facts(cls) -> GPUFacts | Unavailable:
            return GPUFacts(("Fake", "Fake"), DTYPES, fp8, GIB, "2 x Fake")

        @classmethod
        def _make_runtime(cls) -> FakeRuntime:
            return cls._fake

        def _group(self, store: Any, rank: int, size: int) -> Any:
            return torch.distributed.ProcessGroupGloo(store, rank, size)

    return Fake


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> Make:
    """Makes an engine of that model on a class of platforms."""

    def made(tiny: Tiny, platform: Any, **settings: Any) -> EngineClient:
        facts = platform.probe()
        assert isinstance(facts, Capabilities)
        monkeypatch.setattr("quintet.engine.startup.choose", lambda name: SelectedPlatform(platform, facts, "a test"))
        config = EngineConfig.from_kwargs(
            model=str(tiny.folder), device="rocm", skip_tokenizer_init=True, **{"dtype": "float32", **settings}
        )
        return EngineClient(config, progress=False)

    return made


def test_it_is_built_in_and_orders_what_the_base_does() -> None:
    assert PLATFORM is ROCm and PLATFORM.name == "rocm"
    assert {op: order for op, order in PLATFORM.op_priority.items() if order[0] != "aiter"}.items() <= (
        providers.PRIORITY.items()
    )


def test_an_engine_gives_the_cpus_tokens_from_captured_steps(client: Make) -> None:
    """The oracle's mixes: prefixes, chunks, preemption, seeded draws. Steps run behind the host."""
    model: Any = ("llama", "plain", "float32", {})
    settings = ENGINES["preempted, cached, chunked"]
    made, theirs = fake_platform(), cpu_client(model, **settings)
    ours = client(variant("llama", "plain"), made, **settings)
    assert tokens(run(ours, mix(0))) == tokens(run(theirs, mix(0)))
    assert made._fake.captures > 0 and made._fake.replays > 10


def test_two_ranks_give_the_tokens_of_one(client: Make, caplog: pytest.LogCaptureFixture) -> None:
    made, tiny = fake_platform(), make("llama", {**PLAIN, "num_attention_heads": 4, "num_key_value_heads": 2})
    with caplog.at_level(logging.INFO):
        shared, alone = (client(tiny, made, tensor_parallel_size=size, **SETTINGS) for size in (2, 1))
    assert decoded(shared) == decoded(alone)
    assert sum("RCCL" in record.getMessage() for record in caplog.records) == 1


def test_sleep_gives_memory_back_and_the_tokens_stay(client: Make) -> None:
    made = fake_platform()
    engine = client(variant("llama", "plain"), made, **SETTINGS)
    before, awake = decoded(engine), made._fake.used()
    assert engine.engine.sleep(1) > 0 and made._fake.used() < awake / 10
    engine.wake_up()
    assert decoded(engine) == before


@pytest.mark.parametrize("scheme", ["fp8", "fp8_per_block"])
@pytest.mark.parametrize("fp8", [FNUZ, FN], ids=str)
def test_fp8_weights_are_held_in_the_chips_type(fp8: torch.dtype, scheme: str, client: Make) -> None:
    wide = make("llama", {**FAMILIES["llama"]["plain"], **WIDE})
    ours = client(wide, fake_platform(fp8), quantization=scheme, **SETTINGS)
    (worker,) = ours.engine_plan.ranks.workers
    held = {each.dtype for each in worker.model.state_dict().values() if each.dtype.itemsize == 1}
    assert held == {fp8}
    assert len(decoded(ours)) == 3


def test_weights_alone_in_fp8_give_the_same_tokens_in_either_type(client: Make) -> None:
    wide = make("llama", {**FAMILIES["llama"]["plain"], **WIDE})
    settings: dict[str, Any] = {"quantization": "fp8", "activation_bits": 16, **SETTINGS}
    ocp, own = (decoded(client(wide, fake_platform(fp8), **settings)) for fp8 in (FN, FNUZ))
    assert own == ocp


def test_an_fp8_cache_is_in_the_chips_type(client: Make) -> None:
    for fp8 in (FNUZ, FN):
        engine = client(variant("llama", "plain"), fake_platform(fp8), kv_cache_dtype="fp8", **SETTINGS)
        (worker,) = engine.engine_plan.ranks.workers
        assert {each.dtype for each in worker._state} == {fp8}
        assert len(decoded(engine)) == 3


def test_nobody_is_asked_for_small_sums() -> None:
    platform = fake_platform()()
    assert platform._small_all_reduce(None, RankInfo(1, 2, "inproc://x")) is None
