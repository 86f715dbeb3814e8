"""Every platform that can run here keeps the contract of platforms/interface.py, on one device and on eight."""

import itertools
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from quintet.config import EngineConfig
from quintet.conformance.direct import random_prompts
from quintet.conformance.tiny import SERVED, Tiny, variant
from quintet.platforms import choose, discover
from quintet.platforms.interface import Capabilities, Platform, Unavailable
from quintet.types import AttentionSpec, Bucket, HostBatch, KVLayout
from tests.helpers.run_model import Runner
from tests.helpers.tpu import programs

COMPUTING = [found.name for found in discover() if found.available and found.name != "null"]
DEVICES = {"tpu": (1, 8)}  # elsewhere one
PLATFORMS = [(name, devices) for name in COMPUTING for devices in DEVICES.get(name, (1,))]
STATIC = [(name, devices) for name, devices in PLATFORMS if choose(name).capabilities.static_shapes]


@dataclass(frozen=True)
class Subject:
    """A platform under test, made as the engine makes it."""

    platform: Platform
    facts: Capabilities

    def runner(self, tiny: Tiny, dtype: torch.dtype = torch.float32, sizes: Sequence[int] = (64,)) -> Runner:
        return Runner(tiny, dtype, platform=self.platform, sizes=sizes)


def name_of(param: tuple[str, int]) -> str:
    return f"{param[0]}-{param[1]}"


@pytest.fixture(params=PLATFORMS, ids=name_of)
def subject(request: pytest.FixtureRequest) -> Iterator[Subject]:
    name, devices = request.param
    chosen = choose(name)
    config = EngineConfig(device=name, tensor_parallel_size=devices, compilation_cache_dir=programs().name)
    settled, _ = chosen.platform.configure(config)
    yield Subject(chosen.platform(settled), chosen.capabilities)


def test_every_platform_here_is_tested() -> None:
    assert "cpu" in COMPUTING


def test_probing_opens_nothing_and_writes_no_variable() -> None:
    code = """
import os, sys
before = dict(os.environ)
from quintet.platforms import discover
found = discover()
assert dict(os.environ) == before
assert not [name for name in ("jax", "torchax", "triton") if name in sys.modules]
"""
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("name", [found.name for found in discover()])
def test_one_that_cannot_run_says_why_and_what_to_do(name: str) -> None:
    result = next(found.result for found in discover() if found.name == name)
    if isinstance(result, Unavailable):
        assert len(result.reason) > 10 and result.remedy
    else:
        assert result.devices >= 1 and result.dtypes


def test_configure_is_pure(subject: Subject) -> None:
    config = EngineConfig()
    first, reasons = subject.platform.configure(config)
    assert config == EngineConfig() and subject.platform.configure(config)[0] == first
    assert subject.platform.configure(first)[0] == first, "what it settled, it leaves"
    assert (first != config) <= bool(reasons), "a change has its reason"


def test_memory_is_what_a_person_would_believe(subject: Subject) -> None:
    memory = subject.platform.open(0).memory()
    assert 0 < memory.free <= memory.total and 0 <= memory.peak


def test_a_cache_that_does_not_fit_is_an_error_with_the_numbers(subject: Subject) -> None:
    device = subject.platform.open(0)
    layout = KVLayout(torch.float32, 16, (2, 8, 16, 128))
    with pytest.raises(MemoryError, match=r"KV cache of .* pages needs [\d.]+ GiB, [\d.]+ GiB .*; lower"):
        device.allocate_kv([layout] * 100, 10**8)


@pytest.mark.parametrize("dtype", [np.int32, np.float32], ids=["int32", "float32"])
def test_arrays_come_back_as_they_went(dtype: Any, subject: Subject) -> None:
    device = subject.platform.open(0)
    arrays = [np.arange(12, dtype=dtype).reshape(3, 4), np.zeros((0, 2), dtype), np.ones(1, dtype)]
    waiting = [device.to_host(tensor) for tensor in device.to_device(arrays)]
    for array, wait in zip(arrays, waiting, strict=True):
        back = wait()
        assert tuple(back.shape) == array.shape and np.array_equal(back.numpy(), array)


def test_what_it_computes_in_is_what_it_says(subject: Subject) -> None:
    """Each of its types agrees with float32 on the host, as far as the type goes."""
    tiny = variant("llama", "plain")
    (prompt,) = random_prompts(4, (30,), 101)
    exact = tiny.logits(prompt)
    for dtype in subject.facts.dtypes:
        (got,) = subject.runner(tiny, dtype).prompts([prompt])
        assert float((got - exact).abs().max()) < 40 * torch.finfo(dtype).eps * float(exact.abs().max()), dtype


def test_chunks_give_what_the_whole_gives(subject: Subject) -> None:
    """Prefill, chunked prefill and decode over the cache, two requests at once: the logits of the reference."""
    tiny = variant("qwen3", "plain")
    runner = subject.runner(tiny)
    prompts = dict(enumerate(random_prompts(5, (41, 23), 101)))
    rows: dict[int, list[Tensor]] = {0: [], 1: []}
    for start, stop in ((0, 17), (17, 18), (18, 22), (22, 23)):
        for key, logits in runner.step({key: prompt[start:stop] for key, prompt in prompts.items()}).items():
            rows[key].append(logits)
    for key, prompt in prompts.items():
        want = tiny.logits(prompt[:23])
        torch.testing.assert_close(torch.cat(rows[key]), want, rtol=0, atol=2e-4 * float(want.std()))


@pytest.mark.parametrize("subject", STATIC, indirect=True, ids=name_of)
def test_padding_changes_nothing(subject: Subject) -> None:
    """The same tokens in each bucket that holds them."""
    tiny = variant("gemma2", "plain")
    prompts = random_prompts(6, (5, 7), 101)
    results = [subject.runner(tiny, sizes=[size]).prompts(prompts) for size in (16, 32, 128)]
    for other in results[1:]:
        for got, want in zip(other, results[0], strict=True):
            torch.testing.assert_close(got, want, rtol=0, atol=2e-4 * float(want.std()))


@pytest.mark.parametrize("subject", STATIC, indirect=True, ids=name_of)
def test_a_shape_that_was_not_declared_is_an_error(subject: Subject) -> None:
    runner = subject.runner(variant("llama", "plain"))
    with pytest.raises(RuntimeError, match=r"a step of 48 tokens was never compiled, only steps of \[64\]"):
        runner.worker.run(HostBatch.empty(Bucket(48, 8, 48, SERVED // 16)))
    assert runner.prompts([[3, 4, 5]])[0].isfinite().all(), "the engine goes on"


def test_attention_that_it_lacks_is_refused_with_all_reasons(subject: Subject) -> None:
    """A spec is served, or refused by ValueError; never by a crash when a step runs."""
    ops = subject.runner(variant("llama", "plain")).worker.ops
    kinds: list[dict[str, Any]] = [{}, {"alibi": (0.5,) * 8}]
    kinds += [{"kv_dtype": torch.int8}, {"kv_dtype": torch.float8_e4m3fn}]
    for head_dim, kind in itertools.product((8, 64, 80, 128, 256), kinds):
        spec = AttentionSpec(8, 2, head_dim, 1.0, torch.float32, 16, **kind)
        try:
            made = subject.platform.attention(spec, ops, 0)
        except ValueError as error:
            assert str(error)
        else:
            assert made.layout.page_size == 16 and made.layout.page_bytes > 0
