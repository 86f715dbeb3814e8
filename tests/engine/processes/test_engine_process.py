"""The engine's end of the wire, obeyed message by message: here the API process is a socket."""

import os
import time
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
import zmq

from quintet.chat.prompts import Prompt
from quintet.chat.reasoning_tokens import ReasoningMarkerIds
from quintet.engine.parallel.commands import SleepCommand, WakeUpCommand
from quintet.engine.processes import messages as wire
from quintet.engine.processes.engine_process import Core, Pulse, Shutdown, Sockets, warms_grammars
from quintet.engine.processes.model_facts import served
from quintet.engine.processes.served_adapters import ServedAdapters
from quintet.engine.request import CoreRequest
from quintet.interface.platform import Capabilities
from quintet.lora.request import LoRAReference
from quintet.media.items import MediaItem
from quintet.pooling_params import PoolingParams
from quintet.sampling_params import SamplingParams
from quintet.transcription.alignment import AlignmentSpan
from tests.helpers.platforms.null_engine import VOCAB, greedy, null_client


class Wired:
    """A Core with two API processes, whose messages are told() here."""

    def __init__(self, folder: Path) -> None:
        self.client, self.context = null_client(), zmq.Context()
        self._inboxes = [self.context.socket(zmq.PULL) for _ in range(2)]
        for worker, inbox in enumerate(self._inboxes):
            inbox.bind(wire.worker_address(folder, worker))
        engine, pulse = self.client.engine, Pulse(self.context, folder, range(2))
        pulse.engine = engine
        prepared = self.client.engine_plan
        sockets = Sockets(self.context, folder, 0, range(2))
        adapters = ServedAdapters(None, sockets.send, lambda: None)
        self.core = Core(sockets, engine, prepared, served(prepared), pulse, adapters)

    def obey(self, *messages: wire.ToEngine) -> None:
        for each in messages:
            self.core._obey(each)

    def told(self, worker: int = 0) -> Any:
        assert self._inboxes[worker].poll(60_000)
        return wire.decode_from_engine(self._inboxes[worker].recv())

    def submit(self, name: str) -> wire.Submit:
        return wire.Submit.of(0, [self.client.input_processor.admit(name, Prompt([1, 2]), greedy(), 0)])


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Wired]:
    made = Wired(tmp_path)
    yield made
    made.context.destroy(0)


def test_everybody_hears_of_sleep_first_and_what_cannot_be_is_refused_in_words(engine: Wired) -> None:
    engine.obey(wire.Order(0, 5, SleepCommand(1)))
    assert engine.told().stats.asleep == 1
    slept = engine.told()
    assert slept == wire.Answer(5, freed=slept.freed) and slept.freed > 0
    engine.obey(wire.Order(0, 6, SleepCommand(2)))
    why = "the engine sleeps at level 1; wake it up before it sleeps at level 2"
    assert engine.told() == wire.Answer(6, why, "ValueError")
    engine.obey(engine.submit("late"))
    (delta,) = engine.told().deltas
    assert (delta.request_id, delta.finish_reason) == ("late", "error") and "the engine is asleep" in delta.error
    engine.obey(wire.Order(0, 7, WakeUpCommand()))
    assert engine.told().stats.asleep == 0 and engine.told() == wire.Answer(7)
    engine.obey(engine.submit("late"), wire.Order(0, 8, SleepCommand(1)))
    assert "the engine has 1 requests" in engine.told().refused


def test_what_the_engine_refuses_ends_that_request_alone(engine: Wired) -> None:
    """An id that another process's request has: that one goes on, and so does the engine."""
    engine.obey(engine.submit("same"))
    engine.obey(wire.Submit.of(1, [engine.submit(name).requests() for name in ("same", "other")]))
    (delta,) = engine.told(1).deltas
    assert (delta.request_id, delta.finish_reason) == ("same", "error") and "is in use" in delta.error
    heard: dict[int, dict[str, int]] = {0: {}, 1: {}}
    while engine.client.engine.busy:
        engine.core._step()
        for worker, counts in heard.items():
            for delta in engine.told(worker).deltas:
                assert delta.error is None
                counts[delta.request_id] = counts.get(delta.request_id, 0) + len(delta.token_ids)
    assert heard == {0: {"same": 8}, 1: {"other": 8}}


def test_admitted_requests_come_off_the_wire_as_they_were_sent(engine: Wired) -> None:
    prompts = [("a", Prompt([1, 2], cache_salt="s")), ("b", Prompt([3]))]
    admitted = engine.client.input_processor.admit_all(prompts, greedy(n=3, stop_token_ids=[5]))
    sent = wire.decode_to_engine(wire.encode(wire.Submit.of(0, admitted)))
    assert isinstance(sent, wire.Submit) and sent.requests() == [*admitted[0], *admitted[1]]
    assert isinstance(sent.requests()[0].stop_ids, frozenset)


