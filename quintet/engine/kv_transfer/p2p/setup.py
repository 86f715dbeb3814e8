"""Sets up an engine's page transfer from its settings: where it listens, which engines it asks, and its key."""

import functools
import hashlib
import logging
import secrets
from collections.abc import Callable, Sequence
from threading import Event
from typing import Any, NamedTuple

import msgspec

from quintet.config import EngineConfig, KVTransferConfig
from quintet.config.kv_transfer import SHARED_MEMORY
from quintet.distributed.keys import kv_transfer_key
from quintet.engine.executor.worker import ModelSizes
from quintet.engine.executor.worker_group import WorkerGroup
from quintet.engine.kv_cache.manager import KVCacheManager
from quintet.engine.kv_scales import scales_of
from quintet.engine.kv_transfer.head_slices import Grid
from quintet.engine.kv_transfer.p2p.allowed_peers import Peers
from quintet.engine.kv_transfer.p2p.consumer import Address, PageClient, Route
from quintet.engine.kv_transfer.p2p.producer import PageServer
from quintet.engine.kv_transfer.p2p.protocol import Channel, Facts
from quintet.engine.kv_transfer.p2p.send_buffer import SendBuffer
from quintet.engine.kv_transfer.p2p.sockets import connected, connected_here, leave, listen, listen_here
from quintet.engine.kv_transfer.p2p.transfers import Transfer
from quintet.engine.kv_transfer.p2p.transports import Transport, means_of
from quintet.engine.kv_transfer.page_copier import PageCopier
from quintet.engine.kv_transfer.rank_shares import RankShares, part_of
from quintet.hub.dtypes import name_of
from quintet.model_loader.sharded_state import FORMATS as SHARDED
from quintet.model_loader.sharded_state import SHARDS
from quintet.model_loader.weight_files import Weights

logger = logging.getLogger(__name__)

SAMPLES, SAMPLE = 32, 4096  # samples of each weight file that distinguish it from others, and their bytes
_NAMES = ("_name_or_path", "transformers_version", "torch_dtype", "dtype")  # of a configuration; they change no result


Weigh = Callable[[Weights | None], str]


class ModelFingerprint:
    """Facts of this engine's pages, as of now: they change with the weights."""

    def __init__(self, facts: Facts, weigh: Weigh) -> None:
        self.facts, self._weigh = facts, weigh

    def __call__(self) -> Facts:
        return self.facts

    def reweigh(self, weights: Weights | None) -> None:
        self.facts = msgspec.structs.replace(self.facts, checkpoint=self._weigh(weights))


def make_transfer(  # the last is for ranks
    config: EngineConfig,
    known: ModelFingerprint,
    copies: PageCopier,
    tables: KVCacheManager,
    changed: Event,
    among: RankShares,
) -> Transfer:
    """Makes the transfer; ValueError says which setting is not possible."""
    settings = config.kv_transfer_config
    side = _Side(settings, known, copies, among, kv_transfer_key(settings), [])
    peers = _asked(settings, side.key) if settings.takes else None
    transfer, means = Transfer(tables, copies.read, copies.at_once), means_of(settings, bool(side.key))
    transfer.engine, transfer.council = settings.engine_id or secrets.token_hex(8), among.council
    try:
        among.name(transfer)
        if settings.gives:
            _give(side, transfer, means, config.data_parallel_rank or 0)
        if settings.takes:
            _take(side, transfer, means, peers, changed)
        among.tell_ports(transfer, side.here)
    except BaseException:
        _each([*side.closing, means.close])
        raise
    transfer.close = functools.partial(_each, [*side.closing, means.close])
    transfer.reweigh = functools.partial(_reweigh, known, transfer.loans)
    return transfer


class _Side(NamedTuple):
    """Inputs of the producer and the consumer, and the calls that close them."""

    settings: KVTransferConfig
    known: ModelFingerprint
    copies: PageCopier
    among: RankShares
    key: bytes
    closing: list[Callable[[], None]]

    @property
    def here(self) -> bool:
        """Returns whether pages only go to engines of this machine, through shared memory."""
        return self.settings.kv_connector == SHARED_MEMORY


