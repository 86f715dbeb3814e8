"""An engine's side of pages between engines, made of its settings: where it listens, whom it asks, with what key."""

import functools
import hashlib
import ipaddress
import logging
import secrets
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from threading import Event
from typing import Any

import msgspec

from quintet.config import EngineConfig, KVTransferConfig, read_environment
from quintet.engine.dtypes import name_of
from quintet.engine.elsewhere.copies import Copies
from quintet.engine.elsewhere.giver import Giver
from quintet.engine.elsewhere.loans import Loans
from quintet.engine.elsewhere.taker import Address, Taker, Way
from quintet.engine.elsewhere.transfer import Transfer
from quintet.engine.elsewhere.wire import Broken, Channel, Facts
from quintet.engine.kv_calibration import scales_of
from quintet.engine.runner import Ranks
from quintet.engine.sharded import FORMATS as SHARDED
from quintet.engine.sharded import SHARDS
from quintet.engine.tables import Tables
from quintet.engine.weight_files import Weights
from quintet.engine.worker import ModelSizes

logger = logging.getLogger(__name__)

SAMPLES, SAMPLE = 32, 4096  # stretches of each file of weights that tell it from others, and their bytes
SHORTEST_KEY = 16  # bytes
_NAMES = ("_name_or_path", "transformers_version", "torch_dtype", "dtype")  # of a configuration, which settle no number


Weigh = Callable[[Weights | None], str]


class Known:
    """What this engine's pages are, as of now: other weights make others of them."""

    def __init__(self, facts: Facts, weigh: Weigh) -> None:
        self.facts, self._weigh = facts, weigh

    def __call__(self) -> Facts:
        return self.facts

    def reweigh(self, weights: Weights | None) -> None:
        self.facts = msgspec.structs.replace(self.facts, checkpoint=self._weigh(weights))


def make_transfer(config: EngineConfig, known: Known, copies: Copies, tables: Tables, changed: Event) -> Transfer:
    """ValueError says what of the settings cannot be."""
    settings = config.kv_transfer_config
    extras, key, closing = settings.extras, key_of(settings), list[Callable[[], None]]()
    transfer = Transfer(tables, copies.read, copies.at_once)
    transfer.engine = settings.engine_id or secrets.token_hex(8)
    if settings.gives:
        loans = Loans(settings.kv_buffer_size, copies.words, extras.lease_seconds)
        if not loans.capacity:
            raise ValueError(
                f"kv_transfer_config.kv_buffer_size={settings.kv_buffer_size}: a page takes {copies.nbytes} bytes, and "
                "none fits; raise it"
            )
        listening = listen(settings, bool(key), config.data_parallel_rank or 0)
        giver = Giver(loans, known, key, extras.timeout_seconds)
        giver.listen(listening)
        transfer.loans, transfer.giver = loans, giver
        transfer.host, transfer.port = extras.host or settings.kv_ip, listening.getsockname()[1]
        closing.append(giver.close)
        logger.info("pages are given to other engines at %s:%d", transfer.host, transfer.port)
    if settings.takes:
        connect = functools.partial(connected, patience=extras.timeout_seconds, longest=copies.nbytes, keyed=bool(key))
        taker = Taker(Way(connect, known, key, copies.words), changed)
        transfer.taker = taker
        closing.append(taker.close)
    transfer.close = functools.partial(_each, closing)
    transfer.reweigh = functools.partial(_reweigh, known, transfer.loans)
    return transfer


def _each(calls: Sequence[Callable[[], None]]) -> None:
    for call in calls:
        call()


def _reweigh(known: Known, loans: Loans | None, weights: Weights | None) -> None:
    if loans is not None:
        loans.clear()
    known.reweigh(weights)