def test_every_fact_of_a_request_crosses_the_wire() -> None:
    marks = ReasoningMarkerIds(opens=((3,),), closes=((4,),), forced=(4,))
    facts: dict[str, Any] = {
        "request_id": "a", "prompt_ids": [1, 2], "params": SamplingParams(seed=3), "random_key": (4, 5),
        "max_tokens": 6, "stop_ids": frozenset({7}), "bad_words_ids": ((8,),), "salt": b"s", "priority": 9,
        "arrival": 1.5, "returns_prompt_logprobs": False, "embeds": b"1234", "grammar": "g",
        "reasoning_marker_ids": marks, "open_reasoning_tokens": 2, "pooling": PoolingParams(dimensions=2),
        "pooled_rows": "last", "token_types": b"5678", "lora": LoRAReference("l", "/l", b"d", 3),
        "encoder": MediaItem("audio", b"e"), "media": (MediaItem("image", b"m", spans=((0, 1),)),),
        "alignment": AlignmentSpan(1, 2), "sees_prompt": True,
    }  # fmt: skip
    sent = CoreRequest(**facts)
    assert [each.name for each in fields(CoreRequest)] == [*facts] and all(
        getattr(sent, each.name) != each.default for each in fields(CoreRequest)
    )
    [found] = wire.decode_to_engine(wire.encode(wire.Submit.of(0, [[sent]]))).requests()
    assert found == sent


def test_what_the_requests_of_a_call_share_is_sent_and_held_once(engine: Wired) -> None:
    """A thousand completions of one call with all of a vocabulary allowed were a thousand lists in the engine."""
    prompts = [(f"{each}", Prompt([1, 2])) for each in range(64)]
    params = greedy(n=16, extra_args={"a": "x" * 10_000}, allowed_token_ids=list(range(VOCAB)))
    frame = wire.encode(wire.Submit.of(0, engine.client.input_processor.admit_all(prompts, params)))
    assert len(frame) < 100_000
    sent = wire.decode_to_engine(frame)
    assert isinstance(sent, wire.Submit) and len({id(each.params) for each in sent.requests()}) == 1
    assert len({id(each.prompt_ids) for each in sent.requests()}) == 64


def test_what_came_after_its_process_was_given_up_ends_when_another_joins(engine: Wired) -> None:
    engine.obey(engine.submit("early"), wire.Leave(0), engine.submit("late"))
    assert len(engine.client.engine) == 1
    engine.obey(wire.Join(0))
    assert len(engine.client.engine) == 0 and isinstance(engine.told(), wire.Hello)


def test_a_steps_time_counts_in_beats(engine: Wired) -> None:
    """A process that stood still for minutes, in the midst of a step, is not one whose step takes minutes."""
    pulse = engine.core._pulse
    pulse.step_began = time.monotonic() - 100
    pulse._count()
    assert pulse.message().stepping == wire.BEAT
    pulse._count(), pulse._count()
    assert pulse.message().stepping == 3 * wire.BEAT
    pulse.step_began = time.monotonic()
    pulse._count()
    assert pulse.message().stepping <= wire.BEAT
    pulse.step_began = 0.0
    pulse._count()
    assert pulse.message().stepping == 0.0


class Elsewhere:
    """Ranks of other machines."""

    pids = ()

    def __init__(self, did: list[str]) -> None:
        self._did = did

    def close(self) -> None:
        self._did.append("they are told")


def test_other_machines_hear_of_the_end_and_go_before_this_process(
    engine: Wired, monkeypatch: pytest.MonkeyPatch
) -> None:
    did, farewell, ranks = list[str](), Shutdown(), engine.client.engine_plan.ranks
    monkeypatch.setattr(os, "_exit", lambda code: did.append(f"exits with {code}"))
    farewell("before they have started")
    monkeypatch.setattr(ranks, "remote_ranks", Elsewhere(did))
    monkeypatch.setattr(ranks.workers[0].comm, "leave", lambda: did.append("they are waited for"))
    farewell.ranks = ranks
    farewell("")
    assert did == ["exits with 0", "they are told", "they are waited for", "exits with 0"]


def test_a_vocabulary_for_grammars_is_made_ahead_where_weights_are_not_in_host_memory() -> None:
    pytest.importorskip("llguidance")
    assert warms_grammars(Capabilities(1, (torch.float32,)))
    assert not warms_grammars(Capabilities(1, (torch.float32,), layout_key="tiles"))
