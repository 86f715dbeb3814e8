"""The engine as an API process hears it: here the engine is a socket that says what a test wants."""

import asyncio
import dataclasses
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
import zmq

from quintet.chat.prompts import Prompt
from quintet.engine.observability.stats import SchedulerStats, Stats, StepStats
from quintet.engine.parallel.commands import SleepCommand, WakeUpCommand
from quintet.engine.processes import messages as wire
from quintet.engine.processes.model_facts import served
from quintet.engine.processes.model_info import ModelInfo
from quintet.outputs import RequestOutput, TokenDelta
from quintet.sampling_params import RequestOutputKind, SamplingParams
from quintet.server.backend import EngineLoading, EngineRefusal, SubmitRequest
from quintet.server.http.errors import as_api_error
from quintet.server.processes import remote_backend as remotes
from quintet.server.processes.remote_backend import RemoteBackend
from quintet.tokenizers.tokenizer import Tokenizer, load_tokenizer
from tests.helpers.checkpoints.tokenizers import byte_level
from tests.helpers.platforms.null_engine import null_client, until


class Engine:
    """The other end of a Remote's wire."""

    def __init__(self, folder: Path, count: int = 1, expected_tokenizer: Path | None = None) -> None:
        self.remote, self._context = RemoteBackend(folder, 0, step_timeout=10, num_engines=count), zmq.Context()
        self.remote.expected_tokenizer = expected_tokenizer
        self._socket = self._context.socket(zmq.PUSH)
        self._socket.connect(wire.worker_address(folder, 0))
        self.remote.start()

    def say(self, *messages: wire.FromEngine) -> None:
        for each in messages:
            self._socket.send(wire.encode(each))

    async def heard(self) -> None:
        """All that was said before."""
        answer = self.remote._answers[1] = asyncio.get_running_loop().create_future()
        self._socket.send(wire.encode(wire.Answer(1)))
        await asyncio.wait_for(answer, 60)

    def close(self) -> None:
        self.remote.close()
        self._context.destroy(0)


@pytest.fixture
async def engine(tmp_path: Path) -> AsyncIterator[Engine]:
    made = Engine(tmp_path)
    yield made
    made.close()


def told(running: int = 0, asleep: int = 0) -> Stats:
    return Stats(SchedulerStats(num_running=running), StepStats(step_sizes=(1, 2)), asleep=asleep)


def pulse(made: float, stats: Stats | None = None) -> wire.Pulse:
    return wire.Pulse(stats, 0.0, made)


def model(tokenizer: Path) -> ModelInfo:
    return dataclasses.replace(served(null_client().engine_plan), tokenizer=str(tokenizer))


async def test_a_pulse_that_was_overtaken_is_passed_over(engine: Engine) -> None:
    """Two threads of the engine tell how it does: what one read first may come last."""
    assert engine.remote.stats() is None
    engine.say(pulse(1.0, told()), pulse(3.0, told(asleep=1)), pulse(2.0, told()))
    await engine.heard()
    assert engine.remote.stats() == told(asleep=1)


async def test_silence_counts_from_the_first_sign_of_life(engine: Engine) -> None:
    """On a slow disk the engine's imports take longer than any patience."""
    assert engine.remote.hung_reason(0.0) is None
    engine.say(pulse(1.0))
    await engine.heard()
    await until(lambda: "no sign of life" in (engine.remote.hung_reason(0.0) or ""))
    engine.remote._engines._quiet = [5]
    why = engine.remote.unavailable_reason()
    assert why is not None and "no sign of life for 5 s" in why


async def test_a_process_that_stood_still_hears_what_waits_before_it_calls_the_engine_silent(engine: Engine) -> None:
    """Ctrl-Z and fg, a machine that was asleep: the signs of life were there, and nobody read them."""
    engine.say(pulse(1.0))
    await engine.heard()
    for _ in range(3):
        time.sleep(0.5)  # the loop with it
        engine.say(pulse(2.0))
        assert engine.remote.hung_reason(0.4) is None
        await asyncio.sleep(0)
        assert engine.remote.hung_reason(0.4) is None
        await engine.heard()


