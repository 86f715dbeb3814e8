"""Captured steps on the fake device: the results of eager ones, once per call, and nothing captured that cannot be."""

import random
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from quintet.config import EngineConfig
from quintet.conformance.harness.random_adapters import random_adapter
from quintet.conformance.harness.worker_runner import random_prompts
from quintet.engine.executor.batch_builder import CaptureSizes
from quintet.interface.types import Batch, HostBatch, HostGroup, HostInputs, MaxShape, Outputs, ShapeBucket, leaves
from quintet.layers.lora_step import LoRASizes
from quintet.platforms.gpu import graphs
from quintet.platforms.gpu.capture_sizes import (
    capture_sizes,
    decode_buckets,
    decode_sizes,
    mixed_buckets,
    mixed_capture_sizes,
    mixed_sizes,
    table_width,
    table_widths,
)
from quintet.platforms.gpu.device import GPUDevice
from quintet.platforms.gpu.graphs import GraphedStep
from quintet_tools.checkpoints.tiny import FAMILIES, variant
from tests.helpers.platforms.run_model import Runner
from tests.platforms.gpu.fake_torch import FakeGPU, FakeRuntime, fake_platform, runtime

SIZES = (1, 2, 4, 8)
MOST = ShapeBucket(64, 8, 64, (64,))
VARIANTS = sorted(decode_buckets(MOST, decode_sizes(8)))


def host(requests: int, pages: int = 3, tokens: int = 1, first: int = 1, groups: int = 2) -> HostBatch:
    """Requests of so many tokens, the last of each wanted; groups differ in all that is theirs."""
    count = requests * tokens
    owners = np.repeat(np.arange(requests, dtype=np.int32), tokens)
    of = np.arange(first, first + count, dtype=np.int32)
    starts = np.arange(requests + 1, dtype=np.int32) * tokens
    table = np.arange(requests * pages, dtype=np.int32).reshape(requests, pages) + first
    each = [HostGroup(of + 7 * g, table + 5 * g, of[:requests] % 16 + 1 + g) for g in range(groups)]
    return HostBatch(of, of % 16, owners, starts, starts[1:] - 1, tuple(each))


def on_device(batch: HostBatch) -> Batch:
    return batch.on(GPUDevice(FakeRuntime(), 0).to_device(batch.leaves()))


def whole(batch: HostBatch) -> HostBatch:
    """A decode step as the engine builds it: its rows are its owners."""
    assert len(batch.token_ids) == len(batch.query_start_loc) - 1
    return batch._replace(logits_indices=batch.token_to_seq)


class Model:
    """Outputs that tell of every field; counts how often it really ran."""

    def __init__(self, fake: FakeRuntime) -> None:
        self.fake, self.ran = fake, list[int]()

    def __call__(self, state: Any, batch: Batch) -> tuple[Outputs, Any]:
        if not self.fake.capturing:
            self.ran.append(batch.token_ids.shape[0])
        owners = batch.token_to_seq.long()
        x = batch.token_ids + 10 * batch.positions + 7 * batch.query_start_loc[owners]
        for turn, group in enumerate(batch.groups):
            x = x * (turn + 2) + 100 * group.slot_mapping + 1000 * group.seq_lens[owners]
            x = (
                x
                + 3 * group.block_table[owners, 0]
                + group.block_table[owners, 1]
                + sum(each.sum() for each in group.plan)
            )
        for each in batch.inputs:
            x = x if each is None else 3 * x + each.sum(0) if each.dim() == 2 else 3 * x + each
        rows = x.float()[batch.logits_indices.long()][:, None] + state[0][0]
        return Outputs(rows.expand(-1, 5).clone(), rows.half(), (x.float()[:, None], -x)), state


@pytest.fixture
def fake() -> FakeRuntime:
    return FakeRuntime()


@pytest.fixture
def model(fake: FakeRuntime) -> Model:
    return Model(fake)


@pytest.fixture
def step(fake: FakeRuntime, model: Model) -> GraphedStep:
    return GraphedStep(model, GPUDevice(fake, 0), VARIANTS)


KV = (torch.zeros(1),)


