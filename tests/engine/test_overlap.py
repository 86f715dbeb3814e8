"""Steps that are planned and started while others run: the same tokens, and the device never waits for the host."""

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any

import pytest
import torch

from quintet.common.interrupts import DeferredSigint
from quintet.config import EngineConfig
from quintet.engine import startup
from quintet.engine.engine import Engine
from quintet.engine.request import PLACEHOLDER, CoreRequest, random_key
from quintet.engine.sampling.logits_processors import RequestLogitsProcessor, RowFunction
from quintet.interface.platform import CacheLost, Capabilities
from quintet.ops.embedding import place_tokens
from quintet.outputs import TokenDelta, TokenLogprobs
from quintet.platforms import SelectedPlatform
from quintet.sampling_params import SamplingParams
from quintet_tools.checkpoints.tiny import variant
from tests.helpers.platforms.behind import BehindDevice, Work, behind
from tests.helpers.platforms.loopback import LoopbackPlatform
from tests.helpers.platforms.null_engine import VOCAB, CtrlC, folder

SETTINGS = {"page_size": 4, "num_pages": 80, "max_model_len": 64, "max_num_seqs": 6, "max_num_batched_tokens": 24}
ENGINES: dict[str, dict[str, Any]] = {
    "plenty of pages": {},
    "chunks": {"max_num_batched_tokens": 7},
    "few pages": {"num_pages": 17},
    "few pages, chunks": {"num_pages": 17, "max_num_batched_tokens": 7},
    "no prefix cache": {"enable_prefix_caching": False, "num_pages": 17},
    "by priority": {"scheduling_policy": "priority", "num_pages": 17, "max_num_seqs": 3},
    "pages of one token": {"page_size": 1, "num_pages": 90},
    "whole prompts": {"enable_chunked_prefill": False, "max_num_seqs": 2},
}


@dataclass(frozen=True)
class Ask:
    name: str
    prompt: list[int]
    params: SamplingParams = field(default_factory=lambda: plain())
    stops: frozenset[int] = frozenset()
    bad_words: tuple[tuple[int, ...], ...] = ()
    priority: int = 0
    arrival: int = 0  # the step before which it comes
    leaves: int | None = None  # the step before which it is taken back

    def admitted(self) -> CoreRequest:
        key, room = random_key(self.params.seed or self.name, 0), SETTINGS["max_model_len"] - len(self.prompt)
        most = min(self.params.max_tokens or room, room)
        ends: dict[str, Any] = {"stop_ids": self.stops, "bad_words_ids": self.bad_words, "priority": self.priority}
        return CoreRequest(self.name, self.prompt, self.params, key, most, **ends)


