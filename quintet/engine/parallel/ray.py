"""Ranks that Ray starts: actors beside this process, anywhere in the cluster, which it meets by TCP."""

import contextlib
import importlib
import logging
import secrets
import socket
import threading
import time
import weakref
from typing import Any

import torch

from quintet.common.distribution import install_hint
from quintet.config import EngineConfig, read_environment, unchanged_environment
from quintet.distributed.rendezvous import listen_on
from quintet.engine.parallel.multiproc import CLOSED, plain_fields, report_call_off
from quintet.interface.platform import Capabilities, Channel
from quintet.interface.types import RankInfo

logger = logging.getLogger(__name__)

BACKEND = "ray"
ACTOR = "quintet.engine.parallel.ray_actor"  # module of the ranks' processes, as follower is of children
PLACEMENT_SECONDS = 120.0  # seconds for the cluster to have room: an autoscaler may start a machine
_POLL_SECONDS = 1.0  # seconds between two looks at the actors
_GRACE = 5.0  # seconds that they have to end
_CONNECT_SECONDS = 5.0  # seconds that a cluster has to answer


def import_ray() -> Any:
    """Returns Ray's module; ValueError where it is not installed."""
    try:
        return importlib.import_module("ray")
    except ImportError:
        raise ValueError(
            f"distributed_executor_backend={BACKEND!r} needs Ray, which is not installed; {install_hint('ray')}, "
            "or leave it out"
        ) from None


def connect_or_start(ray: Any) -> None:
    """Joins the cluster that Ray would join, or begins one of this machine. ValueError: no cluster is at RAY_ADDRESS.

    Ray itself waits for minutes at the address of a cluster that was killed, and then ends the process.
    """
    address = cluster_address()
    with unchanged_environment():
        if address is None:
            ray.init("local", include_dashboard=False, logging_level=logging.WARNING, log_to_driver=False)
        else:
            logger.info("joining the Ray cluster at %s", address)
            ray.init(logging_level=logging.WARNING, log_to_driver=False)


def cluster_address() -> str | None:
    """Returns the address of a cluster that answers; None: there is none."""
    configured = read_environment().ray_address
    try:
        address = importlib.import_module("ray._private.services").canonicalize_bootstrap_address(None)
    except ConnectionError:  # "auto", and none was ever begun
        address = None
    if address is None:
        if configured == "auto":
            raise ValueError("RAY_ADDRESS is auto, and no Ray cluster runs here; ray start --head begins one")
        return None
    host, _, port = str(address).rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_SECONDS).close()
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        if configured not in (None, "", "auto"):
            raise ValueError(
                f"no Ray cluster answers at {address}, which RAY_ADDRESS says ({why}); start it, or leave RAY_ADDRESS "
                "out, and one of this machine is begun"
            ) from None
        logger.warning(
            "the Ray cluster that was last begun here, at %s, does not answer (%s); it is not joined", address, why
        )
        return None
    return str(address)


