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
from quintet.engine.executor.model_part import ModelSizes
from quintet.engine.executor.worker_group import WorkerGroup
from quintet.engine.kv_cache.kv_scales import scales_of
from quintet.engine.kv_cache.manager import KVCacheManager
from quintet.engine.kv_transfer.head_slices import PageGrid
from quintet.engine.kv_transfer.p2p.allowed_peers import AllowedPeers
from quintet.engine.kv_transfer.p2p.consumer import LeaseAddress, PageClient, Route
from quintet.engine.kv_transfer.p2p.producer import PageServer
from quintet.engine.kv_transfer.p2p.protocol import PageFormat, PeerChannel
from quintet.engine.kv_transfer.p2p.send_buffer import SendBuffer
from quintet.engine.kv_transfer.p2p.sockets import connect, connect_local, listen, listen_local, remove_local_socket
from quintet.engine.kv_transfer.p2p.transfers import P2PTransfer
from quintet.engine.kv_transfer.p2p.transports import Transport, transport_of
from quintet.engine.kv_transfer.page_copier import PageCopier
from quintet.engine.kv_transfer.rank_shares import RankShares, part_of
from quintet.hub.dtypes import name_of
from quintet.interface.types import cache_dtype_name
from quintet.model_loader.sharded_state import FORMATS as SHARDED
from quintet.model_loader.sharded_state import SHARDS
from quintet.model_loader.weight_files import WeightFiles

logger = logging.getLogger(__name__)

NUM_SAMPLES, SAMPLE_BYTES = 32, 4096  # samples of each weight file that distinguish it from others, and their bytes
_IGNORED_KEYS = (
    "_name_or_path",
    "transformers_version",
    "torch_dtype",
    "dtype",
)  # of a configuration; they change no result


Checksum = Callable[[WeightFiles | None], str]


class ModelFingerprint:
    """Facts of this engine's pages, as of now: they change with the weights."""

    def __init__(self, facts: PageFormat, weigh: Checksum) -> None:
        self.page_format, self._checksum = facts, weigh

    def __call__(self) -> PageFormat:
        return self.page_format

    def update_weights(self, weights: WeightFiles | None) -> None:
        """Follows a change of weights. None: they came from a trainer, and no other engine's pages are like these."""
        checkpoint = f"updated {secrets.token_hex(16)}" if weights is None else self._checksum(weights)
        self.page_format = msgspec.structs.replace(self.page_format, checkpoint=checkpoint)


def make_p2p_transfer(  # the last is for ranks
    config: EngineConfig,
    known: ModelFingerprint,
    copies: PageCopier,
    tables: KVCacheManager,
    changed: Event,
    among: RankShares,
) -> P2PTransfer:
    """Makes the transfer; ValueError says which setting is not possible."""
    settings = config.kv_transfer_config
    side = _P2PContext(settings, known, copies, among, kv_transfer_key(settings), [])
    peers = _allowed_peers(settings, side.key) if settings.is_consumer else None
    transfer, means = P2PTransfer(tables, copies.read, copies.pages_per_copy), transport_of(settings, bool(side.key))
    transfer.engine, transfer.rank_agreement = settings.engine_id or secrets.token_hex(8), among.rank_agreement
    try:
        among.agree_on_names(transfer)
        if settings.is_producer:
            _start_producer(side, transfer, means, config.data_parallel_rank or 0)
        if settings.is_consumer:
            _start_consumer(side, transfer, means, peers, changed)
        among.exchange_addresses(transfer, side.is_local)
    except BaseException:
        _call_all([*side.closing, means.close])
        raise
    transfer.close = functools.partial(_call_all, [*side.closing, means.close])
    transfer.update_weights = functools.partial(_update_weights, known, transfer.send_buffer)
    return transfer


class _P2PContext(NamedTuple):
    """Inputs of the producer and the consumer, and the calls that close them."""

    settings: KVTransferConfig
    fingerprint: ModelFingerprint
    page_copier: PageCopier
    rank_shares: RankShares
    key: bytes
    closing: list[Callable[[], None]]

    @property
    def is_local(self) -> bool:
        """Returns whether pages only go to engines of this machine, through shared memory."""
        return self.settings.kv_connector == SHARED_MEMORY