@dataclass
class Said:
    """All that one request heard."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    scores: list[TokenLogprobs] = field(default_factory=list)
    reason: str | None = None
    stop: int | str | None = None
    error: str | None = None

    def hear(self, delta: TokenDelta) -> None:
        assert self.reason is None, "it had ended"
        self.tokens += delta.token_ids
        self.logprobs += delta.logprobs or []
        self.scores += delta.prompt_logprobs or []
        self.reason, self.stop, self.error = delta.finish_reason, delta.stop_reason, delta.error


def plain(max_tokens: int = 8, **more: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "max_tokens": max_tokens, "detokenize": False, **more})


class Served:
    """An engine whose device is behind the host."""

    def __init__(
        self,
        overlap: bool = True,
        static: bool = False,
        replaced: Mapping[str, Any] = MappingProxyType({}),
        **settings: Any,
    ) -> None:
        """replaced: functions of quintet.engine.startup that make a part, and what makes it in their place."""
        self.work = Work()
        given = {"load_format": "dummy", "skip_tokenizer_init": True, **SETTINGS, **settings}
        config = EngineConfig.from_kwargs(model=str(folder()), device="null", **given)
        prepared = startup.prepare(config, behind(self.work, overlap=overlap, static_shapes=static))
        self.work.take(prepared.ranks.workers[0].ops)
        with pytest.MonkeyPatch.context() as patch:
            for name, make in replaced.items():
                patch.setattr(startup, name, make)
            self.engine: Engine = startup.launch(prepared, progress=False)
        self.warm = set(self.work.calls)
        self.work.begin()
        self.interruptions = 0

    def run(self, *asks: Ask) -> dict[str, Said]:
        """Checks the books after every step; in the end nobody holds anything."""
        said: dict[str, Said] = {}
        waiting, step = sorted(asks, key=lambda ask: ask.arrival), 0
        while waiting or self.engine.busy:
            while waiting and waiting[0].arrival <= step:
                said[waiting[0].name] = Said()
                with DeferredSigint():  # as EngineClient adds requests
                    self.engine.add(waiting.pop(0).admitted())
            self.engine.abort([ask.name for ask in asks if ask.leaves == step])
            for delta in self._step():
                said[delta.request_id].hear(delta)
            self.engine.check_integrity()
            step += 1
            assert step < 3000, "it goes round in circles"
        assert self.engine.scheduler.pool.num_used == 0 and len(self.engine) == 0
        return said

    def _step(self) -> list[TokenDelta]:
        try:
            return self.engine.step()
        except KeyboardInterrupt:
            self.interruptions += 1
            return []


def traffic(seed: int, count: int = 9) -> list[Ask]:
    """Shared beginnings, lengths around the borders of pages, every kind of sampling, ends by token and by length."""
    rng = random.Random(seed)
    stems = [[rng.randrange(VOCAB) for _ in range(30)] for _ in range(2)]
    asks = []
    for index in range(count):
        prompt = rng.choice(stems)[: rng.choice([1, 3, 4, 8, 9, 20])]
        prompt = prompt + [rng.randrange(VOCAB) for _ in range(rng.choice([0, 0, 1, 5, 14]))]
        stops = frozenset(rng.sample(range(VOCAB), rng.choice([0, 5, 20])))
        words = rng.choice([(), (), ((3,),), ((3, 5), (7,))])
        times: dict[str, int] = {"priority": rng.randrange(3), "arrival": rng.randrange(8)}
        asks.append(Ask(f"{seed}.{index}", prompt, sampling(rng), stops, words, **times))
    return asks


def sampling(rng: random.Random) -> SamplingParams:
    kinds: list[dict[str, Any]] = [
        {},
        {},
        {"temperature": 1.0, "seed": rng.randrange(2**40)},
        {"temperature": 1.2, "seed": 5, "top_k": 7, "logit_bias": {4: 2.0}},
        {"temperature": 0.9, "seed": 6, "top_p": 0.8, "min_tokens": 3},
        {"temperature": 0.8, "seed": 7, "frequency_penalty": 0.7},
        {"repetition_penalty": 1.4, "presence_penalty": 0.3},
        {"prompt_logprobs": 2},
        {"allowed_token_ids": list(range(0, VOCAB, 3)), "min_tokens": 2},
    ]
    kind = rng.choice(kinds)
    most = max(rng.choice([1, 2, 5, 12, 20]), kind.get("min_tokens", 0))
    return plain(most, logprobs=rng.choice([None, None, 0, 3]), **kind)


def again(asks: list[Ask], said: Mapping[str, Said]) -> list[Ask]:
    """The next turn of a conversation: what was asked and said, and a little more. It finds pages of the first."""
    longer = [(ask, [*ask.prompt, *said[ask.name].tokens, 1]) for ask in asks]
    return [Ask(f"{ask.name} again", prompt[:50], plain(6), ask.stops) for ask, prompt in longer]


@pytest.mark.parametrize(
    ("how", "static"), [*((how, False) for how in ENGINES), ("few pages, chunks", True), ("plenty of pages", True)]
)
def test_random_traffic_says_what_it_says_without_overlap(how: str, static: bool) -> None:
    ours, theirs = Served(True, static, **ENGINES[how]), Served(False, static, **ENGINES[how])
    for seed in range(3):
        asks = traffic(seed)
        wanted = theirs.run(*asks)
        assert {said.reason for said in wanted.values()} <= {"stop", "length"}
        assert ours.run(*asks) == wanted, f"traffic {seed}"
        assert ours.run(*again(asks, wanted)) == theirs.run(*again(asks, wanted)), f"traffic {seed}, second turn"
    if "few pages" in how:
        assert ours.engine.stats().scheduler.num_preemptions > 0
    assert ours.engine.stats().scheduler.prefix_hits > 0 or "no prefix cache" in how
    assert max(ahead(ours.work)) > 0, "it never went ahead"
    assert not static or ours.work.calls <= ours.warm, "a program of a shape that was not compiled at the start"


def ahead(work: Work) -> list[int]:
    """For each wait, how many steps had been launched behind the one that was waited for."""
    launched, counts = 0, []
    for what, step in work.log:
        if what == "launch":
            launched = step
        else:
            counts.append(launched - step)
    return counts


@pytest.mark.parametrize("how", ["plenty of pages", "few pages, chunks", "pages of one token"])
def test_those_who_leave_take_nothing_from_others(how: str) -> None:
    ours, theirs = Served(**ENGINES[how]), Served(False, **ENGINES[how])
    for seed in range(3):
        rng, asks = random.Random(seed), traffic(seed)
        wanted = theirs.run(*asks)
        leaving = [Ask(**{**vars(ask), "leaves": rng.choice([None, ask.arrival + rng.randrange(9)])}) for ask in asks]
        for name, said in ours.run(*leaving).items():
            if said.reason is None:
                assert said.tokens == wanted[name].tokens[: len(said.tokens)], name
            else:
                assert said == wanted[name], name


FAILURES: list[tuple[str, BaseException]] = [
    (where, error)
    for where in ("launch", "run", "wait")
    for error in (RuntimeError("on fire"), CacheLost("gone"), KeyboardInterrupt())
    if not (where == "run" and isinstance(error, KeyboardInterrupt))  # a device is not interrupted
]


@pytest.mark.parametrize(("where", "error"), FAILURES, ids=str)
@pytest.mark.parametrize("how", ["plenty of pages", "few pages, chunks"])
def test_what_fails_ends_those_in_it_and_nobody_else_hears_anything_wrong(
    how: str, where: str, error: BaseException
) -> None:
    """Who goes on says what it would have said; who ends has said a beginning of it."""
    theirs = Served(False, **ENGINES[how])
    for seed in range(3):
        ours, asks, ended = Served(**ENGINES[how]), traffic(seed), 0
        wanted = theirs.run(*asks)
        ours.work.fails = [(where, step, error) for step in (seed, 3 + seed)]
        for name, said in ours.run(*asks).items():
            if said.reason == "error":
                assert said.tokens == wanted[name].tokens[: len(said.tokens)] and "on fire" in (said.error or ""), name
                ended += 1
            else:
                assert said == wanted[name], f"traffic {seed}, {name}"
        assert not ours.work.fails, "both happened"
        assert (ended > 0) == (type(error) is RuntimeError)
        assert ours.work.allocations == (3 if isinstance(error, CacheLost) else 1), "there is no room for two caches"
        assert ours.interruptions == (2 if isinstance(error, KeyboardInterrupt) else 0)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_step_that_always_takes_the_cache_with_it_ends_those_in_it(overlap: bool) -> None:
    """Once it is computed again; twice, the engine would go round in circles."""
    served = Served(overlap)
    wanted = served.run(Ask("b", [4, 5]))
    served.work.fails = [("run", served.work.step + 1, CacheLost("gone")) for _ in range(2)]
    said = served.run(Ask("a", [1, 2, 3]), Ask("b", [4, 5], arrival=12))
    assert said["a"].reason == "error" and "CacheLost: gone" in (said["a"].error or "")
    assert said["b"] == wanted["b"] and not served.work.fails and served.work.allocations == 3


@pytest.mark.parametrize("overlap", [False, True])
def test_after_ctrl_c_at_any_line_nothing_is_found_that_was_not_written(overlap: bool) -> None:
    """Also in the middle of planning: pages can be found as soon as a step is planned that fills them."""
    served, ask = Served(overlap), Ask("a", list(range(13)), plain(4))
    wanted = served.run(ask)
    for at in range(0, 100_000, 23):  # all of them would take a minute
        served.engine.reset_prefix_cache()
        with CtrlC(at) as ctrl_c:
            served.run(ask)
        if not ctrl_c.came:
            break
        served.engine.abort(["a"])
        assert served.run(ask) == wanted, at
    assert at > 300


def test_a_step_that_cannot_be_launched_is_heard_of_after_the_tokens_before_it() -> None:
    """In the same call: nothing is planned on top of it."""
    served = Served()
    served.work.fails = [("launch", 2, RuntimeError("on fire"))]
    served.engine.add(Ask("a", [1, 2, 3]).admitted())
    calls = [served.engine.step() for _ in range(3)]
    assert [[len(delta.token_ids) for delta in deltas] for deltas in calls] == [[], [1], [1, 0]]
    assert [delta.finish_reason for delta in calls[2]] == [None, "error"] and not served.engine.busy


def test_a_step_is_launched_before_the_host_waits_for_the_one_before() -> None:
    served = Served()
    served.run(Ask("a", [1, 2, 3], plain(4)), Ask("b", [4], plain(4)))
    launches = [("launch", 0), ("launch", 1), ("wait", 0), ("launch", 2), ("wait", 1), ("launch", 3), ("wait", 2)]
    assert served.work.log == [*launches, ("wait", 3)]
    assert served.work.requests == [2, 2, 2, 2], "nobody is computed further than the most that was asked for"


def test_without_overlap_each_step_is_waited_for() -> None:
    served = Served(overlap=False)
    served.run(Ask("a", [1, 2, 3], plain(3)))
    assert served.work.log == [(what, step) for step in range(3) for what in ("launch", "wait")]


def test_a_call_returns_what_the_step_before_gave() -> None:
    served = Served()
    served.engine.add(Ask("a", [1, 2, 3], plain(3)).admitted())
    counts = []
    while served.engine.busy:
        counts.append(sum(len(delta.token_ids) for delta in served.engine.step()))
    assert counts == [0, 1, 1, 1]


@pytest.mark.parametrize(
    "looking", [{"params": plain(9, frequency_penalty=0.5)}, {"params": plain(9), "bad_words": ((5, 6),)}], ids=str
)
def test_who_draws_by_what_it_said_stops_nobody_from_going_ahead(looking: dict[str, Any]) -> None:
    """The model of the next step is started; only its draw waits for the tokens of the one before."""
    served = Served()
    served.run(Ask("a", [1, 2, 3], plain(9)), Ask("b", [4], **looking))
    assert set(ahead(served.work)[:-1]) == {1} and len(served.work.requests) == 9


def test_a_draw_that_fails_ends_those_in_its_step_after_the_tokens_before_it() -> None:
    served = Served()
    served.engine.add(Ask("a", [1, 2, 3], plain(9, frequency_penalty=0.5)).admitted())
    penalize, left = served.engine._runner._ranks.workers[0].ops.penalize, [2]

    def broken(*args: Any) -> Any:
        left[0] -= 1
        if left[0] < 0:
            raise RuntimeError("on fire")
        return penalize(*args)

    served.engine._runner._ranks.workers[0].ops.__dict__["penalize"] = broken
    calls = [served.engine.step() for _ in range(3)]
    assert [[len(delta.token_ids) for delta in deltas] for deltas in calls] == [[], [1], [1, 0]]
    assert [delta.finish_reason for delta in calls[2]] == [None, "error"] and not served.engine.busy


class Echo(RequestLogitsProcessor):
    """Makes the last token the likeliest: what it sees must be the request's own tokens, all of them known."""

    def for_request(self, params: SamplingParams) -> RowFunction:
        assert isinstance(self.device, BehindDevice)
        work = self.device.work

        def function(prompt: Sequence[int], output: Sequence[int], logits: torch.Tensor) -> torch.Tensor:
            assert PLACEHOLDER not in output
            token = ([*prompt, *output][-1] + len(output)) % VOCAB
            work.add(lambda: logits[token].fill_(99))  # in its turn: the model's own logits come first
            return logits

        return function