def rank_resources(facts: Capabilities, size: int) -> dict[str, float]:
    """Returns the cluster resources of a rank: a device, or, where ranks share a machine, its share of that, one at
    least."""
    share = size if facts.processes else 1
    return {name: max(1.0, amount // share) for name, amount in facts.ray_resources.items()}


class RankActors:
    """Ray actors of ranks 1 and up."""

    def __init__(self, config: EngineConfig, facts: Capabilities, size: int) -> None:
        """ValueError: no Ray, no room, or settings that cannot be sent to other processes."""
        self._ray, self.size = import_ray(), size
        fields = plain_fields(config, f"distributed_executor_backend={BACKEND!r}")
        self._begun = not self._ray.is_initialized()
        if self._begun:
            connect_or_start(self._ray)
        host, util = self._ray.util.get_node_ip_address(), importlib.import_module("ray.util.placement_group")
        listener = listen_on(host, 0)
        self.endpoint = f"tcp://{host}:{listener.getsockname()[1]}?key={secrets.token_hex(32)}"  # for this meeting
        self._channel: Channel | None = None
        self._lost, self._closing, self._lock = "", threading.Event(), threading.Lock()
        self._actors: list[Any] = []
        self._group = util.placement_group([rank_resources(facts, size)] * (size - 1), strategy="PACK")
        try:
            self._room(facts)
            self._start(fields, rank_resources(facts, size))
        except BaseException:
            listener.close()
            self.close()
            raise
        self.rank_info = RankInfo(0, size, f"{self.endpoint}&listener={listener.detach()}")
        threading.Thread(target=_watch, args=(weakref.ref(self), self._runs), name="quintet-ray", daemon=True).start()

    pids: list[int] = []  # the processes are the cluster's

    def _room(self, facts: Capabilities) -> None:
        try:
            self._ray.get(self._group.ready(), timeout=PLACEMENT_SECONDS)
        except self._ray.exceptions.GetTimeoutError:
            raise ValueError(
                f"the Ray cluster has no room for {self.size - 1} ranks of {rank_resources(facts, self.size)} beside "
                "this "
                f"process after {PLACEMENT_SECONDS:g} s; lower tensor_parallel_size, or add machines (ray status)"
            ) from None

    def _start(self, fields: dict[str, Any], bundle: dict[str, float]) -> None:
        strategies = importlib.import_module("ray.util.scheduling_strategies")
        beside = {name: amount for name, amount in bundle.items() if name not in ("CPU", "GPU")}
        made = self._ray.remote(importlib.import_module(ACTOR).RankActor)
        for rank in range(1, self.size):
            where = strategies.PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=rank - 1)
            options = {"num_cpus": bundle.get("CPU", 0), "num_gpus": bundle.get("GPU", 0), "resources": beside}
            self._actors.append(made.options(**options, scheduling_strategy=where, max_restarts=0).remote())
        threads = torch.get_num_threads()
        self._runs = [
            actor.follow.remote(fields, (rank, self.size, self.endpoint), threads)
            for rank, actor in enumerate(self._actors, 1)
        ]

    def set_channel(self, channel: Channel) -> None:
        """Sets the channel that stops when a rank ends, so that all that wait get the reason."""
        with self._lock:
            self._channel = channel
            if self._lost:
                channel.abort(self._lost)

    def close(self) -> None:
        """Ends the actors and their placement group, and the cluster if it was started here."""
        if self._closing.is_set():
            return
        self._closing.set()
        if self._channel is not None:
            self._channel.abort(CLOSED)
        gone = (self._ray.exceptions.RayError, ConnectionError, AttributeError)  # the last: it never began to run
        with contextlib.suppress(*gone):  # a cluster that is gone has nothing left
            self._ray.wait(self._runs, num_returns=len(self._runs), timeout=_GRACE)
        for actor in self._actors:
            with contextlib.suppress(*gone):
                self._ray.kill(actor)
        with contextlib.suppress(*gone):
            importlib.import_module("ray.util.placement_group").remove_placement_group(self._group)
        if self._begun:
            self._ray.shutdown()

    def _look(self) -> bool:
        """Looks at the actors once; returns whether to go on."""
        if self._closing.is_set():
            return False
        done, _ = self._ray.wait(self._runs, num_returns=1, timeout=_POLL_SECONDS)
        if not done or self._closing.is_set():
            return not self._closing.is_set()
        done, _ = self._ray.wait(self._runs, num_returns=len(self._runs), timeout=0)
        ends = {self._runs.index(run) + 1: self._how(run) for run in done}
        rank = next((rank for rank, (died, _) in ends.items() if died), min(ends))  # the others end because of it
        with self._lock:
            self._lost = f"rank {rank} of {self.size} has ended: {ends[rank][1]}"
            if self._channel is not None:
                self._channel.abort(self._lost)
        if self._channel is None:
            report_call_off(self.endpoint, self._lost, lambda: self._channel is not None or self._closing.is_set())
        return False

    def _how(self, run: Any) -> tuple[bool, str]:
        """Returns whether a rank died, and how it ended, in words."""
        try:
            code, why = self._ray.get(run)
            return False, why or f"it exited with code {code}"
        except self._ray.exceptions.ActorDiedError as error:
            details = dict(
                line.strip().split(": ", 1)
                for line in str(error).splitlines()
                if line.startswith("\t") and ": " in line
            )
            return True, f"its actor died (process {details.get('pid', 'unknown')} on {details.get('ip', 'unknown')})"
        except self._ray.exceptions.RayError as error:
            return True, f"{type(error).__name__}: {str(error).splitlines()[0]}"


def _watch(actors: "weakref.ref[RankActors]", runs: list[Any]) -> None:
    while True:
        mine = actors()
        if mine is None or not mine._look():
            return
        del mine
        time.sleep(_POLL_SECONDS / 10)
