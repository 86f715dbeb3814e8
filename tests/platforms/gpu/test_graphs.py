"""Captured steps on the fake device: the results of eager ones, once per call, and nothing captured that cannot be."""

import random
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from quintet.config import EngineConfig
from quintet.conformance.direct import random_prompts
from quintet.conformance.tiny import FAMILIES, variant
from quintet.platforms.gpu import graphs
from quintet.platforms.gpu.buckets import capture_sizes, decode_sizes, padded, table_width, table_widths
from quintet.platforms.gpu.device import GPUDevice
from quintet.platforms.gpu.graphs import Graphs
from quintet.types import Batch, Bucket, HostBatch
from tests.helpers.run_model import Runner
from tests.platforms.gpu.fake_torch import FakeGPU, FakeRuntime, fake_platform, runtime

SIZES = (1, 2, 4, 8)


def host(requests: int, pages: int = 3, tokens: int = 1, first: int = 1) -> HostBatch:
    """Requests of so many tokens, the last of each wanted."""
    count = requests * tokens
    owners = np.repeat(np.arange(requests, dtype=np.int32), tokens)
    of = np.arange(first, first + count, dtype=np.int32)
    starts = np.arange(requests + 1, dtype=np.int32) * tokens
    table = np.arange(requests * pages, dtype=np.int32).reshape(requests, pages) + first
    return HostBatch(of, of % 16, of, owners, starts, of[:requests] % 16 + 1, table, starts[1:] - 1)


def on_device(batch: HostBatch) -> Batch:
    tensors: list[Any] = [torch.from_numpy(array) for array in batch[:-1]]
    return Batch(*tensors, extra=tuple(torch.from_numpy(x) for x in batch.extra))


class Model:
    """Logits that tell of every field; counts how often it really ran."""

    def __init__(self, fake: FakeRuntime) -> None:
        self.fake, self.ran = fake, list[int]()

    def __call__(self, kv: Any, batch: Batch) -> tuple[Tensor, Any]:
        if not self.fake.capturing:
            self.ran.append(batch.token_ids.shape[0])
        owners = batch.owners.long()
        rows = batch.token_ids + 10 * batch.positions + 100 * batch.slots + 1000 * batch.lengths[owners]
        rows = rows + 7 * batch.starts[owners] + 3 * batch.page_table[owners, 0] + batch.page_table[owners, 1]
        rows = rows + sum(x.sum() for x in batch.extra)
        return rows.float()[batch.logit_rows.long()][:, None].expand(-1, 5).clone() + kv[0][0], kv


@pytest.fixture
def fake() -> FakeRuntime:
    return FakeRuntime()


@pytest.fixture
def model(fake: FakeRuntime) -> Model:
    return Model(fake)


@pytest.fixture
def step(fake: FakeRuntime, model: Model) -> Graphs:
    return Graphs(model, GPUDevice(fake, 0), SIZES)


KV = (torch.zeros(1),)


def check(step: Graphs, model: Model, batch: HostBatch, kv: Any = KV) -> None:
    """The step, padded, gives what the model gives unpadded, and runs once."""
    want, ran, replays = model(kv, on_device(batch))[0], len(model.ran), model.fake.replays
    logits, back = step(kv, on_device(padded(batch, SIZES)))
    assert back is kv and torch.equal(logits, want)
    assert len(model.ran) - ran == 1 and model.fake.replays - replays in (0, 1)


# ---------------------------------------------------------------------------------------------------- padding


def test_sizes_grow_with_what_they_waste() -> None:
    sizes = decode_sizes(512)
    assert sizes[:6] == (1, 2, 4, 8, 16, 24) and sizes[-1] == 512 and list(sizes) == sorted(set(sizes))
    assert all(b <= 1.25 * a for a, b in zip(sizes, sizes[1:], strict=False) if a >= 32)
    assert decode_sizes(5) == (1, 2, 4, 5) and decode_sizes(1) == (1,) and decode_sizes(10_000)[-1] == 512
    assert [table_width(pages) for pages in (1, 64, 65, 256, 257)] == [64, 64, 256, 256, 1024]
    assert [table_widths(pages) for pages in (1, 64, 65, 1024)] == [(64,), (64,), (64, 256), (64, 256, 1024)]