def _give(side: _Side, transfer: Transfer, means: Transport, engine: int) -> None:
    """Starts the producer. engine: data-parallel rank."""
    settings, among, extras = side.settings, side.among, side.settings.extras
    room = among.least(settings.kv_buffer_size // among.size // side.copies.nbytes)  # pages: the same on all ranks
    loans = SendBuffer(room * side.copies.nbytes, side.copies.words, extras.lease_seconds, side.here)
    side.closing.append(loans.close)
    if not loans.capacity:
        raise ValueError(
            f"kv_transfer_config.kv_buffer_size={settings.kv_buffer_size}: a page takes {side.copies.nbytes} bytes, "
            "and none fits; raise it"
        )
    if side.here:
        listening, transfer.host = listen_here(among.socket(transfer.engine, among.rank))
        transfer.port = settings.kv_port or 1  # not used
        side.closing.append(functools.partial(leave, among.socket(transfer.engine, among.rank)))
    else:
        listening = listen(settings, bool(side.key), engine * among.size + among.rank)
        transfer.host, transfer.port = extras.host or settings.kv_ip, listening.getsockname()[1]
    giver = PageServer(loans, side.known, side.key, extras.timeout_seconds)
    giver.way, giver.share = means.name, means.share(loans)
    giver.listen(listening)
    side.closing.insert(0, giver.close)
    transfer.loans, transfer.giver = loans, giver
    logger.info("pages are given to other engines at %s:%d", transfer.host, transfer.port)


def _take(side: _Side, transfer: Transfer, means: Transport, peers: Peers | None, changed: Event) -> None:
    """Starts the consumer."""
    patience, copies = side.settings.extras.timeout_seconds, side.copies
    reach: Callable[[Address], Channel] = functools.partial(
        connected, patience=patience, longest=copies.nbytes, keyed=bool(side.key), peers=peers
    )
    if side.here:
        reach = functools.partial(connected_here, patience=patience)
    taker = PageClient(Route(reach, side.known, side.key, copies.words, means.open(patience), means.name), changed)
    transfer.taker, transfer.sources = taker, functools.partial(side.among.sources, here=side.here)
    side.closing.append(taker.close)


def _asked(settings: KVTransferConfig, key: bytes) -> Peers | None:
    """Returns the peers that may be asked for pages; None (no list): any host that a request names, if there is a
    key."""
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


def _reweigh(known: ModelFingerprint, loans: SendBuffer | None, weights: Weights | None) -> None:
    if loans is not None:
        loans.clear()
    known.reweigh(weights)


def facts_of(
    config: EngineConfig,
    sizes: ModelSizes,
    ranks: WorkerGroup,
    described: tuple[Any, Weights | None],
    grid: Grid | None,
) -> ModelFingerprint:
    """Returns the facts of this engine's pages, the same on every machine and device. described: configuration and
    checkpoint. grid: page layout by heads, where other engines may shard them differently."""
    hf, weights = described
    kept = {name: value for name, value in hf.to_dict().items() if name not in _NAMES}
    scales = [hashlib.sha256(each).hexdigest() for each in ranks.each(scales_of)] if config.calculate_kv_scales else []
    parts = [sorted(kept.items()), config.quantization, config.activation_bits, name_of(sizes.dtype), scales]
    dtype = name_of(sizes.kv_dtype or sizes.dtype)

    def weigh(of: Weights | None) -> str:
        return hashlib.sha256(repr([*parts, _sampled(of)]).encode()).hexdigest()

    facts = Facts(weigh(weights), dtype, config.page_size, _shapes(ranks, grid), part_of(ranks))
    return ModelFingerprint(facts, weigh)


def _shapes(ranks: WorkerGroup, grid: Grid | None) -> tuple[tuple[int, ...], ...]:
    """Returns the shapes of a page's tensors: with the heads of all ranks, where known, else of each rank here."""
    shapes = [tuple(map(int, layout.shape)) for rank in ranks.workers for layout in rank.arrangement.layouts]
    if grid is None:
        return tuple(shapes)
    return tuple((kept.planes, kept.heads, *shape[2:]) for kept, shape in zip(grid, shapes, strict=False))


def _sampled(weights: Weights | None) -> list[str]:
    """Returns digests of a checkpoint's files: their sizes, and samples of their bytes. ValueError where there is
    none."""
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
