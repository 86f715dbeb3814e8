"""An engine's side of pages between engines, made of its settings: where it listens, whom it asks, with what key."""

import functools
import hashlib
import logging
import secrets
from collections.abc import Callable, Sequence
from threading import Event
from typing import Any, NamedTuple

import msgspec

from quintet.config import EngineConfig, KVTransferConfig
from quintet.engine.dtypes import name_of
from quintet.engine.elsewhere.allowed import Peers
from quintet.engine.elsewhere.among import Among, part_of
from quintet.engine.elsewhere.copies import Copies
from quintet.engine.elsewhere.cuts import Grid
from quintet.engine.elsewhere.giver import Giver
from quintet.engine.elsewhere.loans import Loans
from quintet.engine.elsewhere.sockets import connected, connected_here, key_of, leave, listen, listen_here
from quintet.engine.elsewhere.taker import Address, Taker, Way
from quintet.engine.elsewhere.transfer import Transfer
from quintet.engine.elsewhere.ways import Means, means_of
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
    side = _Side(settings, known, copies, among, key_of(settings), [])
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
    """What both halves are made of, and what ends them."""

    settings: KVTransferConfig
    known: Known
    copies: Copies
    among: Among
    key: bytes
    closing: list[Callable[[], None]]

    @property
    def here(self) -> bool:
        """Whether pages go to engines of this machine alone, through shared memory."""
        return self.settings.kv_connector == SHARED_MEMORY


def _give(side: _Side, transfer: Transfer, means: Means, engine: int) -> None:
    """Listens for others. engine: which of several behind one door."""
    settings, among, extras = side.settings, side.among, side.settings.extras
    loans = Loans(settings.kv_buffer_size // among.size, side.copies.words, extras.lease_seconds, side.here)
    side.closing.append(loans.close)
    if not loans.capacity:
        raise ValueError(
            f"kv_transfer_config.kv_buffer_size={settings.kv_buffer_size}: a page takes {side.copies.nbytes} bytes, "
            "and none fits; raise it"
        )
    if side.here:
        listening, transfer.host = listen_here(among.socket(transfer.engine, among.rank))
        transfer.port = settings.kv_port or 1  # nobody looks at it
        side.closing.append(functools.partial(leave, among.socket(transfer.engine, among.rank)))
    else:
        listening = listen(settings, bool(side.key), engine * among.size + among.rank)
        transfer.host, transfer.port = extras.host or settings.kv_ip, listening.getsockname()[1]
    giver = Giver(loans, side.known, side.key, extras.timeout_seconds)
    giver.way, giver.share = means.name, means.share(loans)
    giver.listen(listening)
    side.closing.insert(0, giver.close)
    transfer.loans, transfer.giver = loans, giver
    logger.info("pages are given to other engines at %s:%d", transfer.host, transfer.port)


def _take(side: _Side, transfer: Transfer, means: Means, peers: Peers | None, changed: Event) -> None:
    """Asks others."""
    patience, copies = side.settings.extras.timeout_seconds, side.copies
    reach: Callable[[Address], Channel] = functools.partial(
        connected, patience=patience, longest=copies.nbytes, keyed=bool(side.key), peers=peers
    )
    if side.here:
        reach = functools.partial(connected_here, patience=patience)
    taker = Taker(Way(reach, side.known, side.key, copies.words, means.open(patience), means.name), changed)
    transfer.taker, transfer.sources = taker, functools.partial(side.among.sources, here=side.here)
    side.closing.append(taker.close)


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


def facts_of(
    config: EngineConfig, sizes: ModelSizes, ranks: Ranks, described: tuple[Any, Weights | None], grid: Grid | None
) -> Known:
    """Nothing in it depends on the machine: engines on other devices have the same. described: by a configuration and
    a checkpoint. grid: how pages lie whose heads others may share out differently."""
    hf, weights = described
    kept = {name: value for name, value in hf.to_dict().items() if name not in _NAMES}
    scales = [hashlib.sha256(each).hexdigest() for each in ranks.each(scales_of)] if config.calculate_kv_scales else []
    parts = [sorted(kept.items()), config.quantization, config.activation_bits, name_of(sizes.dtype), scales]
    dtype = name_of(sizes.kv_dtype or sizes.dtype)

    def weigh(of: Weights | None) -> str:
        return hashlib.sha256(repr([*parts, _sampled(of)]).encode()).hexdigest()

    facts = Facts(weigh(weights), dtype, config.page_size, _shapes(ranks, grid), part_of(ranks))
    return Known(facts, weigh)


def _shapes(ranks: Ranks, grid: Grid | None) -> tuple[tuple[int, ...], ...]:
    """Of a page's tensors: with the heads of all ranks, where these are known, or those of each rank here."""
    shapes = [tuple(map(int, layout.shape)) for rank in ranks.workers for layout in rank.arrangement.layouts]
    if grid is None:
        return tuple(shapes)
    return tuple((kept.planes, kept.heads, *shape[2:]) for kept, shape in zip(grid, shapes, strict=False))


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
