"""Clients of engine processes: liveness, statistics, and the choice of an engine for a request."""

from collections.abc import Container, Sequence
from dataclasses import replace
from pathlib import Path

import zmq

from quintet.engine.data_parallel.balancing import LoadBalancer
from quintet.engine.observability.stats import Stats, total
from quintet.engine.processes import messages as wire
from quintet.engine.processes.model_info import ModelInfo
from quintet.engine.request import CoreRequest

MAX_SILENCE = 8 * wire.BEAT  # seconds without a sign of life after which nothing new is sent to the engine


class EngineClients:
    """The engines of one server or LLM. One thread at a time."""

    def __init__(
        self, context: "zmq.Context[zmq.Socket[bytes]]", folder: Path, count: int, step_timeout: float
    ) -> None:
        self.count, self._step_timeout = count, step_timeout
        self._outboxes = [wire.push(context, wire.engine_address(folder, each)) for each in range(count)]
        self._pulses = [wire.Pulse(None, 0.0, 0.0)] * count
        # Seconds since each one's latest sign of life, counted in turns of the loop: while this process stands still
        # they wait in its inbox. None before the first: Python and torch are not there.
        self._quiet: list[float | None] = [None] * count
        self._served: dict[int, ModelInfo] = {}
        self._router: LoadBalancer | None = None  # once all are loaded

    def send(self, engine: int, frame: bytes) -> None:
        self._outboxes[engine].send(frame, zmq.NOBLOCK)

    def tell_all(self, message: wire.ToEngine) -> None:
        if not self._outboxes[0].closed:  # closed: this process ends, and messages about its last calls are dropped
            frame = wire.encode(message)
            for engine in range(self.count):
                self.send(engine, frame)

    def close(self) -> None:
        for outbox in self._outboxes:
            outbox.close(0)

    def hear(self, message: wire.FromEngine) -> None:
        """Notes a sign of life, and the statistics in it. Two threads of an engine send those: one that was made before
        the last may come after it."""
        self._quiet[message.engine] = 0.0
        pulse = message.pulse if isinstance(message, wire.Hello) else message
        if isinstance(pulse, wire.Pulse) and pulse.made >= self._pulses[pulse.engine].made:
            self._pulses[pulse.engine] = pulse
            if self._router is not None and pulse.stats is not None:
                self._router.update_load(pulse.engine, pulse.stats)

    def meet(self, hello: wire.Hello) -> ModelInfo | None:
        """Returns what all engines serve together, once each has sent Hello: a request may go to any of them."""
        self._served[hello.engine] = hello.served
        if len(self._served) < self.count:
            return None
        each = [self._served[engine] for engine in range(self.count)]
        self._router = LoadBalancer(self.count, each[0].page_size)
        return replace(
            each[0],
            max_model_len=min(one.max_model_len for one in each),
            num_pages=sum(one.num_pages for one in each),
            kv_tokens=sum(one.kv_tokens for one in each),
            step_tokens=sum(one.step_tokens for one in each),
        )

    def turn(self, seconds: float) -> None:
        """Counts silence; to be called every so many seconds."""
        self._quiet = [None if each is None else each + seconds for each in self._quiet]

    def hung(self, silence: float, ended: Container[int] = (), every: bool = False) -> tuple[int, str] | None:
        """Returns an engine that counts as hung, and why: so many seconds without a sign of life, or a step that takes
        too long. None if there is none, besides those that have `ended`, or, with `every`, if one of them lives."""
        living = [engine for engine in range(self.count) if engine not in ended]
        found = [(engine, why) for engine in living if (why := self._hung_reason(engine, silence)) is not None]
        return found[0] if found and (not every or len(found) == len(living)) else None

    def _hung_reason(self, engine: int, silence: float) -> str | None:
        quiet, pulse = self._quiet[engine] or 0.0, self._pulses[engine]
        if quiet > silence:
            return f"{self._name(engine)} has given no sign of life for {quiet:.0f} s"
        if pulse.stepping > self._step_timeout:
            return f"{self._name(engine)} has been in one step for {pulse.stepping:.0f} s"
        return None

    def _name(self, engine: int) -> str:
        return wire.engine_name(engine, self.count)

    def loading(self) -> str:
        """Returns a message that names an engine which is loading, if all live."""
        waited = next((engine for engine in range(self.count) if engine not in self._served), 0)
        return f"{self._name(waited)} is loading the model"

    def stats(self) -> Stats | None:
        """Returns the statistics of all engines together; None while one is loading."""
        known = [each.stats for each in self._pulses if each.stats is not None]
        return total(known) if len(known) == self.count else None

    def each(self) -> list[tuple[ModelInfo, Stats]]:
        """Returns what each engine serves and its statistics, of engines that have sent both."""
        return [
            (self._served[engine], pulse.stats)
            for engine, pulse in enumerate(self._pulses)
            if engine in self._served and pulse.stats is not None
        ]

    def shares(
        self, admitted: Sequence[Sequence[CoreRequest]], names: Sequence[str]
    ) -> dict[int, list[Sequence[CoreRequest]]]:
        """Chooses an engine for each prompt of a call; prompts count for their engine until close_request()."""
        found: dict[int, list[Sequence[CoreRequest]]] = {}
        for name, each in zip(names, admitted, strict=True):
            found.setdefault(self.choose(name, each[0], len(each)), []).append(each)
        return found

    def choose(self, name: str, request: CoreRequest, weight: int = 1) -> int:
        """Chooses an engine for a request of so many completions, which counts for it until close_request(). Engines
        that count as hung get none while another lives."""
        assert self._router is not None, "nothing is submitted before all are loaded"
        hung = [engine for engine in range(self.count) if self._hung_reason(engine, MAX_SILENCE) is not None]
        return self._router.choose(name, request.prompt_ids, request.salt + request.embeds, weight, hung)

    def engine_of(self, name: str) -> int | None:
        """Returns the engine of a request that has not ended."""
        return None if self._router is None else self._router.engine_of(name)

    def close_request(self, name: str) -> None:
        """Notes that a request has ended, in any way."""
        if self._router is not None:
            self._router.close(name)

    def forget(self) -> None:
        """Notes that the prefix caches of the engines were emptied."""
        if self._router is not None:
            self._router.clear_prefixes()