async def test_an_engine_that_sends_faster_than_it_is_read_leaves_turns_to_others(engine: Engine) -> None:
    """An answer that waits in the socket does not make recv() wait: the server's other work would stand still."""
    turns = 0

    async def work() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    engine.say(*(pulse(1.0) for _ in range(1000)))
    time.sleep(0.5)  # the loop with it: they are all there
    others = asyncio.create_task(work())
    await engine.heard()
    others.cancel()
    assert turns > 900


async def test_a_request_before_the_engine_has_loaded_is_asked_to_come_again(engine: Engine) -> None:
    with pytest.raises(EngineLoading) as caught:
        _ = engine.remote.model_info
    refused = as_api_error(caught.value)
    assert (refused.status, refused.code) == (503, "not_ready")


async def test_signs_of_life_are_heard_while_a_tokenizer_is_slow(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, held = threading.Event(), threading.Event()

    def slow(path: str) -> Tokenizer:
        begun.set()
        held.wait(60)
        return load_tokenizer(path)

    byte_level(tmp_path)
    monkeypatch.setattr(remotes, "load_tokenizer", slow)
    engine.say(wire.Hello(model(tmp_path), pulse(1.0)))
    await until(begun.is_set)
    engine.say(pulse(2.0, told(running=7)))
    await engine.heard()
    assert engine.remote.stats() == told(running=7)
    assert engine.remote.unavailable_reason() == "the engine is loading the model"
    held.set()
    assert engine.remote._meeting is not None
    await engine.remote._meeting
    engine.say(pulse(3.0))  # loading may have taken longer than its patience
    await engine.heard()
    assert engine.remote.unavailable_reason() is None and engine.remote.tokenizer is not None


async def test_a_tokenizer_that_cannot_be_loaded_is_a_reason(engine: Engine, tmp_path: Path) -> None:
    engine.say(wire.Hello(model(tmp_path), pulse(1.0)))
    await until(lambda: engine.remote.death_reason is not None)
    why = f"the model's tokenizer or a logits processor cannot be loaded: {tmp_path} holds no tokenizer: "
    assert engine.remote.death_reason is not None and engine.remote.death_reason.startswith(why)
    assert engine.remote.unavailable_reason() == engine.remote.death_reason


@pytest.mark.parametrize("expected", ["served", "another", "missing"])
async def test_a_tokenizer_is_loaded_while_the_engine_loads_if_it_is_the_one_that_is_served(
    expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = list[str]()

    def counting(path: str | Path) -> Tokenizer:
        loaded.append(Path(path).name)
        return load_tokenizer(path)

    for name in ("served", "another"):
        (tmp_path / name).mkdir()
        byte_level(tmp_path / name)
    monkeypatch.setattr(remotes, "load_tokenizer", counting)
    engine = Engine(tmp_path, expected_tokenizer=tmp_path / expected)
    await until(lambda: bool(loaded))
    engine.say(wire.Hello(model(tmp_path / "served"), pulse(1.0)))
    await until(lambda: engine.remote.unavailable_reason() is None)
    assert loaded == (["served"] if expected == "served" else [expected, "served"])
    engine.close()


async def ready(engine: Engine, folder: Path) -> RemoteBackend:
    """Once it knows the model."""
    byte_level(folder)
    engine.say(wire.Hello(model(folder), pulse(1.0)))
    await until(lambda: engine.remote._meeting is not None)
    assert engine.remote._meeting is not None
    await engine.remote._meeting
    return engine.remote


def wanted(*names: str) -> list[SubmitRequest]:
    return [SubmitRequest(name, Prompt([1, 2]), lambda output: None) for name in names]


def forgotten(remote: RemoteBackend) -> bool:
    return not (remote._deliver or len(remote._processor) or remote._processor._owners)


async def test_what_cannot_be_sent_is_not_remembered(engine: Engine, tmp_path: Path) -> None:
    remote = await ready(engine, tmp_path)
    with pytest.raises(OverflowError):
        remote.submit(wanted("a", "b"), SamplingParams(n=2, extra_args={"a": 2**64}))
    assert forgotten(remote)
    with pytest.raises(ValueError, match="max_model_len"):
        remote.submit([*wanted("a"), SubmitRequest("b", Prompt([1] * 500), lambda output: None)], SamplingParams())
    assert forgotten(remote)
    with pytest.raises(ValueError, match="'a' is in use"):
        remote.submit(wanted("c", "a", "a"), SamplingParams(n=2))
    assert forgotten(remote)
    remote.submit(wanted("a", "b"), SamplingParams(n=2))
    with pytest.raises(ValueError, match="'b' is in use"):
        remote.submit(wanted("c", "b"), SamplingParams())
    assert set(remote._deliver) == {"a", "b"} and len(remote._processor) == 2  # those that run go on
    for name in ("a", "b"):
        remote.abort(name)
    assert forgotten(remote)


async def test_what_a_closed_wire_does_not_take_is_not_remembered(engine: Engine, tmp_path: Path) -> None:
    remote = await ready(engine, tmp_path)
    remote._engines._outboxes[0].close(0)
    with pytest.raises(zmq.ZMQError):
        remote.submit(wanted("a", "b"), SamplingParams(n=2))
    assert forgotten(remote)
    with pytest.raises(zmq.ZMQError):
        await remote.sleep(1)
    assert not remote._answers


async def test_a_calls_requests_go_out_as_one_message(engine: Engine, tmp_path: Path) -> None:
    remote = await ready(engine, tmp_path)
    sent: list[bytes] = []
    outbox = type(
        "Outbox", (), {"send": lambda self, frame, flags: sent.append(frame), "close": print, "closed": False}
    )
    remote._engines._outboxes[0] = outbox()
    remote.submit(wanted("a", "b"), SamplingParams(n=2, extra_args={"a": "x" * 1000}))
    (frame,) = sent
    message = wire.decode_to_engine(frame)
    assert isinstance(message, wire.Submit) and len(frame) < 3000
    assert [each.request_id for each in message.requests()] == ["a#0", "a#1", "b#0", "b#1"]
    assert msgspec.msgpack.decode(frame)[0] == "Submit"


async def test_the_engines_settings_hold_for_requests_of_every_api_process(engine: Engine, tmp_path: Path) -> None:
    """Priorities count where the engine runs by them alone; streams come in the interval that was asked for."""
    byte_level(tmp_path)
    engine.say(wire.Hello(dataclasses.replace(model(tmp_path), stream_interval=3), pulse(1.0)))
    await until(lambda: engine.remote._meeting)
    assert engine.remote._meeting is not None
    await engine.remote._meeting
    outputs: list[RequestOutput] = []
    params = SamplingParams(output_kind=RequestOutputKind.DELTA, detokenize=False)
    with pytest.raises(ValueError, match="priority changes nothing here"):
        engine.remote.submit([SubmitRequest("a", Prompt([1]), outputs.append)], params, priority=1)
    engine.remote.submit([SubmitRequest("a", Prompt([1]), outputs.append)], params)
    for token in range(5):
        engine.say(wire.Deltas([TokenDelta("a", [token])]))
    await engine.heard()
    assert [list(each.outputs[0].token_ids) for each in outputs] == [[0], [1, 2, 3]]
    assert served(null_client(scheduling_policy="priority", stream_interval=5).engine_plan).by_priority
    assert served(null_client(stream_interval=5).engine_plan).stream_interval == 5


def test_parameters_reach_the_engine_as_they_are() -> None:
    params = SamplingParams(
        repetition_detection={"max_pattern_size": 4, "min_count": 3}, stream_interval=2, logprob_token_ids=[3, 1],
        logit_bias={1: 2.0}, extra_args={"a": [1]}, truncation_side="right",
    )  # fmt: skip
    sent = wire.Submit(0, params, frozenset([2]), (), 0, "", None, [])
    heard = wire.decode_to_engine(wire.encode(sent))
    assert isinstance(heard, wire.Submit) and heard.params == params


class Several(Engine):
    """Two engines' ends."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, 2)
        self._inboxes = [self._context.socket(zmq.PULL) for _ in range(2)]
        for number, inbox in enumerate(self._inboxes):
            inbox.bind(wire.engine_address(folder, number))

    async def asked(self, number: int) -> wire.ToEngine:
        """The next message to that engine."""
        await until(lambda: self._inboxes[number].poll(0))
        return wire.decode_to_engine(self._inboxes[number].recv())

    async def meet(self, folder: Path) -> None:
        byte_level(folder)
        lengths = (512, 256)
        for number, length in enumerate(lengths):
            assert isinstance(await self.asked(number), wire.Join)
            assert self.remote.unavailable_reason() == f"engine {number} of 2 is loading the model"
            served = dataclasses.replace(model(folder), max_model_len=length)
            self.say(wire.Hello(served, wire.Pulse(told(), 0.0, 1.0, number), number))
            await self.heard()
        await until(lambda: self.remote.unavailable_reason() is None)


@pytest.fixture
async def both(tmp_path: Path) -> AsyncIterator[Several]:
    made = Several(tmp_path)
    await made.meet(tmp_path)
    yield made
    made.close()


def submitted(message: wire.ToEngine) -> list[str]:
    assert isinstance(message, wire.Submit)
    return [each.request_id for each in message.requests()]


async def test_a_calls_prompts_are_shared_out_and_come_home_by_their_ids(both: Several) -> None:
    assert both.remote.model_info.max_model_len == 256, "any prompt may come to any of them"
    outputs: list[RequestOutput] = []
    names = [SubmitRequest(name, Prompt([token]), outputs.append) for token, name in enumerate("abc", 1)]
    both.remote.submit(names, SamplingParams(n=2, detokenize=False))
    assert submitted(await both.asked(0)) == ["a#0", "a#1", "c#0", "c#1"]
    assert submitted(await both.asked(1)) == ["b#0", "b#1"]
    assert both.remote._engines._router is not None and both.remote._engines._router.loads == [4, 2]
    both.say(wire.Deltas([TokenDelta(f"b#{i}", [i], finish_reason="stop") for i in range(2)], 1))
    await both.heard()
    assert [each.request_id for each in outputs] == ["b"] and outputs[0].finished
    both.remote.abort("a")
    assert both.remote._engines._router.loads == [2, 0]
    for number in range(2):
        message = await both.asked(number)
        assert isinstance(message, wire.Abort) and set(message.request_ids) == {"a#0", "a#1"}
    with pytest.raises(ValueError, match="'c' is in use"):
        both.remote.submit([SubmitRequest("c", Prompt([1]), outputs.append)], SamplingParams())
    assert both.remote._engines._router.loads == [2, 0], "those that run go on"


async def test_the_silent_one_of_two_is_named_and_the_other_serves(both: Several) -> None:
    both.remote._engines._quiet = [0.0, 9.0]
    assert both.remote.hung_reason() == "engine 1 of 2 has given no sign of life for 9 s"
    assert both.remote.unavailable_reason() is None
    for number in range(4):
        both.remote.submit([SubmitRequest(f"{number}", Prompt([number]), lambda output: None)], SamplingParams())
    assert both.remote._engines._router.loads == [4, 0]
    both.remote._engines._quiet = [8.0, 9.0]
    assert both.remote.unavailable_reason() == "engine 0 of 2 has given no sign of life for 8 s"
    both.say(wire.Deltas([], 1))
    await both.heard()
    both.say(wire.Pulse(told(), 11.0, 2.0, 1))
    await both.heard()
    assert both.remote.hung_reason(20.0) == "engine 1 of 2 has been in one step for 11 s"


async def test_sleep_that_one_refuses_wakes_the_other(both: Several) -> None:
    sleeping = asyncio.get_running_loop().create_task(both.remote.sleep(1))
    orders = [await both.asked(number) for number in range(2)]
    assert all(isinstance(each, wire.Order) and isinstance(each.work, SleepCommand) for each in orders)
    both.say(wire.Answer(orders[1].number, "it has requests", engine=1), wire.Answer(orders[0].number))  # type: ignore[union-attr]
    for number in range(2):
        order = await both.asked(number)
        assert isinstance(order, wire.Order) and isinstance(order.work, WakeUpCommand)
        both.say(wire.Answer(order.number, engine=number))
    with pytest.raises(EngineRefusal, match="it has requests"):
        await sleeping
    assert set(both.remote._answers) <= {1}, "nothing is waited for, but by this test"


async def test_numbers_of_two_engines_are_one_servers(both: Several) -> None:
    both.say(*[wire.Pulse(told(running=number + 1), 0.0, 2.0, number) for number in range(2)])
    await both.heard()
    stats = both.remote.stats()
    assert stats is not None and stats.scheduler.num_running == 3
    assert [each.scheduler.num_running for _, each in both.remote.engines()] == [1, 2]