def check(step: GraphedStep, model: Model, batch: HostBatch, state: Any = KV) -> None:
    """The step, padded, gives what the model gives unpadded, and runs once."""
    count, (want, _) = len(batch.token_ids), model(state, on_device(batch))
    ran, replays = len(model.ran), model.fake.replays
    got, back = step(state, on_device(CaptureSizes(step._variants).pad(batch)))
    assert back is state and torch.equal(got.logits, want.logits) and torch.equal(got.hidden_states, want.hidden_states)
    assert all(
        torch.equal(mine[:count], each)
        for mine, each in zip(got.aux_hidden_states, want.aux_hidden_states, strict=True)
    )
    assert len(model.ran) - ran == 1 and model.fake.replays - replays in (0, 1)


# ------------------------------------------------------------------------------------------------------- sizes


def test_sizes_grow_with_what_they_waste() -> None:
    sizes = decode_sizes(512)
    assert sizes[:6] == (1, 2, 4, 8, 16, 24) and sizes[-1] == 512 and list(sizes) == sorted(set(sizes))
    assert all(b <= 1.25 * a for a, b in zip(sizes, sizes[1:], strict=False) if a >= 32)
    assert decode_sizes(5) == (1, 2, 4, 5) and decode_sizes(1) == (1,) and decode_sizes(10_000)[-1] == 512
    assert [table_width(pages) for pages in (1, 64, 65, 256, 257)] == [64, 64, 256, 256, 1024]
    assert [table_widths(pages) for pages in (1, 64, 65, 1024)] == [(64,), (64,), (64, 256), (64, 256, 1024)]


def test_all_sizes_are_captured_with_every_width_the_largest_first() -> None:
    found = decode_buckets(ShapeBucket(2048, 2, 64, (300, 20)), (1, 2))
    assert [(each.tokens, each.pages) for each in found[:3]] == [(2, (64, 20)), (2, (256, 20)), (2, (300, 20))]
    assert all(each.decode and each.tokens == each.requests == each.rows for each in found) and len(found) == 2 * 3
    assert decode_buckets(ShapeBucket(2048, 2, 64, ()), (1, 2)) == (), "a model that keeps nothing"


def test_sizes_are_those_that_were_asked_for_and_can_come() -> None:
    def sizes(**settings: Any) -> tuple[int, ...]:
        return capture_sizes(EngineConfig(max_num_seqs=12, **settings))

    assert sizes() == decode_sizes(12) and sizes(enforce_eager=True) == ()
    assert sizes(capture_sizes=(3, 12, 64)) == (3, 12) and sizes(max_capture_size=5) == (1, 2, 4, 5)
    config, reasons = FakeGPU.configure(EngineConfig(max_num_seqs=12, capture_sizes=(3, 64)))
    assert config.capture_sizes == (3, 64) and reasons[1:] == [
        "capture_sizes [64] are of steps with prompts alone: max_num_seqs is 12"
    ]
    for given, said in (
        (
            {"capture_sizes": (1, 13, 99), "max_num_batched_tokens": 64},
            "[99] serve no step: max_num_seqs is 12, max_num_ba",
        ),
        (
            {"capture_sizes": (1, 13), "capture_prompts": False},
            "[13] serve no step: max_num_seqs is 12; steps with prompts",
        ),
    ):
        _, (_, first, *_) = FakeGPU.configure(EngineConfig(max_num_seqs=12, **given))
        assert first.startswith(f"capture_sizes {said}")
    platform = fake_platform(max_num_seqs=12, capture_sizes=(3, 12, 64))
    max_shape = MaxShape(ShapeBucket(64, 12, 64, (1,)), 16, 97)
    found = platform.estimate(nn.Module(), [], max_shape).buckets
    assert [(each.tokens, each.requests) for each in found if each.decode] == [(12, 12), (3, 3)]
    assert [(each.tokens, each.requests) for each in found if not each.decode] == [(64, 12), (12, 11), (3, 2)]


