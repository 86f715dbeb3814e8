"""Recorded steps: the same bits as eager ones, for every family, and refused where a replay would not be the step."""

import gc
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from quintet.config import EngineConfig
from quintet.conformance.harness.worker_runner import random_prompts
from quintet.interface.types import Batch, Group, Outputs
from quintet.platforms.cpu import PLATFORM
from quintet.platforms.cpu import graph as replay
from quintet.platforms.cpu.arena import SEGMENT, Arena, empty, use_arena
from quintet.platforms.cpu.graph import MIN_PAGES, Replay
from quintet_tools.checkpoints.tiny import FAMILIES, SERVED, variant
from tests.helpers.platforms.run_model import Runner

_cpu = pytest.importorskip("quintet._cpu", reason="steps are recorded by the compiled extension")


class Watched(Replay):
    """Counts its replays; the last one made is kept."""

    last: "Watched"

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        Watched.last, self.recorded = self, 0

    @property
    def replayed(self) -> int:
        """Steps that were replayed and not run beside it."""
        return sum(graph.replays for graph in self._graphs.values())

    def _record(self, *args: Any) -> Outputs:
        self.recorded += 1
        return super()._record(*args)


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> type[Watched]:
    monkeypatch.setattr("quintet.platforms.cpu.platform.Replay", Watched)
    return Watched


def runner(family: str, eager: bool, length: int = SERVED) -> Runner:
    name = next(iter(FAMILIES[family]))
    platform = PLATFORM(EngineConfig(enforce_eager=eager))
    return Runner(variant(family, name), torch.bfloat16, platform=platform, max_model_len=length)


@pytest.mark.grid(cases=10)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_replayed_step_gives_the_bits_of_an_eager_one(family: str, watched: type[Watched]) -> None:
    """Three requests that decode, one that leaves, one that joins, and pages that grow."""
    prompts = random_prompts(0, [5, 17, 33], 90)
    logits = []
    for eager in (True, False):
        run, rng = runner(family, eager), random.Random(1)
        found = [run.step(dict(enumerate(prompts)))]
        for step in range(40):
            names = [0, 1, 2] if step < 20 else [0, 2]
            found.append(run.step({name: [rng.randrange(90)] for name in names}))
        logits.append([rows for step in found for rows in step.values()])
    assert not watched.last.refused
    assert watched.last.recorded == 2  # three requests, then two
    assert watched.last.replayed == 18 + 18  # of 20 steps each, one was recorded and one proved it
    assert all(torch.equal(a, b) for a, b in zip(*logits, strict=True))


def test_a_longer_page_table_is_recorded_anew(watched: type[Watched]) -> None:
    run, eager = (runner("llama", each, 20 * MIN_PAGES) for each in (False, True))
    (prompt,) = random_prompts(3, [16 * MIN_PAGES - 3], 90)
    for chunk in (prompt, *([token] for token in range(6))):
        assert torch.equal(run.step({0: chunk})[0], eager.step({0: chunk})[0])
    assert watched.last.recorded == 2


def test_a_size_that_came_once_is_not_recorded(watched: type[Watched]) -> None:
    run = runner("llama", False)
    run.step({0: [1, 2, 3]})
    assert watched.last.recorded == 0
    run.step({1: [4, 5, 6]})
    assert watched.last.recorded == 1


def test_a_long_step_is_recorded_once_its_size_came_as_often_as_its_proof_costs(watched: type[Watched]) -> None:
    run = runner("llama", False)
    (prompt,) = random_prompts(5, [3 * replay.TOKENS_PER_PROOF], 90)
    for turn in range(4):
        assert watched.last.recorded == 0
        run.step({turn: prompt})
        run.finish(turn)
    assert watched.last.recorded == 1


def test_another_cache_is_not_written_through_old_addresses(watched: type[Watched]) -> None:
    run = runner("llama", False)
    for token in (1, 2):
        first = run.step({0: [token]})[0]
    run.finish(0)
    old = [pages.clone() for pages in run.worker._state]
    kept = run.worker._state
    run.worker.recreate_cache()
    for token in (1, 2):
        again = run.step({0: [token]})[0]
    assert torch.equal(again, first)
    assert all(torch.equal(a, b) for a, b in zip(kept, old, strict=True))


def _batch(tokens: int, first: int = 0) -> Batch:
    of = torch.arange(first, first + tokens, dtype=torch.int32)
    group = Group(of, of[:, None], of + 1)
    return Batch(of, of, of, torch.arange(tokens + 1, dtype=torch.int32), of, (group,))


