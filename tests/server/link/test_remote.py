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

from quintet.engine.prompts import Prompt
from quintet.engine.stats import Stats
from quintet.engine.tokenizer import Tokenizer, load_tokenizer
from quintet.outputs import RequestOutput, TokenDelta
from quintet.sampling_params import RequestOutputKind, SamplingParams
from quintet.server.backend import Served, Wanted
from quintet.server.link import remote as remotes
from quintet.server.link import wire
from quintet.server.link.core import served
from quintet.server.link.remote import Remote
from tests.helpers.null_engine import null_client, until
from tests.helpers.tokenizers import byte_level


class Engine:
    """The other end of a Remote's wire."""

    def __init__(self, folder: Path) -> None:
        self.remote, self._context = Remote(folder, 0, step_timeout=10), zmq.Context()
        self._socket = self._context.socket(zmq.PUSH)
        self._socket.connect(wire.worker_address(folder, 0))
        self.remote.start()

    def say(self, *messages: wire.Hello | wire.Pulse | wire.Deltas) -> None:
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
    return Stats(running, 0, 0.0, 0, 0, 0, 0, 0, 0, 0, asleep=asleep, step_sizes=(1, 2), accepted_at=())


def pulse(made: float, stats: Stats | None = None) -> wire.Pulse:
    return wire.Pulse(stats, 0.0, made)


def model(tokenizer: Path) -> Served:
    return dataclasses.replace(served(null_client().prepared), tokenizer=str(tokenizer))


async def test_a_pulse_that_was_overtaken_is_passed_over(engine: Engine) -> None:
    """Two threads of the engine tell how it does: what one read first may come last."""
    assert engine.remote.stats() is None
    engine.say(pulse(1.0, told()), pulse(3.0, told(asleep=1)), pulse(2.0, told()))
    await engine.heard()
    assert engine.remote.stats() == told(asleep=1)


async def test_silence_counts_from_the_first_sign_of_life(engine: Engine) -> None:
    """On a slow disk the engine's imports take longer than any patience."""
    assert engine.remote.hung(0.0) is None
    engine.say(pulse(1.0))
    await engine.heard()
    await until(lambda: "no sign of life" in (engine.remote.hung(0.0) or ""))
    engine.remote._quiet = 5
    why = engine.remote.trouble()
    assert why is not None and "no sign of life for 5 s" in why


async def test_a_process_that_stood_still_hears_what_waits_before_it_calls_the_engine_silent(engine: Engine) -> None:
    """Ctrl-Z and fg, a machine that was asleep: the signs of life were there, and nobody read them."""
    engine.say(pulse(1.0))
    await engine.heard()
    for _ in range(3):
        time.sleep(0.5)  # the loop with it
        engine.say(pulse(2.0))
        assert engine.remote.hung(0.4) is None
        await asyncio.sleep(0)
        assert engine.remote.hung(0.4) is None
        await engine.heard()


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
    assert engine.remote.trouble() == "the engine is loading the model"
    held.set()
    assert engine.remote._meeting is not None
    await engine.remote._meeting
    engine.say(pulse(3.0))  # loading may have taken longer than its patience
    await engine.heard()
    assert engine.remote.trouble() is None and engine.remote.tokenizer is not None


async def test_a_tokenizer_that_cannot_be_loaded_is_a_reason(engine: Engine, tmp_path: Path) -> None:
    engine.say(wire.Hello(model(tmp_path), pulse(1.0)))
    await until(lambda: engine.remote.dead is not None)
    why = f"the model's tokenizer or a logits processor cannot be loaded: {tmp_path} holds no tokenizer: "
    assert engine.remote.dead is not None and engine.remote.dead.startswith(why)
    assert engine.remote.trouble() == engine.remote.dead


async def ready(engine: Engine, folder: Path) -> Remote:
    """Once it knows the model."""
    byte_level(folder)
    engine.say(wire.Hello(model(folder), pulse(1.0)))
    await until(lambda: engine.remote._meeting is not None)
    assert engine.remote._meeting is not None
    await engine.remote._meeting
    return engine.remote


def wanted(*names: str) -> list[Wanted]:
    return [Wanted(name, Prompt([1, 2]), lambda output: None) for name in names]


def forgotten(remote: Remote) -> bool:
    return not (remote._deliver or len(remote._processor) or remote._processor._owners)


async def test_what_cannot_be_sent_is_not_remembered(engine: Engine, tmp_path: Path) -> None:
    remote = await ready(engine, tmp_path)
    with pytest.raises(OverflowError):
        remote.submit(wanted("a", "b"), SamplingParams(n=2, extra_args={"a": 2**64}))
    assert forgotten(remote)
    with pytest.raises(ValueError, match="max_model_len"):
        remote.submit([*wanted("a"), Wanted("b", Prompt([1] * 500), lambda output: None)], SamplingParams())
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
    remote._outbox.close(0)
    with pytest.raises(zmq.ZMQError):
        remote.submit(wanted("a", "b"), SamplingParams(n=2))
    assert forgotten(remote)
    with pytest.raises(zmq.ZMQError):
        await remote.sleep(1)
    assert not remote._answers


async def test_a_calls_requests_go_out_as_one_message(engine: Engine, tmp_path: Path) -> None:
    remote = await ready(engine, tmp_path)
    sent: list[bytes] = []
    remote._outbox = type("Outbox", (), {"send": lambda self, frame, flags: sent.append(frame), "close": print})()
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
        engine.remote.submit([Wanted("a", Prompt([1]), outputs.append)], params, priority=1)
    engine.remote.submit([Wanted("a", Prompt([1]), outputs.append)], params)
    for token in range(5):
        engine.say(wire.Deltas([TokenDelta("a", [token])]))
    await engine.heard()
    assert [list(each.outputs[0].token_ids) for each in outputs] == [[0], [1, 2, 3]]
    assert served(null_client(scheduling_policy="priority", stream_interval=5).prepared).by_priority
    assert served(null_client(stream_interval=5).prepared).stream_interval == 5


def test_parameters_reach_the_engine_as_they_are() -> None:
    params = SamplingParams(
        repetition_detection={"max_pattern_size": 4, "min_count": 3}, stream_interval=2, logprob_token_ids=[3, 1],
        logit_bias={1: 2.0}, extra_args={"a": [1]}, truncation_side="right",
    )  # fmt: skip
    sent = wire.Submit(0, params, frozenset([2]), (), 0, "", None, [])
    heard = wire.decode_to_engine(wire.encode(sent))
    assert isinstance(heard, wire.Submit) and heard.params == params