def test_sizes_of_steps_with_prompts_are_few_and_hold_every_such_step() -> None:
    sizes = mixed_sizes(2048)
    assert sizes == (16, 32, *range(64, 1025, 64), *range(1152, 2049, 128)) and mixed_sizes(100) == (16, 32, 64, 100)
    assert mixed_sizes(100_000)[-17:] == (2048, *range(2304, 4097, 256), *range(4608, 8193, 512))
    pairs = [*zip(mixed_sizes(8192), mixed_sizes(8192)[1:], strict=False)]
    assert len(pairs) == 41 and all((b - a - 1) / b < (0.2 if a < 448 else 0.125) for a, b in pairs if a >= 256)
    most = ShapeBucket(2048, 256, 320, (40, 3))
    found = mixed_buckets(most, sizes)
    assert len(found) == 2 * len(sizes) - 1 and found[0].tokens == 2048, "few or many requests, the largest first"
    assert all(each.rows == each.requests < each.tokens and each.pages == (40, 3) for each in found)
    held = CaptureSizes(found)
    for tokens, requests in ((2, 1), (16, 15), (17, 1), (300, 256), (512, 17), (513, 1), (1500, 30)):
        step = host(requests, groups=2)
        step = step._replace(token_ids=np.arange(tokens, dtype=np.int32), token_to_seq=np.zeros(tokens, np.int32))
        padded = held.pad(step)
        assert len(padded.token_ids) in sizes and len(padded.query_start_loc) - 1 < len(padded.token_ids), (
            tokens,
            requests,
        )
    assert mixed_buckets(most._replace(pages=()), sizes) == () == mixed_buckets(most, ())
    assert {each.rows for each in mixed_buckets(most, (64, 512), drafts=True)} == {64, 320}, "a row for each token"
    wide = most._replace(rows=4096, requests=600)
    assert {each.rows for each in mixed_buckets(wide, (64, 512, 2048), drafts=True)} == {64, 512, 600}


def test_steps_with_prompts_are_captured_unless_they_are_not_to_be() -> None:
    def sizes(**settings: Any) -> tuple[int, ...]:
        return mixed_capture_sizes(EngineConfig(**settings))

    assert sizes() == mixed_sizes(2048) and sizes(max_num_batched_tokens=10_000)[-1] == 8192
    assert sizes(max_capture_size=512) == mixed_sizes(512)
    assert sizes(max_num_batched_tokens=20, max_num_seqs=4) == (16, 20)
    assert sizes(enforce_eager=True) == sizes(capture_prompts=False) == ()
    assert sizes(max_capture_size=64) == (16, 32, 64) and sizes(capture_sizes=(1, 8, 4096)) == (8,)


# ------------------------------------------------------------------------------------------------------ replay


def test_a_size_is_captured_once_and_replayed(step: GraphedStep, model: Model) -> None:
    for turn, count in enumerate((3, 4, 3, 8, 5, 1, 2, 3)):
        check(step, model, host(count, pages=2 + turn, first=turn + 1))
    assert (model.fake.captures, model.fake.replays) == (4, 4)
    assert step.refused is None


MIXED = mixed_buckets(MOST, (4, 8, 16))


def mixed(*counts: int, first: int = 1, pages: int = 3) -> HostBatch:
    """Requests that bring so many tokens each, the last of each wanted."""
    starts = np.cumsum((0, *counts), dtype=np.int32)
    of = np.arange(first, first + starts[-1], dtype=np.int32)
    owners = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
    table = np.arange(len(counts) * pages, dtype=np.int32).reshape(-1, pages) + first
    each = [HostGroup(of + 7 * g, table + 5 * g, of[: len(counts)] + 1 + g) for g in range(2)]
    return HostBatch(of, of % 16, owners, starts, starts[1:] - 1, tuple(each))


def test_steps_with_prompts_are_captured_in_few_sizes(fake: FakeRuntime, model: Model) -> None:
    """Between decode steps, with which they share what graphs read."""
    step = GraphedStep(model, GPUDevice(fake, 0), [*MIXED, *VARIANTS])
    rng = random.Random(1)
    for turn in range(60):
        counts = [rng.choice((1, 1, 1, 2, 5)) for _ in range(rng.randint(1, 6))]
        check(step, model, mixed(*counts, first=turn + 1, pages=2 + turn % 3))
        check(step, model, host(rng.randint(1, 8)))
    assert fake.captures <= len(MIXED) + len(VARIANTS) and fake.captures + fake.replays >= 100
    assert step.refused is None


