"""The engines of one server as an API process sees them: who lives, how it goes, and which takes a request."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import zmq

from quintet.engine.request import Admitted
from quintet.engine.several.routing import Router
from quintet.engine.stats import Stats, total
from quintet.server.backend import Served
from quintet.server.link import wire


class Engines:
    """Used in one event loop."""

    def __init__(
        self, context: "zmq.Context[zmq.Socket[bytes]]", folder: Path, count: int, step_timeout: float
    ) -> None:
        self.count, self._step_timeout = count, step_timeout
        self._outboxes = [_push(context, wire.engine_address(folder, each)) for each in range(count)]
        self._pulses = [wire.Pulse(None, 0.0, 0.0)] * count
        # Seconds since each one's latest sign of life, counted in turns of the loop: while this process stands still
        # they wait in its inbox. None before the first: Python and torch are not there.
        self._quiet: list[float | None] = [None] * count
        self._served: dict[int, Served] = {}
        self._router: Router | None = None  # once all are loaded

    def send(self, engine: int, frame: bytes) -> None:
        self._outboxes[engine].send(frame, zmq.NOBLOCK)

    def tell_all(self, message: wire.ToEngine) -> None:
        if not self._outboxes[0].closed:  # this process ends: what is left of its calls has nobody to tell
            frame = wire.encode(message)
            for engine in range(self.count):
                self.send(engine, frame)

    def close(self) -> None:
        for outbox in self._outboxes:
            outbox.close(0)

    def hear(self, message: wire.FromEngine) -> None:
        """A sign of life, and perhaps how it goes. Two threads of an engine send those: one that was made before the
        last may come after it."""
        self._quiet[message.engine] = 0.0
        pulse = message.pulse if isinstance(message, wire.Hello) else message
        if isinstance(pulse, wire.Pulse) and pulse.made >= self._pulses[pulse.engine].made:
            self._pulses[pulse.engine] = pulse
            if self._router is not None and pulse.stats is not None:
                self._router.hear(pulse.engine, pulse.stats)

    def meet(self, hello: wire.Hello) -> Served | None:
        """What is served, once all have said it: a request may come to any of them."""
        self._served[hello.engine] = hello.served
        if len(self._served) < self.count:
            return None
        each = [self._served[engine] for engine in range(self.count)]
        self._router = Router(self.count, each[0].page_size)
        return replace(
            each[0],
            max_model_len=min(one.max_model_len for one in each),
            num_pages=sum(one.num_pages for one in each),
            kv_tokens=sum(one.kv_tokens for one in each),
            step_tokens=sum(one.step_tokens for one in each),
        )

    def turn(self, seconds: float) -> None:
        """To be called every so many seconds."""
        self._quiet = [None if each is None else each + seconds for each in self._quiet]

    def hung(self, silence: float) -> str | None:
        """Why one counts as hung; see Remote.hung."""
        for engine, (quiet, pulse) in enumerate(zip(self._quiet, self._pulses, strict=True)):
            if (quiet or 0.0) > silence:
                return f"{wire.engine_name(engine, self.count)} has given no sign of life for {quiet:.0f} s"
            if pulse.stepping > self._step_timeout:
                return f"{wire.engine_name(engine, self.count)} has been in one step for {pulse.stepping:.0f} s"
        return None

    def loading(self) -> str:
        """Which is, if all live."""
        waited = next((engine for engine in range(self.count) if engine not in self._served), 0)
        return f"{wire.engine_name(waited, self.count)} is loading the model"

    def stats(self) -> Stats | None:
        """Of all together; None while one is loading."""
        known = [each.stats for each in self._pulses if each.stats is not None]
        return total(known) if len(known) == self.count else None

    def each(self) -> list[tuple[Served, Stats]]:
        """Of those that have told both."""
        return [
            (self._served[engine], pulse.stats)
            for engine, pulse in enumerate(self._pulses)
            if engine in self._served and pulse.stats is not None
        ]

    def shares(
        self, admitted: Sequence[Sequence[Admitted]], names: Sequence[str]
    ) -> dict[int, list[Sequence[Admitted]]]:
        """Which engine gets which of a call's prompts, by their names; they are its until close()."""
        assert self._router is not None, "nothing is submitted before all are loaded"
        found: dict[int, list[Sequence[Admitted]]] = {}
        for name, each in zip(names, admitted, strict=True):
            first = each[0]
            engine = self._router.choose(name, first.prompt_ids, first.salt + first.embeds, len(each))
            found.setdefault(engine, []).append(each)
        return found

    def close_request(self, name: str) -> None:
        """It has ended, however."""
        if self._router is not None:
            self._router.close(name)

    def forget(self) -> None:
        """Their prefix caches were emptied."""
        if self._router is not None:
            self._router.forget()


def _push(context: "zmq.Context[zmq.Socket[bytes]]", address: str) -> "zmq.Socket[bytes]":
    """Sending never waits."""
    outbox = context.socket(zmq.PUSH)
    outbox.sndhwm, outbox.linger = 0, 0
    outbox.connect(address)
    return outbox