def test_logits_processors_see_tokens_that_are_known_and_the_next_model_runs_meanwhile() -> None:
    said = []
    for overlap in (False, True):
        served = Served(overlap, logits_processors=[Echo])
        said.append(served.run(Ask("a", [1, 2, 3], plain(9)), Ask("b", [4], plain(6), frozenset([7]))))
        assert not overlap or set(ahead(served.work)[:-1]) == {1}
    assert said[0] == said[1] and said[0]["a"].tokens == [3, 4, 6, 9, 13, 18, 24, 31, 39]
    assert said[0]["b"].tokens == [4, 5, 7] and said[0]["b"].reason == "stop"


class Failing(RequestLogitsProcessor):
    """Fails for whoever asks for it, at the token that they name."""

    def for_request(self, params: SamplingParams) -> RowFunction | None:
        fails = (params.extra_args or {}).get("fails")
        if fails is None:
            return None

        def function(prompt: Sequence[int], output: Sequence[int], logits: torch.Tensor) -> torch.Tensor:
            if len(output) == fails:
                raise ValueError("no more of this")
            return logits

        return function


@pytest.mark.parametrize("fails", [0, 1, 3])
def test_a_processor_that_fails_ends_its_request_alone_while_the_next_step_is_planned(fails: int) -> None:
    said = []
    for overlap in (False, True):
        served = Served(overlap, logits_processors=[Failing])
        bad = plain(9, extra_args={"fails": fails}, logprobs=1)
        said.append(served.run(Ask("a", [1, 2, 3], plain(9, logprobs=2)), Ask("b", [4, 5], bad), Ask("c", [6])))
    assert said[0] == said[1]
    assert [(len(each.tokens), each.reason) for each in said[1].values()] == [
        (9, "length"),
        (fails, "error"),
        (8, "length"),
    ]
    assert "no more of this" in (said[1]["b"].error or "")