def test_large_steps_with_prompts_are_captured(fake: FakeRuntime, model: Model) -> None:
    most = ShapeBucket(2048, 24, 64, (64, 64))
    step = GraphedStep(model, GPUDevice(fake, 0), mixed_buckets(most, mixed_sizes(2048)))
    for turn in range(2):
        for counts in ((513,), (700, 1, 1), (1100, *[40] * 20), (2048,), (2000, 3)):
            check(step, model, mixed(*counts, first=turn + 1))
    assert (fake.captures, fake.replays) == (4, 6), "2048 and 2003 tokens are one size"
    check(step, model, mixed(2049))
    assert (fake.captures, fake.replays) == (4, 6)


def test_what_no_size_holds_runs_eagerly(fake: FakeRuntime, model: Model) -> None:
    """More tokens, or a row for each of them: scores of a prompt."""
    step = GraphedStep(model, GPUDevice(fake, 0), MIXED)
    every = mixed(7, 3)
    for batch in (mixed(17), mixed(1, 30), every._replace(logits_indices=np.arange(9, dtype=np.int32))):
        check(step, model, batch)
        check(step, model, batch)
    assert fake.captures == fake.replays == 0
    check(step, model, every)
    assert fake.captures == 1


def test_rows_of_a_larger_step_are_not_left_behind(fake: FakeRuntime) -> None:
    """They would point past the tokens of this one."""
    seen: list[list[int]] = []

    def model(state: Any, batch: Batch) -> tuple[Outputs, Any]:
        seen.append(batch.logits_indices.tolist())
        return Outputs(batch.token_ids.float()[batch.logits_indices.long()][:, None]), state

    step = GraphedStep(model, GPUDevice(fake, 0), [*MIXED, *VARIANTS])
    for batch in (mixed(9, 4, 2), mixed(2, 2), host(3), mixed(2)):
        for _ in range(2):
            step(KV, on_device(CaptureSizes([*MIXED, *VARIANTS]).pad(batch)))
    assert seen[0][:3] == [8, 12, 14] and seen[-1] == [1, 0, 0]
    assert [rows for rows in seen if set(rows[3:]) - {0}] == [[0, 1, 2, 3]] * 3, "a decode step has every token's"


def test_prompts_and_large_steps_run_eagerly(step: GraphedStep, model: Model) -> None:
    for batch in (host(2, tokens=5), host(9), host(3, tokens=2)):
        check(step, model, batch)
        check(step, model, batch)
    assert model.fake.captures == model.fake.replays == 0


def test_few_rows_of_logits_are_those_that_were_wanted(step: GraphedStep, model: Model) -> None:
    """A chunk of one token wants none; of scored prompts the rows come in another order."""
    for wanted in ([2, 0], [], [1], [3, 2, 1, 0]):
        check(step, model, host(4)._replace(logits_indices=np.array(wanted, np.int32)))
    assert (model.fake.captures, model.fake.replays) == (1, 3)


@pytest.mark.parametrize("count", [1, 3, 4])
def test_rows_of_a_decode_step_are_neither_uploaded_nor_looked_up(step: GraphedStep, model: Model, count: int) -> None:
    """Padded or not, what was wanted is the beginning of what a graph gives, without a copy."""
    padded = CaptureSizes(step._variants).pad(whole(host(count)))
    for _ in range(2):
        check(step, model, whole(host(count)))
        batch = on_device(padded)
        assert batch.logits_indices.data_ptr() == batch.token_to_seq.data_ptr() and batch.one_token_per_request == (
            count != 3
        )
        got = step(KV, batch)[0]
        (found,) = step._graphs.values()
        assert found.inputs[graphs.ROWS] is found.inputs[graphs.OWNERS]
        assert got.logits.data_ptr() == found.outputs.logits.data_ptr() and len(got.logits) == count


