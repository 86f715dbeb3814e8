"""Publishes KV cache events (pages of the prefix cache) as vLLM does: msgpack over ZeroMQ, with a replay of the last.

A message has three frames: the topic, a number that grows by one (8 bytes, the first first), and a batch of events. A
subscriber that sees a number left out sends the first that it lacks to the replay's address, and gets all from there on
as (number, batch), and at last the number -1. Subscribers can read the tokens of every prompt.
"""

import logging
import re
import threading
import time
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgspec

from quintet.config import KVEventsConfig
from quintet.engine.step_hook import StepHook
from quintet.lora.request import LoRAReference

if TYPE_CHECKING:  # a journal alone needs zmq, and not every machine that runs a model has it
    import zmq

    from quintet.engine.scheduler import Scheduler

logger = logging.getLogger(__name__)

MEDIUM = "GPU"  # vLLM's word for the cache itself, whatever device it lies on
END = (-1).to_bytes(8, "big", signed=True)
REPLAY_HWM = 100  # messages that may wait for one peer; a peer that does not read gets no more
MAX_REPLAYS = 32  # peers that get a replay at a time
REPLAY_RETRY = 20  # milliseconds until a peer that had no room is tried again
LINGER = 200  # milliseconds that a closed engine gives its last events
LOCAL_ENDPOINT = re.compile(r"(ipc|inproc)://.*|tcp://(\*|127\.\d+\.\d+\.\d+|localhost|\[?::1?\]?|0\.0\.0\.0):(\d+|\*)")


