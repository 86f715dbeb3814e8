"""Messages between the API processes of one server, and their start orders."""

from typing import Any

import msgspec

from quintet.common.metric_types import MetricSample
from quintet.engine.processes.messages import FromEngine


class ApiOrders(msgspec.Struct):
    """Start orders of an API process besides the first. Keys in them go through a pipe, which no other process can
    read."""

    folder: str  # of the sockets
    worker: int
    num_engines: int
    profiles: bool  # whether the engines can be traced
    server: dict[str, Any]  # ServerConfig's fields
    listen: int  # inherited file descriptor that it accepts on


class MetricsRequest(msgspec.Struct, tag=True, array_like=True):
    """Request for the metrics of another API process."""

    worker: int  # that asks
    number: int  # of the question


class MetricsResponse(msgspec.Struct, tag=True, array_like=True):
    """The answer: every series of that process."""

    worker: int  # that answers
    number: int
    rows: list[MetricSample]


class WorkerHeartbeat(msgspec.Struct, tag=True, array_like=True):
    """Sign of life to the first API process, which watches the others: the event loop runs."""

    pid: int


FromPeer = MetricsRequest | MetricsResponse | WorkerHeartbeat

decode_to_worker = msgspec.msgpack.Decoder(FromEngine | FromPeer).decode