def test_rows_that_are_no_owners_are_looked_up_even_if_there_are_as_many(step: GraphedStep, model: Model) -> None:
    turned = host(4)._replace(logits_indices=np.array([1, 0, 3, 2], np.int32))
    for batch in (whole(host(4)), turned, whole(host(4)), turned):
        check(step, model, batch)
    assert not on_device(turned).one_token_per_request and model.fake.captures == 1


def test_a_longer_page_table_is_captured_anew(step: GraphedStep, model: Model) -> None:
    for pages in (2, 64, 65, 3, 256, 300):
        check(step, model, host(2, pages))
    assert (model.fake.captures, model.fake.replays) == (3, 3)


def test_what_a_groups_mixers_plan_is_copied_too(step: GraphedStep, model: Model) -> None:
    for value, size in ((1, 3), (2, 3), (3, 4)):
        plans = (np.full(size, value, np.int32),), (np.full(2, value, np.int32), np.zeros((0, 1), np.int32))
        batch = host(2)
        groups = [group._replace(plan=plan) for group, plan in zip(batch.groups, plans, strict=True)]
        check(step, model, batch._replace(groups=tuple(groups)))
    assert (model.fake.captures, model.fake.replays) == (2, 1)


def test_the_shape_of_a_plan_is_part_of_what_is_captured(step: GraphedStep, model: Model) -> None:
    """An empty array says it."""
    for shape in ((0, 1, 3), (0, 2, 3), (0, 1, 3)):
        batch = host(2)
        planned = tuple(group._replace(plan=(np.zeros(shape, np.int32),)) for group in batch.groups)
        check(step, model, batch._replace(groups=planned))
    assert (model.fake.captures, model.fake.replays) == (2, 1)


def test_what_a_step_brings_beside_ids_is_copied_too(step: GraphedStep, model: Model) -> None:
    for turn in range(2):
        few = np.arange(4, dtype=np.int32) + turn
        for inputs in (
            HostInputs(adapters=few),
            HostInputs(token_type_ids=few),
            HostInputs(embeds=np.full((2, 4), turn, np.float32), embed_indices=few - 1),
            HostInputs(rotary_positions=np.arange(12, dtype=np.int32).reshape(3, 4) + turn),
        ):
            check(step, model, host(4)._replace(inputs=inputs))
        check(step, model, host(4))
    assert (model.fake.captures, model.fake.replays) == (5, 5)


def test_steps_with_adapters_are_captured_apart_from_those_without(fake: FakeRuntime, model: Model) -> None:
    """All sizes share one buffer of adapters; padded tokens have none."""
    step = GraphedStep(model, GPUDevice(fake, 0), [*MIXED, *VARIANTS])
    for turn in range(3):
        for batch in (host(3, first=turn + 1), host(7), mixed(2, 1, 3), mixed(9, 1)):
            slots = (np.arange(len(batch.token_ids), dtype=np.int32) + turn) % 3
            check(step, model, batch._replace(inputs=HostInputs(adapters=slots)))
            check(step, model, batch)
    assert (fake.captures, fake.replays) == (8, 16)
    place = len(leaves(host(1)))
    given = [graph.inputs[place] for size, graph in step._graphs.items() if any(size.inputs)]
    assert sorted(map(len, given)) == [4, 8, 8, 16] and len({each.data_ptr() for each in given}) == 1


def test_outputs_of_all_sizes_share_one_buffer_each(step: GraphedStep, model: Model, fake: FakeRuntime) -> None:
    for turn in range(2):
        before = fake.used()
        found = [step(KV, on_device(whole(host(count, first=turn + 1))))[0] for count in (8, 2, 4)]
    assert fake.used() == before and fake.replays == 3
    for field in ("logits", "hidden_states"):
        assert len({getattr(each, field).data_ptr() for each in found}) == 1
    assert [len({each.aux_hidden_states[tap].data_ptr() for each in found}) for tap in range(2)] == [1, 1]


def test_graphs_of_another_cache_are_dropped(step: GraphedStep, model: Model) -> None:
    for state in (KV, (torch.ones(1),)):
        check(step, model, host(2), state)
        check(step, model, host(2), state)
    assert (model.fake.captures, model.fake.replays) == (2, 2)