class BlockStored(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    """Pages of one group, one behind the other, can be found."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[Any] | None = None
    group_idx: int | None = None


class BlockRemoved(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    """Pages cannot be found any more."""

    block_hashes: list[int]
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    """None can."""


Event = BlockStored | BlockRemoved | AllBlocksCleared


class EventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """Changes of one step, and their time (seconds of the Unix clock)."""

    ts: float
    events: list[Any]


def external_hash(digest: bytes) -> int:
    """A page's hash as vLLM shows its own: the last 64 bits of the chain's, whichever group."""
    return int.from_bytes(digest[8:16], "big")


def group_index(digest: bytes) -> int | None:
    """None: the first."""
    return int.from_bytes(digest[16:], "little") or None


class KVEventLog(StepHook):
    """Changes of the prefix cache since they were last published. The pool and its tables write to it."""

    def __init__(self, publisher: "Publisher", page_size: int, layout: str) -> None:
        self._publisher, self._page_size, self._encode_arrays = publisher, page_size, layout == "array"
        self._events: list[Event] = []

    def log_stored(
        self, digest: bytes, parent: bytes | None, token_ids: Sequence[int], lora: LoRAReference | None = None
    ) -> None:
        """A page with its tokens; `parent` is the one before it, `lora` the adapter that computed it. Pages that follow
        each other are one event."""
        above, group, last = None if parent is None else external_hash(parent), group_index(digest), self._last
        if last is not None and (last.block_hashes[-1], last.group_idx) == (above, group):
            last.block_hashes.append(external_hash(digest))
            last.token_ids += token_ids
            return
        hashes, tokens = [external_hash(digest)], list(token_ids)
        number, name = (None, None) if lora is None else (lora.number, lora.name)
        self._events.append(BlockStored(hashes, above, tokens, self._page_size, number, MEDIUM, name, group_idx=group))

    @property
    def _last(self) -> BlockStored | None:
        last = self._events[-1] if self._events else None
        return last if isinstance(last, BlockStored) else None

    def log_removed(self, digest: bytes) -> None:
        self._events.append(BlockRemoved([external_hash(digest)], MEDIUM, group_idx=group_index(digest)))

    def log_cleared(self) -> None:
        self._events.append(AllBlocksCleared())

    def publish(self) -> None:
        """Publishes the collected events as one batch."""
        if self._events:
            events, self._events = self._events, []
            batch: list[Any] = [_as_array(event) for event in events] if self._encode_arrays else [*events]
            self._publisher.send(EventBatch(time.time(), batch))

    def after_compute(self, scheduler: "Scheduler", running: bool) -> None:
        self.publish()

    def reset_prefix_cache(self) -> None:
        self.publish()

    def close(self) -> None:
        self._publisher.close()


def make_event_log(config: KVEventsConfig, page_size: int, engine: int) -> KVEventLog:
    """Returns the journal of a data-parallel engine; addresses count up with the engine's number, as vLLM's do."""
    replay = config.replay_endpoint
    event = replace(
        config,
        endpoint=_engine_endpoint(config.endpoint, engine),
        replay_endpoint=None if replay is None else _engine_endpoint(replay, engine),
    )
    return KVEventLog(Publisher(event), page_size, config.layout)


def _engine_endpoint(endpoint: str, engine: int) -> str:
    """Ports are counted up, but for one that the system chooses; other addresses have the number behind them."""
    address, _, port = endpoint.rpartition(":")
    if not engine or port == "*":
        return endpoint
    return f"{address}:{int(port) + engine}" if endpoint.startswith("tcp:") else f"{endpoint}_dp{engine}"


def _as_array(event: Event) -> list[Any]:
    """Encodes it as older vLLM versions: the type, and the fields up to the last that is not None."""
    fields = [getattr(event, name) for name in event.__struct_fields__]
    least = len(fields) - len(event.__struct_defaults__)
    while len(fields) > least and fields[-1] is None:
        fields.pop()
    return [type(event).__name__, *fields]


class Publisher:
    """Sockets, in a thread of their own. The engine never waits for it: what it has no room for is left out, and its
    number with it."""

    def __init__(self, config: KVEventsConfig) -> None:
        """ValueError where an address cannot be used."""
        import zmq

        self._context = zmq.Context(io_threads=1)
        self._encoder, self._next, self._left_out = msgspec.msgpack.Encoder(), 0, 0
        out, replay = self._context.socket(zmq.PUB), None
        out.sndhwm, out.linger = config.hwm, LINGER
        try:
            self.endpoint = _bind(out, "endpoint", config.endpoint)
            self.replay_endpoint = ""
            if config.replay_endpoint is not None:
                replay = self._context.socket(zmq.ROUTER)
                replay.sndhwm, replay.linger = REPLAY_HWM, LINGER
                replay.setsockopt(zmq.ROUTER_MANDATORY, 1)  # else what does not fit is dropped without a word
                self.replay_endpoint = _bind(replay, "replay_endpoint", config.replay_endpoint)
        except ValueError:
            self._context.destroy(linger=0)
            raise
        name = f"inproc://events-{id(self)}"
        inbox, self._outbox = self._context.socket(zmq.PULL), self._context.socket(zmq.PUSH)
        inbox.rcvhwm = self._outbox.sndhwm = -(-config.max_queue_size // 2)  # the two together
        inbox.bind(name)
        self._outbox.connect(name)
        kept: deque[tuple[bytes, bytes]] = deque(maxlen=config.buffer_steps)
        arguments = (inbox, out, replay, config.topic.encode(), kept)
        self._thread = threading.Thread(target=_run, args=arguments, name="quintet-kv-events", daemon=True)
        self._thread.start()
        self.close = weakref.finalize(self, _close, self._context, self._outbox, self._thread)

    def send(self, batch: EventBatch) -> None:
        import zmq

        seq, self._next = self._next, self._next + 1
        try:
            self._outbox.send_multipart((seq.to_bytes(8, "big"), self._encoder.encode(batch)), zmq.NOBLOCK)
        except zmq.Again:
            if not self._left_out:
                logger.warning("kv_events_config: events are left out: more than max_queue_size wait to be sent")
            self._left_out += 1


def _bind(socket: "zmq.Socket[bytes]", entry: str, endpoint: str) -> str:
    """Listens there, if the address is this machine's -> the address with its port."""
    import zmq

    try:
        if not LOCAL_ENDPOINT.fullmatch(endpoint):
            socket.connect(endpoint)
            return endpoint
        socket.bind(endpoint)
    except zmq.ZMQError as error:
        raise ValueError(f"kv_events_config.{entry}: {endpoint} cannot be used ({error}); give another") from None
    if endpoint.startswith(("tcp://*", "tcp://0.0.0.0", "tcp://[::]", "tcp://:::")):
        logger.warning("kv_events_config.%s: any host that reaches %s can read all prompt tokens", entry, endpoint)
    return str(socket.getsockopt_string(zmq.LAST_ENDPOINT))


def _run(
    inbox: "zmq.Socket[bytes]",
    out: "zmq.Socket[bytes]",
    replay: "zmq.Socket[bytes] | None",
    topic: bytes,
    kept: deque[tuple[bytes, bytes]],
) -> None:
    """Until an empty message comes."""
    import zmq

    poller, replays = zmq.Poller(), None if replay is None else _Replays(replay, kept)
    for socket in (inbox, *([] if replay is None else [replay])):
        poller.register(socket, zmq.POLLIN)
    going = True
    while going:
        ready = dict(poller.poll(REPLAY_RETRY if replays is not None and replays.running else None))
        if inbox in ready:
            message = inbox.recv_multipart()
            going = len(message) == 2
            if going:
                kept.append((message[0], message[1]))
                out.send_multipart((topic, *message))
        if replays is not None:
            if replay in ready:
                replays.accept()
            replays.send()
    for socket in (inbox, out, *([] if replay is None else [replay])):
        socket.close()


class _Replays:
    """Replays in progress: one for each peer, and MAX_REPLAYS in all; more requests are left out.

    The socket has room for REPLAY_HWM messages of each peer. What does not fit is sent when the peer has read.
    """

    def __init__(self, socket: "zmq.Socket[bytes]", kept: deque[tuple[bytes, bytes]]) -> None:
        self._socket, self._kept = socket, kept
        self.running: dict[bytes, bytes] = {}  # peer -> number of the next batch that it gets

    def accept(self) -> None:
        """Reads a request: all from the number on that it names."""
        request = self._socket.recv_multipart()
        if len(request) != 3 or request[1] or len(request[2]) != 8:
            logger.info("kv_events_config: a replay was asked for in another form: three frames, the last of 8 bytes")
        elif request[0] in self.running or len(self.running) < MAX_REPLAYS:
            self.running.setdefault(request[0], request[2])

    def send(self) -> None:
        """Sends what there is room for."""
        import zmq

        for peer in list(self.running):
            try:
                self._send_to(peer)
                del self.running[peer]
            except zmq.Again:
                continue
            except zmq.ZMQError:  # it has gone
                del self.running[peer]

    def _send_to(self, peer: bytes) -> None:
        import zmq

        for seq, payload in list(self._kept):
            if seq >= self.running[peer]:
                self._socket.send_multipart((peer, b"", seq, payload), zmq.NOBLOCK)
                self.running[peer] = (int.from_bytes(seq, "big") + 1).to_bytes(8, "big")
        self._socket.send_multipart((peer, b"", END, b""), zmq.NOBLOCK)


def _close(context: "zmq.Context[zmq.Socket[bytes]]", outbox: "zmq.Socket[bytes]", thread: threading.Thread) -> None:
    import zmq

    try:
        outbox.send(b"", zmq.NOBLOCK)
    except zmq.Again:
        logger.info("kv_events_config: the last events were not sent")
    outbox.close(linger=LINGER)
    thread.join(1)
    if not thread.is_alive():
        context.term()