def test_a_step_whose_replay_gives_something_else_stays_eager_and_the_others_do_not(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Whatever it is that a replay leaves out: torch's functions, NumPy, a library's call."""
    calls = []

    def model(state: Any, batch: Batch) -> tuple[Outputs, Any]:
        calls.append(len(batch.token_ids))
        out = empty((len(batch.token_ids), 1), torch.float32)
        out.numpy()[:] = 0 if len(batch.token_ids) == 2 else batch.token_ids.numpy()[:, None] * 2
        return Outputs(out), state

    step = Replay(model, _cpu)
    with caplog.at_level("INFO"):
        for turn in range(4):
            for tokens in (3, 2):
                outputs, _ = step((), _batch(tokens, turn))
                assert outputs.logits is not None
                assert outputs.logits[:, 0].tolist() == [2.0 * (i + turn) * (tokens == 3) for i in range(tokens)]
    assert calls.count(3) == 4 and calls.count(2) == 2  # recorded, proven wrong, then run; recorded, proven, replayed
    assert list(step.refused.values()) == ["result 1 of 1 came out otherwise when the step was replayed"]
    assert len(caplog.records) == 1 and "steps of 3 tokens stay eager" in caplog.text


def test_what_a_replay_does_not_write_to_the_state_is_seen_without_any_output() -> None:
    """A chunk of a prompt gives nothing but the K and V that it writes."""
    calls = []

    def model(state: Any, batch: Batch) -> tuple[Outputs, Any]:
        calls.append(None)
        (group,) = batch.groups
        state[0][group.slot_mapping.long() // 16, 0, 0, group.slot_mapping.long() % 16, 0] = batch.token_ids.float()
        return Outputs(None), state

    step, state = Replay(model, _cpu), (torch.zeros(4, 1, 1, 16, 1),)
    for turn in range(4):
        step(state, _batch(3, turn))
        assert state[0].flatten()[turn : turn + 3].tolist() == [turn, turn + 1, turn + 2]
    assert len(calls) == 4 and list(step.refused.values()) == [
        "result 1 of 1 came out otherwise when the step was replayed"
    ]


def test_the_numbers_of_the_recording_prove_nothing() -> None:
    def model(state: Any, batch: Batch) -> tuple[Outputs, Any]:
        out = empty((2, 1), torch.float32)
        out.numpy()[:] = batch.token_ids.numpy()[:, None]
        return Outputs(out), state

    step = Replay(model, _cpu)
    for turn in (0, 0, 0, 5, 6):
        outputs, _ = step((), _batch(2, turn))
        assert outputs.logits is not None and outputs.logits[:, 0].tolist() == [turn, turn + 1]


def test_the_tokens_of_the_recording_on_other_pages_prove_nothing() -> None:
    """What a replay leaves out, computed of tokens alone, would be right by chance."""

    def model(state: Any, batch: Batch) -> tuple[Outputs, Any]:
        out = empty((2, 1), torch.float32)
        out.numpy()[:] = batch.token_ids.numpy()[:, None]
        return Outputs(out), state

    step = Replay(model, _cpu)
    for turn, token in ((0, 0), (1, 0), (2, 0), (5, 5), (6, 6)):
        outputs, _ = step((), _batch(2, turn)._replace(token_ids=_batch(2, token).token_ids))
        assert outputs.logits is not None and outputs.logits[:, 0].tolist() == [token, token + 1]


def test_all_sizes_give_their_outputs_in_the_same_memory(watched: type[Watched]) -> None:
    run, rng = runner("llama", False), random.Random(0)
    for count in (*range(1, 9), *range(1, 9), *range(1, 9)):
        run.step({name: [rng.randrange(90)] for name in range(count)})
    assert watched.last.recorded == 8 and not watched.last.refused
    places = {graph.outputs.logits.data_ptr() for graph in watched.last._graphs.values()}  # type: ignore[union-attr]
    assert len(places) < 8 and watched.last._arena.nbytes == SEGMENT


def test_a_long_step_that_is_not_recorded_has_memory_that_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Results that are still held are not written over; what is too large is not kept."""

    def model(state: Any, batch: Batch) -> tuple[Outputs, Any]:
        logits = empty((len(batch.token_ids), 4), torch.float32)
        return Outputs(logits.copy_(batch.token_ids[:, None].expand(-1, 4))), state

    step = Replay(model, _cpu)

    def logits(tokens: int) -> torch.Tensor:
        prompt = _batch(tokens)._replace(query_start_loc=torch.tensor([0, tokens], dtype=torch.int32))
        given = step((), prompt)[0].logits
        assert given is not None
        return given

    first, second = logits(replay.MANY_TOKENS), logits(replay.MANY_TOKENS + 1)
    assert step._scratch.nbytes == SEGMENT and first.data_ptr() != second.data_ptr()
    place, numbers = first.data_ptr(), second[:, 0].tolist()
    assert numbers == list(range(replay.MANY_TOKENS + 1)) == [*first[:, 0].tolist(), replay.MANY_TOKENS]
    del first
    gc.collect()
    assert logits(replay.MANY_TOKENS).data_ptr() == place
    monkeypatch.setattr(replay, "MAX_SCRATCH", SEGMENT - 1)
    logits(replay.MANY_TOKENS)
    assert step._scratch.nbytes == 0 and second[:, 0].tolist() == numbers


def test_a_step_that_fails_is_not_kept() -> None:
    fails = [True]

    def model(state: Any, batch: Batch) -> tuple[Outputs, Any]:
        if fails:
            fails.pop()
            raise RuntimeError("once")
        return Outputs(empty((len(batch.token_ids), 4), torch.float32)), state

    step = Replay(model, _cpu)
    with pytest.raises(RuntimeError, match="once"):
        step((), _batch(2))
    logits = step((), _batch(2))[0].logits
    assert logits is not None and logits.shape == (2, 4)
    graph = _cpu.Graph()
    graph.begin()  # nobody records any more
    graph.end()


def test_graphs_that_were_not_used_for_longest_go_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "MAX_GRAPHS", 2)
    recorded = []

    def model(state: Any, batch: Batch) -> tuple[Outputs, Any]:
        recorded.append(len(batch.token_ids))
        out = empty((1, 1), torch.float32)
        out.numpy()[:] = 7
        return Outputs(out), state

    step = Replay(model, _cpu)
    for turn, tokens in enumerate((1, 2, 1, 3, 1, 2)):
        step((), _batch(tokens, turn))
    assert recorded == [1, 2, 1, 3, 2]  # the third proves the first, and 2 has gone when it comes again