def test_graphs_do_not_outlive_a_sleep(step: GraphedStep, model: Model) -> None:
    """Weights may lie elsewhere when they are awake again."""
    check(step, model, host(2))
    step._device.tagged_memory.sleep(1)
    step._device.tagged_memory.wake()
    check(step, model, host(2))
    assert (model.fake.captures, model.fake.replays) == (2, 0)


def test_what_cannot_be_captured_runs_eagerly_and_says_why_once(
    step: GraphedStep, model: Model, caplog: pytest.LogCaptureFixture
) -> None:
    model.fake.fails = RuntimeError("operation not permitted when stream is capturing\nmore")
    for count in (2, 2, 4):
        check(step, model, host(count))
    assert step.refused == "RuntimeError: operation not permitted when stream is capturing"
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_without_memory_what_is_captured_goes_on(
    step: GraphedStep, model: Model, caplog: pytest.LogCaptureFixture
) -> None:
    check(step, model, host(2))
    model.fake.fails = torch.OutOfMemoryError("out of memory")
    check(step, model, host(4))
    check(step, model, host(4))
    check(step, model, host(2))
    assert model.fake.replays == 1 and "lower gpu_memory_utilization" in caplog.text


def test_no_capture_begins_where_memory_may_not_do(
    step: GraphedStep, model: Model, caplog: pytest.LogCaptureFixture
) -> None:
    model.fake.limit = model.fake.used() + graphs.MIN_ROOM // 2
    for _ in range(2):
        check(step, model, host(2))
    assert model.fake.captures == 0 and model.fake.calls.count("release") == 1, "what is kept was given back first"
    assert "32 MiB are free, and a capture may need 64" in caplog.text and "lower gpu_mem" in caplog.text


def test_the_largest_capture_says_what_the_next_may_need(step: GraphedStep, model: Model) -> None:
    check(step, model, host(2))
    step._largest = 2 * graphs.MIN_ROOM
    model.fake.limit = model.fake.used() + step._largest // 2
    check(step, model, host(4))
    assert model.fake.captures == 1 and "a capture may need 128" in (step.refused or "")


def test_what_is_dropped_leaves_its_stream_and_no_workspaces(step: GraphedStep, model: Model) -> None:
    check(step, model, host(2))
    stream = step._stream
    step.drop()
    assert step._stream is stream and model.fake.calls[-1] == "release workspaces" and step._pool is None
    check(step, model, host(2))
    assert step._stream is stream and model.fake.captures == 2


def test_a_step_that_waits_for_the_device_is_noticed(fake: FakeRuntime) -> None:
    def waits(state: Any, batch: Batch) -> tuple[Outputs, Any]:
        fake.event().synchronize()
        return Outputs(batch.token_ids.float()[:, None]), state

    step = GraphedStep(waits, GPUDevice(fake, 0), VARIANTS)
    assert step(KV, on_device(host(2)))[0].logits.flatten().tolist() == [1, 2]
    assert "synchronize" in (step.refused or "")


def test_a_step_that_fails_is_an_error_and_nothing_is_kept(fake: FakeRuntime) -> None:
    fails = [True]

    def model(state: Any, batch: Batch) -> tuple[Outputs, Any]:
        if fails:
            raise ValueError(fails.pop())
        return Outputs(None, batch.token_ids.float()[:, None]), state

    step = GraphedStep(model, GPUDevice(fake, 0), VARIANTS)
    with pytest.raises(ValueError, match="True"):
        step(KV, on_device(host(2)))
    outputs = step(KV, on_device(host(2)))[0]
    assert (
        outputs.logits is None and outputs.hidden_states.shape == (2, 1) and fake.captures == 1 and step.refused is None
    )


def test_graphs_that_were_not_used_for_longest_go_first(
    step: GraphedStep, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graphs, "MAX_GRAPHS", 2)
    for count in (1, 2, 1, 4, 1, 2):
        check(step, model, host(count))
    assert (model.fake.captures, model.fake.replays) == (4, 2)


