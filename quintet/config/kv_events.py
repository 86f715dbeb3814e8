"""KV cache events: whether they are published, and at which address."""

import re
from dataclasses import dataclass
from typing import Any, ClassVar

from quintet.common.value_parsers import boolean, count, one_of, optional
from quintet.config.schema.fields import Nested, choice_field, option

_ENDPOINT = re.compile(r"(tcp://.+:(\d+|\*)|(ipc|inproc)://.+)")


def _endpoint(value: Any) -> str:
    if not isinstance(value, str) or not _ENDPOINT.fullmatch(value):
        raise ValueError(f"must be an address such as tcp://127.0.0.1:5557 or ipc:///run/kv, not {value!r}")
    return value


def _topic(value: Any) -> str:
    """Checks the topic. If it is empty, every subscriber receives the events."""
    if not isinstance(value, str):
        raise ValueError(f"must be text, not {value!r}")
    return value


@dataclass(frozen=True)
class KVEventsConfig(Nested):
    """Events of the prefix cache over ZeroMQ; vLLM's names. Off unless they are enabled."""

    name: ClassVar[str] = "kv_events_config"

    enable_kv_cache_events: bool = option(
        False, boolean, "tell which pages enter and leave the prefix cache", group="observability"
    )
    publisher: str | None = option(
        None, optional(one_of("zmq", "null")), "zmq, or null: no events; zmq if enabled", group="observability",
        choices=("zmq", "null"),
    )  # fmt: skip
    endpoint: str = option(
        "tcp://127.0.0.1:5557", _endpoint, "address of the events: the engine listens there if it is of this machine "
        "or names all its addresses (tcp://*:5557, vLLM's default), else it connects to it", group="observability",
        metavar="ADDRESS",
    )  # fmt: skip
    replay_endpoint: str | None = option(
        None, optional(_endpoint), "address where late or lost events are asked for", group="observability",
        metavar="ADDRESS",
    )  # fmt: skip
    buffer_steps: int = option(
        10_000, count(), "steps whose events can be asked for again", group="observability", metavar="STEPS"
    )
    hwm: int = option(
        100_000, count(), "messages that wait for a slow subscriber, before it misses some", group="observability",
        metavar="MESSAGES",
    )  # fmt: skip
    max_queue_size: int = option(
        100_000, count(), "messages that wait to be sent at all, before some are left out", group="observability",
        metavar="MESSAGES",
    )  # fmt: skip
    topic: str = option("", _topic, "what subscribers subscribe to", group="observability")
    layout: str = choice_field(
        "map", "map", "array", help="an event is a map with its type, as vLLM writes it now, or an array, as it did "
        "before", group="observability",
    )  # fmt: skip

    @property
    def is_enabled(self) -> bool:
        """True if KV cache events are published."""
        return self.enable_kv_cache_events and self.publisher != "null"