def test_sizes_are_those_that_were_asked_for_and_can_come() -> None:
    def sizes(**settings: Any) -> tuple[int, ...]:
        return capture_sizes(EngineConfig(max_num_seqs=12, **settings))

    assert sizes() == decode_sizes(12) and sizes(enforce_eager=True) == ()
    assert sizes(capture_sizes=(3, 12, 64)) == (3, 12) and sizes(max_capture_size=5) == (1, 2, 4, 5)
    config, reasons = FakeGPU.configure(EngineConfig(max_num_seqs=12, capture_sizes=(3, 64)))
    assert config.capture_sizes == (3, 64) and reasons[1:] == ["capture_sizes [64] are left out: max_num_seqs is 12"]
    platform = fake_platform(max_num_seqs=12, capture_sizes=(3, 12, 64))
    assert [bucket.tokens for bucket in platform.captures(1)] == [12, 3]


def test_padding_is_requests_like_any_others_on_nobodys_page() -> None:
    batch = padded(host(5), SIZES)
    assert [len(array) for array in batch[:-1]] == [8, 8, 8, 8, 9, 8, 8, 5], "rows of logits stay as they are"
    assert batch.token_ids[5:].tolist() == batch.positions[5:].tolist() == batch.slots[5:].tolist() == [0, 0, 0]
    assert batch.lengths[5:].tolist() == [1, 1, 1] and not batch.page_table[5:].any()
    assert batch.owners.tolist() == list(range(8)) and batch.starts.tolist() == list(range(9))
    assert all(np.array_equal(a[:5], b[:5]) for a, b in zip(batch[:-1], host(5)[:-1], strict=True))


@pytest.mark.parametrize("batch", [host(2, tokens=3), host(9), host(4), host(1)], ids=["chunks", "many", "fits", "one"])
def test_other_steps_stay_as_they_are(batch: HostBatch) -> None:
    assert padded(batch, SIZES) is batch
    assert padded(host(3), ()).token_ids.shape == (3,)


# ------------------------------------------------------------------------------------------------------ replay


def test_a_size_is_captured_once_and_replayed(step: Graphs, model: Model) -> None:
    for turn, count in enumerate((3, 4, 3, 8, 5, 1, 2, 3)):
        check(step, model, host(count, pages=2 + turn, first=turn + 1))
    assert (model.fake.captures, model.fake.replays) == (4, 4)
    assert step.refused is None


def test_prompts_and_large_steps_run_eagerly(step: Graphs, model: Model) -> None:
    for batch in (host(2, tokens=5), host(9), host(3, tokens=2)):
        check(step, model, batch)
        check(step, model, batch)
    assert model.fake.captures == model.fake.replays == 0


def test_few_rows_of_logits_are_those_that_were_wanted(step: Graphs, model: Model) -> None:
    """A chunk of one token wants none; of scored prompts the rows come in another order."""
    for wanted in ([2, 0], [], [1], [3, 2, 1, 0]):
        check(step, model, host(4)._replace(logit_rows=np.array(wanted, np.int32)))
    assert (model.fake.captures, model.fake.replays) == (1, 3)


def test_a_longer_page_table_is_captured_anew(step: Graphs, model: Model) -> None:
    for pages in (2, 64, 65, 3, 256, 300):
        check(step, model, host(2, pages))
    assert (model.fake.captures, model.fake.replays) == (3, 3)


def test_what_the_attention_plans_is_copied_too(step: Graphs, model: Model) -> None:
    for value, size in ((1, 3), (2, 3), (3, 4)):
        check(step, model, host(2)._replace(extra=(np.full(size, value, np.int32),)))
    assert (model.fake.captures, model.fake.replays) == (2, 1)


def test_graphs_of_another_cache_are_dropped(step: Graphs, model: Model) -> None:
    for kv in (KV, (torch.ones(1),)):
        check(step, model, host(2), kv)
        check(step, model, host(2), kv)
    assert (model.fake.captures, model.fake.replays) == (2, 2)


def test_graphs_do_not_outlive_a_sleep(step: Graphs, model: Model) -> None:
    """Weights may lie elsewhere when they are awake again."""
    check(step, model, host(2))
    step._device.tagged.sleep(1)
    step._device.tagged.wake()
    check(step, model, host(2))
    assert (model.fake.captures, model.fake.replays) == (2, 0)