def test_graphs_with_prompts_go_first_while_they_are_more_than_a_third(
    fake: FakeRuntime, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graphs, "MAX_GRAPHS", 3)
    step = GraphedStep(model, GPUDevice(fake, 0), [*MIXED, *VARIANTS])
    for batch in (host(1), mixed(3), mixed(7), host(2), host(1), host(2), mixed(7)):
        check(step, model, batch)
    assert (fake.captures, fake.replays) == (4, 3) and [size.tokens for size in step._graphs] == [1, 2, 8]
    check(step, model, host(4))
    assert [size.tokens for size in step._graphs] == [2, 8, 4], "a third of the places stays with prompts"


def test_captured_ahead_large_steps_are_dropped_and_small_ones_are_not(
    fake: FakeRuntime, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graphs, "MAX_GRAPHS", 2)
    most = ShapeBucket(2048, 8, 64, (64, 64))
    buckets = mixed_buckets(most, mixed_sizes(2048))
    late = frozenset(each.tokens for each in buckets if each.tokens > 512)
    step = GraphedStep(model, GPUDevice(fake, 0), buckets, ahead=True, late=late)
    for count in (16, 64, 512, 600, 700, 1024, 16, 64, 512, 600):
        check(step, model, mixed(count))
    assert (fake.captures, fake.replays) == (7, 3)