def key_of(settings: KVTransferConfig) -> bytes:
    """What all engines share; empty: there is none. ValueError where it is not kept to its owner, or is short."""
    name = settings.extras.key_file
    if name is None:
        key, whose = (read_environment().kv_transfer_key or "").encode(), "QUINTET_KV_TRANSFER_KEY"
    else:
        whose = f"key_file={name!r}"
        try:
            path = Path(name).expanduser()
            if path.stat().st_mode & 0o077:
                raise ValueError(f"kv_transfer_config: {whose} can be read by others; chmod 600 it")
            key = path.read_bytes().strip()
        except OSError as error:
            raise ValueError(f"kv_transfer_config: {whose} cannot be read ({error.strerror}); give another") from None
        if not key:
            raise ValueError(f"kv_transfer_config: {whose} is empty; write a key into it (openssl rand -hex 32)")
    if 0 < len(key) < SHORTEST_KEY:
        raise ValueError(f"kv_transfer_config: the key of {whose} has {len(key)} bytes; give {SHORTEST_KEY} or more")
    return key


def listen(settings: KVTransferConfig, keyed: bool, rank: int) -> socket.socket:
    """Of several engines each has a port of its own, counted up. ValueError says why it cannot be."""
    host, port = settings.kv_ip, settings.kv_port + rank if settings.kv_port else 0
    where = f"kv_transfer_config: kv_ip={host!r}, kv_port={port}"
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        if not keyed and not _is_loopback(str(address[0])):
            raise ValueError(
                f"{where}: others could take pages, which are prompts, and give them; give all engines a key "
                "(QUINTET_KV_TRANSFER_KEY, or key_file in kv_connector_extra_config), or bind to 127.0.0.1"
            )
        if ipaddress.ip_address(str(address[0]).partition("%")[0]).is_unspecified and settings.extras.host is None:
            raise ValueError(f"{where}: others are told where to come; give host in kv_connector_extra_config, too")
        listening = socket.socket(family, socket.SOCK_STREAM)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        listening.listen()
    except OSError as error:
        raise ValueError(f"{where} cannot be listened at ({error.strerror or error}); give another") from None
    return listening


def connected(peer: Address, patience: float, longest: int, keyed: bool) -> Channel:
    """To where a loan lies; Broken says why not. Without a key only this machine is trusted."""
    host, _, port = peer.place.rpartition(":")
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)[0]
        if not keyed and not _is_loopback(str(address[0])):
            raise Broken("it is another machine's, and this engine has no key; give all engines one")
        connection = socket.socket(family, kind)
        connection.settimeout(patience)
        try:
            connection.connect(address)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        except OSError:
            connection.close()
            raise
    except TimeoutError:
        raise Broken("nobody answers") from None
    except (OSError, UnicodeError) as error:
        raise Broken(getattr(error, "strerror", None) or str(error)) from None
    return Channel(connection, patience, longest)


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def facts_of(config: EngineConfig, sizes: ModelSizes, ranks: Ranks, hf: Any, weights: Weights | None) -> Known:
    """Nothing in it depends on the machine: engines on other devices have the same."""
    kept = {name: value for name, value in hf.to_dict().items() if name not in _NAMES}
    scales = [hashlib.sha256(each).hexdigest() for each in ranks.each(scales_of)] if config.calculate_kv_scales else []
    parts = [sorted(kept.items()), config.quantization, config.activation_bits, name_of(sizes.dtype), scales]
    shapes = tuple(tuple(map(int, layout.shape)) for worker in ranks.workers for layout in worker.arrangement.layouts)
    dtype = name_of(sizes.kv_dtype or sizes.dtype)

    def weigh(of: Weights | None) -> str:
        return hashlib.sha256(repr([*parts, _sampled(of)]).encode()).hexdigest()

    return Known(Facts(weigh(weights), dtype, config.page_size, shapes), weigh)


def _sampled(weights: Weights | None) -> list[str]:
    """Digests of the files of a checkpoint: their sizes, and stretches all along. ValueError where there is none."""
    if weights is None:
        raise ValueError(
            "kv_transfer_config: random weights (load_format='dummy') are no other engine's; give a checkpoint"
        )
    files = sorted(weights.folder.glob(SHARDS)) if weights.load_format in SHARDED else sorted(weights.files())
    found = []
    for file in files:
        size = file.stat().st_size
        seen = hashlib.sha256(str(size).encode())
        with file.open("rb") as stream:
            for at in range(SAMPLES):
                stream.seek(max(0, (size - SAMPLE) * at // (SAMPLES - 1)))
                seen.update(stream.read(SAMPLE))
        found.append(seen.hexdigest())
    return found
