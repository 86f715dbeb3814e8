"""An engine's side of pages between engines, made of its settings: where it listens, whom it asks, with what key."""

import functools
import hashlib
import logging
import secrets
from collections.abc import Callable, Sequence
from threading import Event
from typing import Any

import msgspec

from quintet.config import EngineConfig, KVTransferConfig
from quintet.engine.dtypes import name_of
from quintet.engine.elsewhere.allowed import Peers
from quintet.engine.elsewhere.among import Among
from quintet.engine.elsewhere.copies import Copies
from quintet.engine.elsewhere.giver import Giver
from quintet.engine.elsewhere.loans import Loans
from quintet.engine.elsewhere.sockets import connected, connected_here, key_of, leave, listen, listen_here
from quintet.engine.elsewhere.taker import Address, Taker, Way
from quintet.engine.elsewhere.transfer import Transfer
from quintet.engine.elsewhere.ways import means_of
from quintet.engine.elsewhere.wire import Channel, Facts
from quintet.engine.kv_calibration import scales_of
from quintet.engine.runner import Ranks
from quintet.engine.sharded import FORMATS as SHARDED
from quintet.engine.sharded import SHARDS
from quintet.engine.tables import Tables
from quintet.engine.weight_files import Weights
from quintet.engine.worker import ModelSizes
from quintet.settings.kv_transfer import SHARED_MEMORY

logger = logging.getLogger(__name__)

SAMPLES, SAMPLE = 32, 4096  # stretches of each file of weights that tell it from others, and their bytes
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


def make_transfer(  # the last is of ranks
    config: EngineConfig, known: Known, copies: Copies, tables: Tables, changed: Event, among: Among
) -> Transfer:
    """ValueError says what of the settings cannot be."""
    settings = config.kv_transfer_config
    extras, key, closing = settings.extras, key_of(settings), list[Callable[[], None]]()
    here = settings.kv_connector == SHARED_MEMORY
    transfer, means = Transfer(tables, copies.read, copies.at_once), means_of(settings, bool(key))
    transfer.engine, transfer.council = settings.engine_id or secrets.token_hex(8), among.council
    among.name(transfer)
    if settings.gives:
        loans = Loans(settings.kv_buffer_size // among.size, copies.words, extras.lease_seconds, here)
        if not loans.capacity:
            raise ValueError(
                f"kv_transfer_config.kv_buffer_size={settings.kv_buffer_size}: a page takes {copies.nbytes} bytes, and "
                "none fits; raise it"
            )
        if here:
            listening, transfer.host = listen_here(among.part(transfer.engine))
            transfer.port = settings.kv_port or 1  # nobody looks at it
        else:
            listening = listen(settings, bool(key), (config.data_parallel_rank or 0) * among.size + among.rank)
            transfer.host, transfer.port = extras.host or settings.kv_ip, listening.getsockname()[1]
        giver = Giver(loans, known, key, extras.timeout_seconds)
        giver.way, giver.share = means.name, means.share(loans)
        giver.listen(listening)
        transfer.loans, transfer.giver = loans, giver
        closing += [
            giver.close,
            loans.close,
            *([functools.partial(leave, among.part(transfer.engine))] if here else []),
        ]
        logger.info("pages are given to other engines at %s:%d", transfer.host, transfer.port)
    if settings.takes:
        reach: Callable[[Address], Channel] = functools.partial(
            connected,
            patience=extras.timeout_seconds,
            longest=copies.nbytes,
            keyed=bool(key),
            peers=_asked(settings, key),
        )
        if here:
            reach = functools.partial(connected_here, patience=extras.timeout_seconds)
        opening = means.open(copies.words, extras.timeout_seconds)
        connect = among.connecting(reach, here)
        taker = Taker(Way(connect, known, key, copies.words, opening, means.name), changed)
        transfer.taker = taker
        closing.append(taker.close)
    closing.append(means.close)
    among.tell_ports(transfer)
    transfer.close = functools.partial(_each, closing)
    transfer.reweigh = functools.partial(_reweigh, known, transfer.loans)
    return transfer


def _asked(settings: KVTransferConfig, key: bytes) -> Peers | None:
    """Who may be asked for pages. Where nobody has said, any host that a request names may be, if there is a key."""
    listed = settings.extras.peers
    if listed is None:
        if key and settings.kv_connector != SHARED_MEMORY:
            logger.warning(
                "pages are asked of any host that a request names; list those that may be in kv_connector_extra_config "
                "(peers), where others than a router can reach this engine"
            )
        return None
    if settings.kv_connector == SHARED_MEMORY:
        raise ValueError(
            "kv_transfer_config.kv_connector_extra_config.peers: engines of this machine and user are the only ones "
            f"that a {SHARED_MEMORY} reaches; leave it out"
        )
    return Peers(listed)


def _each(calls: Sequence[Callable[[], None]]) -> None:
    for call in calls:
        call()


def _reweigh(known: Known, loans: Loans | None, weights: Weights | None) -> None:
    if loans is not None:
        loans.clear()
    known.reweigh(weights)


def facts_of(config: EngineConfig, sizes: ModelSizes, ranks: Ranks, hf: Any, weights: Weights | None) -> Known:
    """Nothing in it depends on the machine: engines on other devices have the same."""
    kept = {name: value for name, value in hf.to_dict().items() if name not in _NAMES}
    place = ranks.workers[0].place
    whose = (place.rank, place.size) if ranks.channel is not None else None  # a part of each page
    scales = [hashlib.sha256(each).hexdigest() for each in ranks.each(scales_of)] if config.calculate_kv_scales else []
    parts = [whose, sorted(kept.items()), config.quantization, config.activation_bits, name_of(sizes.dtype), scales]
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