def test_the_pool_has_what_the_largest_step_takes_before_anything_is_captured(
    fake: FakeRuntime, model: Model, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One graph more, that takes it and is never replayed."""
    monkeypatch.setattr(graphs, "MIN_ROOM", graphs.MIB)
    need, sizes, empty = 2 * graphs.MIB, list[int](), fake.empty

    def noted(shape: Any, dtype: torch.dtype, index: int) -> torch.Tensor:
        sizes.extend([shape[0]] if fake.capturing else [])
        return empty(shape, dtype, index)

    monkeypatch.setattr(fake, "empty", noted)
    device = GPUDevice(fake, 0)
    step = GraphedStep(model, device, VARIANTS, pool=need)
    for count in (1, 2, 4):
        check(step, model, host(count))
    assert sizes == [need] and (fake.captures, fake.replays) == (4, 0)
    monkeypatch.setattr(fake, "idle", lambda index: need + 5)
    assert device.idle() == 5, "what the pool has is for no tensor, nor for another engine's plan"
    step.drop()
    assert device.idle() == need + 5
    monkeypatch.setattr(fake, "idle", lambda index: 0)
    fake.limit = fake.used() + need
    with caplog.at_level("INFO"):
        check(step, model, host(1))
    assert sizes == [need] and "are not free for captured steps" in caplog.text
    assert fake.captures == 5, "less is needed for this one"


def test_what_the_eager_run_left_is_given_back_before_a_capture(step: GraphedStep, model: Model) -> None:
    """A capture takes as much once more."""
    for idle, calls in ((0, 0), (2**40, 1)):
        model.fake.idle = lambda index, idle=idle: idle  # type: ignore[method-assign]
        check(step, model, host(2 + 2 * calls))
        assert model.fake.calls.count("release") == calls
    assert model.fake.captures == 2


# ------------------------------------------------------------------------------------------------------ the head


class Head:
    """A product before the head's, of the same shape; what follows the head's is left out or not."""

    def __init__(self, dtype: torch.dtype, scaled: bool = False, turned: bool = False) -> None:
        generator = torch.Generator().manual_seed(1)
        self.inner, self.head = torch.randn(2, 48, 48, generator=generator).to(dtype)
        self.scaled, self.turned = scaled, turned

    def __call__(self, state: Any, batch: Batch) -> tuple[Outputs, Any]:
        x = torch.sin(batch.token_ids[:, None] * torch.arange(1, 49)).to(self.inner.dtype)
        y = torch.nn.functional.linear(x, self.inner)
        logits = y @ self.head if self.turned else torch.nn.functional.linear(y, self.head)
        return Outputs(logits / 2 if self.scaled else logits, y), state


class Writing(TorchDispatchMode):
    """Notes what writes floats to a place that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        written = (kwargs or {}).get("out", args[0] if func is torch.ops.aten.copy_.default else None)
        if written is not None and written.is_floating_point():
            self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("inference", [False, True])
def test_the_heads_product_is_written_where_logits_are_read(
    fake: FakeRuntime, dtype: torch.dtype, turned: bool, scaled: bool, inference: bool
) -> None:
    model: Any = Head(dtype, scaled, turned)
    step = GraphedStep(model, GPUDevice(fake, 0), [*MIXED, *VARIANTS])
    with torch.inference_mode(inference):
        for batch in (whole(host(4)), mixed(3, 2), whole(host(2))):
            for turn in range(3):
                later = on_device(CaptureSizes(step._variants).pad(batch._replace(token_ids=batch.token_ids + turn)))
                with Writing() as ops:
                    got = step(KV, later)[0]
                want = model(KV, later)[0]
                count = len(got.logits)
                assert torch.equal(got.logits, want.logits[:count]) and torch.equal(
                    got.hidden_states, want.hidden_states[:count]
                )
            assert ops.seen == (["aten.copy_.default"] * 2 if scaled else ["aten.mm.out", "aten.copy_.default"])
    assert (fake.captures, fake.replays) == (3, 6)


def test_captured_ahead_none_is_dropped_for_others(
    model: Model, fake: FakeRuntime, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(graphs, "MAX_GRAPHS", 2)
    step = GraphedStep(model, GPUDevice(fake, 0), VARIANTS, ahead=True)
    with caplog.at_level("DEBUG"):
        for each in VARIANTS:
            step(KV, on_device(each._replace(pages=(20, 20)).batch))
    assert [
        f"captured a step of {tokens} tokens of {tokens} requests, up to 64 pages" in caplog.text for tokens in SIZES
    ] == [True] * 4
    for count in (3, 8, 1, 2):
        check(step, model, host(count))
    assert (model.fake.captures, model.fake.replays) == (4, 4)


def test_what_is_captured_is_let_go_before_a_sleep(step: GraphedStep, model: Model) -> None:
    check(step, model, host(2))
    made, step.nbytes = weakref.ref(next(iter(step._graphs.values())).graph), 1000
    assert step._device.sleep(1) == 1000 and made() is None and step.nbytes == 0
    step._device.wake()
    check(step, model, host(2))
    assert (model.fake.captures, model.fake.replays) == (2, 0)


def test_one_pool_serves_all_and_captures_are_counted(step: GraphedStep, model: Model) -> None:
    for count in SIZES:
        check(step, model, host(count))
    assert model.fake.calls.count("pool") == 1 and step.nbytes >= 0


# ------------------------------------------------------------------------------------------------- whole models


@pytest.mark.grid(cases=10)
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


def test_a_model_with_adapters_gives_what_it_gives_eagerly() -> None:
    """One adapter is written over between captured steps, and steps without adapters come between."""
    tiny, (first, second) = variant("llama", "plain"), random_prompts(0, [5, 17], 90)
    adapters = [random_adapter(tiny, seed, 4) for seed in range(3)]
    turns = ((1, 2), (2, 0), (0, 0), (0, 1), (0, 0), (1, 1), (2, 1))
    logits = []
    for eager in (True, False):
        platform = fake_platform(enforce_eager=eager, max_num_seqs=8)
        run = Runner(tiny, platform=platform, lora=LoRASizes(2, 4))
        pools = run.worker.lora
        assert pools is not None
        run.adapters, found = {0: 1, 1: 2}, []
        for slot in range(2):
            pools.write(run.worker.platform, slot, pools.pack(adapters[slot]))
        found.append(run.step({0: first, 1: second}))
        for turn, slots in enumerate(turns):
            if turn == 5:
                pools.write(run.worker.platform, 0, pools.pack(adapters[2]))
            run.adapters = dict(enumerate(slots))
            found.append(run.step({0: [turn], 1: [turn + 7]}))
        logits.append([rows for step in found for rows in step.values()])
    assert runtime(platform).replays == len(turns) - 2, "one capture with adapters, and one without"
    for got, want in zip(*logits, strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-4 * float(want.std()))
    base = Runner(tiny, platform=fake_platform(max_num_seqs=8)).step({0: first, 1: second})
    assert float((base[0] - logits[1][0]).abs().max()) > 0.1, "adapters change what it gives"