def test_min_tokens_and_words_of_one_token_need_nobody_to_wait() -> None:
    served = Served()
    served.run(Ask("a", [1, 2, 3], plain(6, min_tokens=4), frozenset([7]), ((9,),)))
    assert set(ahead(served.work)[:-1]) == {1}


def test_a_request_that_ends_by_a_token_has_one_row_too_many_and_it_is_dropped() -> None:
    served = Served()
    (free,) = served.run(Ask("a", [1, 2, 3], plain(9))).values()
    at = next(i for i, token in enumerate(free.tokens) if i and token not in free.tokens[:i])
    served.work.begin()
    served.engine.reset_prefix_cache()
    (ended,) = served.run(Ask("a", [1, 2, 3], plain(9), frozenset([free.tokens[at]]))).values()
    assert (ended.tokens, ended.reason) == (free.tokens[: at + 1], "stop")
    assert len(served.work.requests) == at + 2
    assert served.engine.stats().steps.num_generation_tokens == 9 + at + 1


def test_pages_of_one_who_ended_go_to_another_while_its_last_row_still_runs() -> None:
    """The next request gets its pages, and with them slots that a running step writes."""
    few: dict[str, Any] = {"num_pages": 4, "max_model_len": 12, "max_num_seqs": 1}
    served, calm = Served(**few), Served(False, **few)
    (free,) = calm.run(Ask("a", [1, 2, 3], plain(9))).values()
    stops = frozenset(free.tokens[2:3])
    asks = [Ask(str(i), [1 + 5 * i, 2, 3], plain(9), stops if i == 0 else frozenset()) for i in range(4)]
    assert served.run(*asks) == calm.run(*asks)


