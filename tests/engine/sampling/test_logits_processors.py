"""Logits processors: row bookkeeping against a model, the order of the pipeline, per-request functions, loading."""

import importlib.metadata

import hypothesis
import pytest
import torch
from hypothesis import strategies as st

from quintet.engine.sampling.load_processors import ENTRY_POINT_GROUP, load_processors
from quintet.engine.sampling.logits_processors import (
    AddedRequest,
    BatchUpdate,
    LogitsProcessor,
    ProcessorFailed,
    RequestLogitsProcessor,
    apply_batch_update,
    batch_update_between,
)
from quintet.engine.sampling.sampler import Sampler
from quintet.sampling_params import ParameterError, SamplingParams
from tests.helpers.platforms.sampling import HOST, VOCAB, HostDevice, bound, request

POOL = [request(str(i), [i], temperature=0) for i in range(9)]
ROWS = st.lists(st.permutations(range(9)).flatmap(lambda p: st.integers(0, 9).map(lambda n: list(p[:n]))), max_size=6)


def sampler(*processors: LogitsProcessor, mode: str = "raw_logprobs") -> Sampler:
    return Sampler(bound(HOST), HostDevice(), VOCAB, processors, mode)


class Recorder(LogitsProcessor):
    """Keeps, per row, whose it thinks that row is."""

    def __init__(self, invariant: bool = False) -> None:
        super().__init__(VOCAB, HostDevice())
        self.invariant = invariant
        self.rows: dict[int, AddedRequest] = {}
        self.updates: list[BatchUpdate | None] = []
        self.applied = 0

    def is_argmax_invariant(self) -> bool:
        return self.invariant

    def update(self, update):
        self.updates.append(update)
        if update is not None:
            self.rows = apply_batch_update(self.rows, update, lambda added: added)

    def apply(self, logits):
        self.applied += 1
        return logits


@hypothesis.settings(derandomize=True, max_examples=60, deadline=None)
@hypothesis.given(ROWS)
def test_following_the_updates_gives_the_rows(steps):
    before, rows = [], {}
    for step in steps:
        after = [POOL[i] for i in step]
        update = batch_update_between(before, after)
        rows = apply_batch_update(rows, update, lambda added: added.token_ids)
        assert update.size == len(after)
        assert {row: ids[0] for row, ids in rows.items()} == dict(enumerate(step))
        kept = [r for r in before if r in after]
        assert len(update.added) == len(after) - len(kept) and len(update.removed) == len(before) - len(kept)
        assert all(old != new for old, new in update.moved)
        before = after


def test_follow_forgets_rows_that_need_nothing():
    added = tuple(AddedRequest(row, SamplingParams(top_k=row), [row], 1) for row in range(4))
    rows = apply_batch_update({}, BatchUpdate(4, (), (), added), lambda a: a.row if a.params.top_k % 2 else None)
    assert rows == {1: 1, 3: 3}
    assert apply_batch_update(rows, BatchUpdate(2, (0, 2), ((3, 0),), ()), lambda a: None) == {1: 1, 0: 3}


def test_the_sampler_tells_each_step_what_changed():
    recorder = Recorder()
    sample, logits = sampler(recorder), torch.zeros(3, VOCAB)
    for rows in ([0, 1, 2], [0, 1, 2], [2, 3, 0], [2, 3, 0]):
        sample(logits[: len(rows)], [POOL[i] for i in rows])
        assert {row: added.token_ids[0] for row, added in recorder.rows.items()} == dict(enumerate(rows))
    first, second, third, fourth = recorder.updates
    assert (len(first.added), second, fourth, recorder.applied) == (3, None, None, 4)
    assert third.removed == (1,) and third.moved == ((2, 0), (0, 2)) and [a.row for a in third.added] == [1]