def test_what_cannot_be_captured_runs_eagerly_and_says_why_once(
    step: Graphs, model: Model, caplog: pytest.LogCaptureFixture
) -> None:
    model.fake.fails = RuntimeError("operation not permitted when stream is capturing\nmore")
    for count in (2, 2, 4):
        check(step, model, host(count))
    assert step.refused == "RuntimeError: operation not permitted when stream is capturing"
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_without_memory_what_is_captured_goes_on(step: Graphs, model: Model, caplog: pytest.LogCaptureFixture) -> None:
    check(step, model, host(2))
    model.fake.fails = torch.OutOfMemoryError("out of memory")
    check(step, model, host(4))
    check(step, model, host(4))
    check(step, model, host(2))
    assert model.fake.replays == 1 and "lower gpu_memory_utilization" in caplog.text


def test_a_step_that_waits_for_the_device_is_noticed(fake: FakeRuntime) -> None:
    def waits(kv: Any, batch: Batch) -> tuple[Tensor, Any]:
        fake.event().synchronize()
        return batch.token_ids.float()[:, None], kv

    step = Graphs(waits, GPUDevice(fake, 0), SIZES)
    assert step(KV, on_device(host(2)))[0].flatten().tolist() == [1, 2]
    assert "synchronize" in (step.refused or "")


def test_a_step_that_fails_is_an_error_and_nothing_is_kept(fake: FakeRuntime) -> None:
    fails = [True]

    def model(kv: Any, batch: Batch) -> tuple[Tensor, Any]:
        if fails:
            raise ValueError(fails.pop())
        return batch.token_ids.float()[:, None], kv

    step = Graphs(model, GPUDevice(fake, 0), SIZES)
    with pytest.raises(ValueError, match="True"):
        step(KV, on_device(host(2)))
    assert step(KV, on_device(host(2)))[0].shape == (2, 1) and fake.captures == 1 and step.refused is None


def test_graphs_that_were_not_used_for_longest_go_first(
    step: Graphs, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graphs, "KEPT", 2)
    for count in (1, 2, 1, 4, 1, 2):
        check(step, model, host(count))
    assert (model.fake.captures, model.fake.replays) == (4, 2)


def test_captured_ahead_none_is_dropped_for_others(
    model: Model, fake: FakeRuntime, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(graphs, "KEPT", 2)
    step = Graphs(model, GPUDevice(fake, 0), SIZES, ahead=True)
    with caplog.at_level("DEBUG"):
        for count in SIZES:
            step(KV, on_device(HostBatch.decoding(Bucket(count, count, count, 20))))
    assert [f"captured a step of {tokens} tokens, up to 64 pages" in caplog.text for tokens in SIZES] == [True] * 4
    for count in (3, 8, 1, 2):
        check(step, model, host(count))
    assert (model.fake.captures, model.fake.replays) == (4, 4)


def test_what_is_captured_is_let_go_before_a_sleep(step: Graphs, model: Model) -> None:
    check(step, model, host(2))
    made, step.nbytes = weakref.ref(next(iter(step._graphs.values())).graph), 1000
    assert step._device.sleep(1) == 1000 and made() is None and step.nbytes == 0
    step._device.wake()
    check(step, model, host(2))
    assert (model.fake.captures, model.fake.replays) == (2, 0)


def test_one_pool_serves_all_and_captures_are_counted(step: Graphs, model: Model) -> None:
    for count in SIZES:
        check(step, model, host(count))
    assert model.fake.calls.count("pool") == 1 and step.nbytes >= 0


# ------------------------------------------------------------------------------------------------- whole models


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_gives_what_it_gives_eagerly(family: str) -> None:
    """Three requests that decode, one that leaves, one that joins."""
    prompts = random_prompts(0, [5, 17, 33], 90)
    logits = []
    for eager in (True, False):
        platform = fake_platform(enforce_eager=eager, max_num_seqs=8)
        run, rng = Runner(variant(family, next(iter(FAMILIES[family]))), platform=platform), random.Random(1)
        found = [run.step(dict(enumerate(prompts)))]
        for turn in range(12):
            names = [0, 1, 2] if turn < 6 else [0, 2] if turn < 9 else [2, 3]
            found.append(run.step({name: [rng.randrange(90)] for name in names}))
        logits.append([rows for step in found for rows in step.values()])
        replays = runtime(platform).replays
    assert replays == 10  # sizes 4 and 2 were captured at their first step
    for got, want in zip(*logits, strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-4 * float(want.std()))