def test_nobody_is_preempted_for_pages_that_a_running_step_sets_free() -> None:
    """Eight pages, and a ninth is wanted just when the step that ends the second request runs."""
    asks = [Ask("a", list(range(15)), plain(6)), Ask("b", list(range(50, 62)), plain(2))]
    for overlap in (True, False):
        served = Served(overlap, num_pages=9, max_model_len=32, max_num_batched_tokens=32)
        served.run(*asks)
        assert served.engine.stats().scheduler.num_preemptions == 0


def test_a_page_that_an_unknown_token_fills_is_found_later() -> None:
    """By a page's hash, which is made when the token is known; the other engine's requests find as much."""
    found = []
    for overlap in (True, False):
        served = Served(overlap)
        (said,) = served.run(Ask("a", [1, 2, 3], plain(10))).values()
        served.run(Ask("b", [1, 2, 3, *said.tokens], plain(1)))
        found.append(served.engine.stats().scheduler.prefix_hits)
    assert found == [12, 12], "three pages of four; the token after them was never computed"


def test_logits_that_are_not_finite_end_their_request_and_nobody_reads_minus_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    served = Served()
    asks = [Ask("a", [1, 2, 3], plain(6)), Ask("b", [4], plain(6))]
    wanted = served.run(*asks)
    ops = served.engine._runner._ranks.workers[0].ops
    greedy, calls = ops.greedy, []

    def broken(logits: torch.Tensor) -> torch.Tensor:
        calls.append(logits)
        if len(calls) == 3:  # in its turn: the step's own logits come first
            served.work.add(lambda: logits[0].fill_(torch.nan))
        given: torch.Tensor = greedy(logits)
        return given

    monkeypatch.setitem(ops.__dict__, "greedy", broken)
    said = served.run(*asks)
    assert said["a"].reason == "error" and said["a"].tokens == wanted["a"].tokens[:2]
    assert said["b"] == wanted["b"]