def test_the_arena_lends_again_what_came_back() -> None:
    arena = Arena()
    a, b, c = (arena.empty((1000,), torch.float32) for _ in range(3))
    places = [x.data_ptr() for x in (a, b, c)]
    assert all(place % 64 == 0 for place in places)
    assert places == sorted(places) and places[1] - places[0] >= 4000
    view = b[10:20].view(torch.int32)
    del b
    gc.collect()
    assert arena.empty((1000,), torch.float32).data_ptr() not in (places[1], places[0])  # a view still holds it
    del view
    assert arena.empty((1000,), torch.float32).data_ptr() == places[1]
    del a
    both = arena.empty((1900,), torch.float32)  # what came back beside each other is one piece
    assert both.data_ptr() == places[0]
    assert arena.nbytes == SEGMENT
    assert arena.empty((SEGMENT,), torch.float32).numel() == SEGMENT
    assert arena.nbytes == SEGMENT + 4 * SEGMENT
    assert arena.empty((0, 5), torch.bfloat16).shape == (0, 5)


def test_what_comes_back_while_a_piece_is_sought_spoils_nothing() -> None:
    """The collector ends tensors at any moment."""
    arena = Arena()
    a, b, c, _ = (arena.empty((1000,), torch.float32) for _ in range(4))
    held = [b]

    class Collecting(list[tuple[int, int, int]]):
        def __iter__(self) -> Iterator[tuple[int, int, int]]:
            held.clear()
            return super().__iter__()

    del a, b, c
    arena._free = Collecting(arena._free)
    first, second = (arena.empty((5000,), torch.float32) for _ in range(2))
    assert abs(first.data_ptr() - second.data_ptr()) >= first.nbytes


def test_results_lie_in_the_arena_while_it_lends_and_only_in_this_thread() -> None:
    arena = Arena()
    with use_arena(arena):
        inside = empty((3,), torch.float32)
    assert arena.nbytes == SEGMENT
    outside = empty((3,), torch.float32)
    assert abs(outside.data_ptr() - inside.data_ptr()) >= 64
    assert arena.nbytes == SEGMENT
