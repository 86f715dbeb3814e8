"""NIXL, which reads pages from another engine's memory through UCX: over TCP, RDMA, or from process to process."""

import importlib
import logging
import secrets
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from quintet.common.distribution import install_hint
from quintet.engine.kv_transfer.connector import PageRows
from quintet.engine.kv_transfer.p2p.protocol import ProtocolError
from quintet.engine.kv_transfer.p2p.rdma import check_not_closed

logger = logging.getLogger(__name__)

MAX_PEERS = 64  # peers that stay connected though nothing is read from them
_HOST_MEMORY = "DRAM"  # NIXL's word for the host's memory


def library() -> Any:
    """Returns NIXL's API; ValueError where it is not installed. Its log goes where ours does: it would write to
    standard output, which is the user's, and it makes all of logging swallow errors."""
    raises = logging.raiseExceptions
    try:
        found = importlib.import_module("nixl._api")
    except ImportError as error:
        raise ValueError(
            f"kv_transfer_config.kv_connector NixlConnector needs NIXL ({error}); {install_hint('nixl')}, or use "
            "TCPConnector"
        ) from None
    finally:
        logging.raiseExceptions = raises
    log = logging.getLogger("nixl")
    log.handlers.clear()
    log.propagate = True
    log.setLevel(logging.WARNING)
    return found


@dataclass
class NixlPeer:
    """Another engine, as this one's agent knows it."""

    metadata: bytes
    users: int = 0
    broken: bool = False  # transfers from it fail: it is connected anew


class NixlRead:
    """One transfer. If it could not be started, done() raises the error."""

    def __init__(self, agent: Any, handle: Any, met: NixlPeer) -> None:
        self._agent, self._handle, self._met, self._state = agent, handle, met, "PROC"
        try:
            self._state = agent.transfer(handle)
        except Exception as error:
            self._state = str(error)

    def done(self) -> bool:
        if self._state == "PROC":
            try:
                self._state = self._agent.check_xfer_state(self._handle)
            except Exception as error:
                self._state = str(error)
        if self._state not in ("PROC", "DONE"):
            self._met.broken = True
            raise ProtocolError(f"NIXL could not read there ({self._state})")
        return self._state == "DONE" and self.cancel()

    def cancel(self) -> bool:
        try:
            self._handle.release()
        except Exception:  # it is still in progress, and the memory that it writes to must stay
            return False
        return True


class NixlEngine:
    """One NIXL agent, with UCX, of an engine that sends pages, receives them, or does both."""

    def __init__(self, device: str) -> None:
        """device: network device to listen on; empty: all. ValueError where there is no NIXL, or no UCX for the
        device."""
        api = library()
        config = api.nixl_agent_config(backends=[], sync_mode=api.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT)
        try:
            self._agent: Any = api.nixl_agent(secrets.token_hex(8), config)
            self._agent.create_backend("UCX", {"engine_config": f"NET_DEVICES={device}"} if device else {})
        except Exception as error:
            raise ValueError(
                f"kv_transfer_config.kv_connector NixlConnector: UCX cannot begin at {device or 'all devices'} "
                f"({error}); give another kv_ip, or use TCPConnector"
            ) from None
        self._lock, self._met, self._kept = threading.Lock(), dict[str, NixlPeer](), list[PageRows]()

    def register_source(self, rows: PageRows) -> None:
        self._kept.append(rows)  # they must stay as long as UCX has them registered
        self._open.register_memory([(rows.ctypes.data, rows.nbytes, 0, "")], _HOST_MEMORY)

    def register_buffer(self, rows: PageRows) -> None:
        try:
            self.register_source(rows)
        except Exception as error:
            raise ProtocolError(f"NIXL cannot write to this engine's memory ({error})") from None

    def metadata(self) -> bytes:
        return bytes(self._open.get_agent_metadata())

    def connect(self, metadata: bytes) -> str:
        with self._lock:
            for name, met in self._met.items():
                if met.metadata == metadata and not met.broken:
                    met.users += 1
                    return name
            try:
                found = self._open.add_remote_agent(metadata)
            except Exception as error:
                raise ProtocolError(f"NIXL cannot reach it ({error})") from None
            name = found.decode() if isinstance(found, bytes) else found
            met = self._met.setdefault(name, NixlPeer(metadata))
            met.metadata, met.users, met.broken = metadata, met.users + 1, False
            return name

    def disconnect(self, peer: str) -> None:
        with self._lock:
            met = self._met.get(peer)
            if met is None:
                return
            met.users -= 1
            if met.users <= 0 and (met.broken or len(self._met) > MAX_PEERS):
                del self._met[peer]
                try:
                    self._agent.remove_remote_agent(peer)
                except Exception as error:
                    logger.debug("NIXL could not leave %s: %s", peer, error)

    def start_read(self, peer: str, addresses: Sequence[int], into: PageRows) -> NixlRead:
        length, start, step = into.strides[0], into.ctypes.data, into.strides[0]
        try:
            agent = self._open
            here = agent.get_xfer_descs([(start + at * step, length, 0) for at in range(len(addresses))], _HOST_MEMORY)
            there = agent.get_xfer_descs([(address, length, 0) for address in addresses], _HOST_MEMORY)
            handle = agent.initialize_xfer("READ", here, there, peer)
        except Exception as error:
            raise ProtocolError(f"NIXL cannot read there ({error})") from None
        return NixlRead(agent, handle, self._met.get(peer) or NixlPeer(b""))

    @property
    def _open(self) -> Any:
        return check_not_closed(self._agent)

    def close(self) -> None:
        """Drops the agent, which ends with its last user; then others cannot read here any more. Offered memory stays
        as long as this mover, which is longer."""
        self._agent = None