def test_every_rank_takes_what_the_first_one_sampled() -> None:
    """Three ranks, threads of this process, in steps that are planned ahead: the tokens of one rank that waits."""
    said, placed = [], Counter[int]()
    for ranks, overlap in ((1, False), (3, True)):
        settings = {"model": str(variant("llama", "plain").folder), "tensor_parallel_size": ranks, "dtype": "float32"}
        config = EngineConfig.from_kwargs(skip_tokenizer_init=True, max_model_len=64, num_pages=32, **settings)
        facts = Capabilities(devices=3, dtypes=(torch.float32,), overlap=overlap)
        prepared = startup.prepare(config, SelectedPlatform(LoopbackPlatform, facts, "for a test"))
        for worker in prepared.ranks.workers:
            worker.ops.__dict__["place_tokens"] = partial(_counted, placed, worker.rank_info.rank)
        engine = startup.launch(prepared, progress=False)
        tokens: dict[str, list[int]] = {}
        for name, prompt in {"a": [3, 1, 4], "b": [1, 5], "c": [9, 2, 6, 5, 3, 5, 8, 9, 7, 9]}.items():
            engine.add(Ask(name, prompt).admitted())
            tokens[name] = []
        while engine.busy:
            for delta in engine.step():
                tokens[delta.request_id] += delta.token_ids
        said.append(tokens)
        prepared.ranks.close()
    assert said[0] == said[1] and all(len(tokens) == 8 for tokens in said[0].values())
    assert placed == {0: 7, 1: 7, 2: 7}, "each step but the first, on each rank"


def _counted(placed: Counter[int], rank: int, *args: torch.Tensor) -> torch.Tensor:
    placed[rank] += 1
    given: torch.Tensor = place_tokens(*args)
    return given


def test_place_tokens_takes_what_was_sampled() -> None:
    token_ids, sampled, rows = ([8, -1, 6, -1], [50, -1, 70], [-1, 2, -1, 1])
    placed = place_tokens(*(torch.tensor(x, dtype=torch.int32) for x in (token_ids, sampled, rows)))
    assert placed.tolist() == [8, 70, 6, 0] and placed.dtype == torch.int32