def test_a_step_that_fails_on_its_way_leaves_no_rows_behind(monkeypatch):
    """And what it had not settled is settled by the next, for the same requests too."""
    recorder = Recorder()
    s = sampler(recorder)
    some = [request("1", [1], temperature=1), request("2", [2], temperature=1)]
    logits = torch.randn(2, VOCAB)
    wanted = sampler()(logits.clone(), some).token_ids.tolist()
    with monkeypatch.context() as patched:
        patched.setattr(s.device, "to_device", lambda arrays: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            s(logits.clone(), some)
    assert s(logits.clone(), some).token_ids.tolist() == wanted
    with monkeypatch.context() as patched:
        patched.setattr(s.device, "to_device", lambda arrays: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            s(logits.clone(), some[::-1])
    s(logits[:1].clone(), [request("3", [3], temperature=0)])
    assert {row: added.token_ids for row, added in recorder.rows.items()} == {0: [3]}


def test_processors_that_keep_the_argmax_are_left_out_for_greedy_batches():
    early, late = Recorder(), Recorder(invariant=True)
    sampler(early, late)(torch.zeros(1, VOCAB), POOL[:1])
    assert (early.applied, late.applied) == (1, 0)
    sampler(early, late)(torch.zeros(1, VOCAB), [request("1", [1])])
    assert (early.applied, late.applied) == (2, 1)


class Order(Recorder):
    """Notes the logits of tokens 1 and 2 as it sees them."""

    def apply(self, logits):
        self.saw = logits[0, [1, 2]].tolist()
        return logits


def test_the_order_is_edits_then_temperature_then_late_processors():
    early, late = Order(), Order(invariant=True)
    r = request(
        "1", [1], temperature=0.5, logit_bias={1: 3.0, 2: 1.0}, repetition_penalty=2.0, allowed_token_ids=[1, 5]
    )
    sampler(early, late)(torch.ones(1, VOCAB), [r])
    assert early.saw == [1.0, float("-inf")]  # after allowed_token_ids, before the bias
    assert late.saw == [4.0, float("-inf")]  # (1 + 3) / 2 / 0.5


def test_a_late_processor_that_changes_nothing_changes_no_draw():
    some = [request(str(seed), [1], temperature=0.7, seed=seed) for seed in range(8)]
    logits = torch.randn(8, VOCAB)
    wanted = sampler()(logits.clone(), some).token_ids.tolist()
    assert sampler(Recorder(invariant=True))(logits.clone(), some).token_ids.tolist() == wanted
    assert wanted != logits.argmax(-1).tolist()


class Only(RequestLogitsProcessor):
    """Draws what extra_args says; after that, the first token of the prompt."""

    def for_request(self, params):
        token = (params.extra_args or {}).get("only")
        if token is None:
            return None
        if token == "broken":
            raise TypeError("no such token")

        def function(prompt_ids, output_ids, logits):
            chosen = prompt_ids[0] if output_ids else token
            logits[torch.arange(VOCAB) != chosen] = float("-inf")
            return logits

        return function

    @classmethod
    def validate(cls, params):
        if (params.extra_args or {}).get("only") == "refused":
            raise ParameterError("extra_args", "must name a token")


def test_a_function_per_request_follows_its_request():
    sample = sampler(Only(VOCAB, HostDevice()))
    a, b = request("1", [50], extra_args={"only": 7}), request("2", [60], extra_args={"only": 8})
    free, logits = request("3", [70], temperature=0), torch.zeros(3, VOCAB)
    logits[:, 9] = 5
    assert sample(logits.clone(), [a, free, b]).token_ids.tolist() == [7, 9, 8]
    for r in (a, b, free):
        r.append_sampled(1)
    assert sample(logits[:2].clone(), [b, a]).token_ids.tolist() == [60, 50]


def test_a_function_that_fails_names_its_row_and_the_others_go_on():
    sample = sampler(Only(VOCAB, HostDevice()))
    good, broken = request("1", [50], extra_args={"only": 7}), request("2", [60], extra_args={"only": "broken"})
    logits = torch.zeros(2, VOCAB)
    with pytest.raises(ProcessorFailed, match="Only failed.*no such token") as caught:
        sample(logits, [good, broken])
    assert caught.value.row == 1 and not logits.any()  # what is left of them is sampled next
    assert sample(torch.zeros(1, VOCAB), [good]).token_ids.tolist() == [7]


def test_classes_are_loaded_by_object_dotted_name_and_entry_point(monkeypatch):
    name = f"{Only.__module__}:Only"
    point = importlib.metadata.EntryPoint(
        "only", "tests.engine.sampling.test_logits_processors:Only", ENTRY_POINT_GROUP
    )
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: [point])
    loaded = load_processors([Only, name, "only"])
    assert [cls.__name__ for cls in loaded] == ["Only"] * 3
    with pytest.raises(ParameterError, match="extra_args"):
        loaded[0].validate(SamplingParams(extra_args={"only": "refused"}))


@pytest.mark.parametrize(
    "spec, message",
    [
        ("no.such.module:Class", "cannot be loaded"),
        ("quintet.common.suggestions:Missing", "cannot be loaded"),
        (":x", "cannot be loaded"),
        ("quintet.sampling_params:SamplingParams", "neither a subclass"),
        (dict, "neither a subclass"),
        (LogitsProcessor, "does not define apply, is_argmax_invariant, update"),
        ("unheard-of", "unknown logits processor 'unheard-of'"),
    ],
)
def test_what_is_no_processor_is_refused(spec, message):
    with pytest.raises(ValueError, match=message):
        load_processors([spec])