def _start_producer(side: _P2PContext, transfer: P2PTransfer, means: Transport, engine: int) -> None:
    """Starts the producer. engine: data-parallel rank."""
    settings, among, extras = side.settings, side.rank_shares, side.settings.extras
    room = among.minimum(
        settings.kv_buffer_size // among.size // side.page_copier.nbytes
    )  # pages: the same on all ranks
    loans = SendBuffer(room * side.page_copier.nbytes, side.page_copier.words, extras.lease_seconds, side.is_local)
    side.closing.append(loans.close)
    if not loans.capacity:
        raise ValueError(
            f"kv_transfer_config.kv_buffer_size={settings.kv_buffer_size}: a page takes {side.page_copier.nbytes} "
            "bytes, "
            "and none fits; raise it"
        )
    if side.is_local:
        listening, transfer.host = listen_local(among.socket_name(transfer.engine, among.rank))
        transfer.port = settings.kv_port or 1  # not used
        side.closing.append(functools.partial(remove_local_socket, among.socket_name(transfer.engine, among.rank)))
    else:
        listening = listen(settings, bool(side.key), engine * among.size + among.rank)
        transfer.host, transfer.port = extras.host or settings.kv_ip, listening.getsockname()[1]
    giver = PageServer(loans, side.fingerprint, side.key, extras.timeout_seconds)
    giver.transport, giver.share_memory = means.name, means.share_memory(loans)
    giver.listen(listening)
    side.closing.insert(0, giver.close)
    transfer.send_buffer, transfer.producer = loans, giver
    logger.info("pages are given to other engines at %s:%d", transfer.host, transfer.port)


def _start_consumer(
    side: _P2PContext, transfer: P2PTransfer, means: Transport, peers: AllowedPeers | None, changed: Event
) -> None:
    """Starts the consumer."""
    patience, copies = side.settings.extras.timeout_seconds, side.page_copier
    reach: Callable[[LeaseAddress], PeerChannel] = functools.partial(
        connect, patience=patience, longest=copies.nbytes, keyed=bool(side.key), peers=peers
    )
    if side.is_local:
        reach = functools.partial(connect_local, patience=patience)
    taker = PageClient(
        Route(reach, side.fingerprint, side.key, copies.words, means.open_region(patience), means.name), changed
    )
    transfer.consumer, transfer.origins = taker, functools.partial(side.rank_shares.origins, here=side.is_local)
    side.closing.append(taker.close)


def _allowed_peers(settings: KVTransferConfig, key: bytes) -> AllowedPeers | None:
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
    return AllowedPeers(listed)


def _call_all(calls: Sequence[Callable[[], None]]) -> None:
    for call in calls:
        call()


def _update_weights(known: ModelFingerprint, loans: SendBuffer | None, weights: WeightFiles | None) -> None:
    if loans is not None:
        loans.clear()
    known.update_weights(weights)


def fingerprint_of(
    config: EngineConfig,
    sizes: ModelSizes,
    ranks: WorkerGroup,
    described: tuple[Any, WeightFiles | None],
    grid: PageGrid | None,
) -> ModelFingerprint:
    """Returns the facts of this engine's pages, the same on every machine and device. described: configuration and
    checkpoint. grid: page layout by heads, where other engines may shard them differently."""
    hf, weights = described
    kept = {name: value for name, value in hf.to_dict().items() if name not in _IGNORED_KEYS}
    scales = (
        [hashlib.sha256(each).hexdigest() for each in ranks.map_workers(scales_of)]
        if config.calculate_kv_scales
        else []
    )
    parts = [sorted(kept.items()), config.quantization, config.activation_bits, name_of(sizes.dtype), scales]
    dtype = cache_dtype_name(sizes.kv_dtype or sizes.dtype)

    def weigh(of: WeightFiles | None) -> str:
        return hashlib.sha256(repr([*parts, _file_digests(of)]).encode()).hexdigest()

    facts = PageFormat(weigh(weights), dtype, config.page_size, _shapes(ranks, grid), part_of(ranks))
    return ModelFingerprint(facts, weigh)


def _shapes(ranks: WorkerGroup, grid: PageGrid | None) -> tuple[tuple[int, ...], ...]:
    """Returns the shapes of a page's tensors: with the heads of all ranks, where known, else of each rank here."""
    shapes = [tuple(map(int, layout.shape)) for rank in ranks.workers for layout in rank.kv_cache_layout.layouts]
    if grid is None:
        return tuple(shapes)
    return tuple((kept.planes, kept.heads, *shape[2:]) for kept, shape in zip(grid, shapes, strict=False))


def _file_digests(weights: WeightFiles | None) -> list[str]:
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
            for at in range(NUM_SAMPLES):
                stream.seek(max(0, (size - SAMPLE_BYTES) * at // (NUM_SAMPLES - 1)))
                seen.update(stream.read(SAMPLE_BYTES))
        found.append(seen.hexdigest())
    return found
