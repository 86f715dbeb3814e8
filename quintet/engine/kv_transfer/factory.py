"""Makes the KV connector of a configuration, and the identity under which its pages are stored."""

import hashlib
import logging
import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import psutil

from quintet.config import EngineConfig, KVTransferConfig
from quintet.config.cache import LMCACHE
from quintet.config.kv_transfer import SHARED_MEMORY
from quintet.distributed.keys import kv_transfer_key
from quintet.engine.executor.worker_group import WorkerGroup
from quintet.engine.kv_cache.kv_scales import scales_of
from quintet.engine.kv_cache.manager import KVCacheManager
from quintet.engine.kv_transfer.async_store import AsyncStoreConnector
from quintet.engine.kv_transfer.connector import KVConnector, NullConnector
from quintet.engine.kv_transfer.lmcache.store import LMCacheStore, check_installed
from quintet.engine.kv_transfer.manager import KVTransferManager
from quintet.engine.kv_transfer.offload.disk import DiskTier, make_shared_folder, other_folders
from quintet.engine.kv_transfer.offload.host_memory import HostTier
from quintet.engine.kv_transfer.offload.tiers import TieredConnector
from quintet.engine.kv_transfer.p2p.setup import fingerprint_of, make_p2p_transfer
from quintet.engine.kv_transfer.page_copier import PageCopier
from quintet.engine.kv_transfer.rank_agreement import RankAgreement
from quintet.engine.kv_transfer.rank_shares import RankShares
from quintet.engine.parallel.external_launcher import EXTERNAL
from quintet.engine.parallel.ray import BACKEND
from quintet.interface.platform import Capabilities, Channel
from quintet.model_loader.loader import placement_parts
from quintet.model_loader.sharded_state import FORMATS as SHARDED
from quintet.model_loader.sharded_state import SHARDS
from quintet.model_loader.weight_files import WeightFiles
from quintet.model_loader.weights_cache import digest

if TYPE_CHECKING:
    from quintet.engine.executor.engine_plan import EnginePlan

logger = logging.getLogger(__name__)

GIB = 2**30
LOAD_TIMEOUT = 30.0  # seconds until pages that have not arrived count as failed


def check_kv_transfer(config: EngineConfig, facts: Capabilities, ranks: WorkerGroup) -> None:
    """Raises ValueError where a KV connector cannot store the pages of a model or a device."""
    name = "kv_transfer_config"
    if config.stores_kv_externally:
        name = "kv_offloading_backend" if config.kv_offloading_backend == LMCACHE else "kv_offloading_size"
    elif config.kv_transfer_config.kv_connector is None:
        return
    if ranks.channel is not None:
        _check_rank_processes(config)
        if facts.spmd:
            raise ValueError(
                f"{name}: each machine holds a part of every page here, and no other can copy that; leave it out"
            )
    arrangement = ranks.workers[0].kv_cache_layout
    if arrangement.has_states:
        raise ValueError(
            f"{name}: layers of this model keep a state per request, which is not found by pages alone; leave it out"
        )
    if arrangement.has_cross:
        raise ValueError(f"{name}: layers of this model read an encoder's rows, whose pages stay here; leave it out")
    if not arrangement.groups:
        raise ValueError(f"{name}: this model keeps nothing from step to step; leave it out")
    if not config.enable_prefix_caching:
        raise ValueError(
            f"{name}: pages are found again by the prefix cache, and enable_prefix_caching is off; leave one of the "
            "two out"
        )
    if config.kv_offloading_backend == LMCACHE:
        check_installed()
    if facts.ops_only and ranks.workers[0].ops.choice("gather_pages").provider == "reference":
        raise ValueError(f"{name}: pages of this device cannot be copied to the host; leave it out")


def _check_rank_processes(config: EngineConfig) -> None:
    """Raises ValueError where rank processes cannot send and receive their parts of pages."""
    if config.kv_offloading_backend == LMCACHE:
        raise ValueError(
            "kv_offloading_backend='lmcache': ranks that are processes are each answered at a moment of their own, and "
            "do not agree on that yet; take native, or one process"
        )
    if config.kv_transfer_config.kv_connector is None:
        return
    if config.distributed_executor_backend in (EXTERNAL, BACKEND):
        raise ValueError(
            f"kv_transfer_config: distributed_executor_backend={config.distributed_executor_backend!r} does not give "
            "the address of each machine; start the ranks by nnodes, or all on one machine, or leave it out"
        )
    if config.nnodes > 1:
        _check_machines(config.kv_transfer_config)


def _check_machines(settings: KVTransferConfig) -> None:
    """Raises ValueError where ranks on several machines could not be reached."""
    if settings.kv_connector == SHARED_MEMORY:
        raise ValueError(
            f"kv_transfer_config.kv_connector {SHARED_MEMORY} is of one machine, and nnodes are several; take "
            "TCPConnector"
        )
    if settings.kv_ip in (KVTransferConfig.kv_ip, "localhost", "::1") and settings.is_producer:
        raise ValueError(
            "kv_transfer_config.kv_ip: with nnodes, give on each machine the address at which others reach it"
        )


def make_kv_transfer(
    prepared: "EnginePlan", tables: KVCacheManager, files: WeightFiles | None
) -> KVTransferManager | None:
    """Returns the scheduler side of the KV connector; None if the configuration has none. ValueError says why it
    cannot."""
    config, ranks = prepared.config, prepared.ranks
    meets = config.kv_transfer_config.kv_connector is not None
    if not config.stores_kv_externally and not meets:
        return None
    copies = PageCopier(ranks, prepared.capabilities.static_shapes)
    council = None if ranks.channel is None else RankAgreement(ranks.channel, LOAD_TIMEOUT)
    if ranks.channel is not None:  # their parts of a page may differ in size; all copy the same number of pages
        copies.pages_per_copy = min(_gather(ranks.channel, copies.pages_per_copy))
    places, shared = _make_connector(config, copies, ranks, council), config.kv_offloading_backend == LMCACHE
    transfer = None
    try:
        cut = not config.calculate_kv_scales  # each rank has the scales of its own heads only
        among, known = RankShares(ranks, council, copies.words if cut else None), None
        if meets or (shared and files is not None):
            known = fingerprint_of(config, prepared.sizes, ranks, (prepared.hf_config, files), among.grid)
        if meets:
            assert known is not None
            transfer = make_p2p_transfer(config, known, copies, tables, places.changed, among)
        identity = cache_fingerprint(config, prepared.capabilities, ranks, files, prepared.hf_config)
        if shared and known is not None:  # so that engines on other machines find the same pages
            identity = msgspec.msgpack.encode(known())
    except BaseException:
        places.close()
        raise
    policy = (meets and config.kv_transfer_config.kv_load_failure_policy) or config.kv_load_failure_policy
    patience = LOAD_TIMEOUT if council is None else math.inf  # ranks agree on timeouts (rank_agreement.py)
    return KVTransferManager(places, copies, tables, identity, patience, policy == "fail", transfer, council)


def _make_connector(
    config: EngineConfig, copies: PageCopier, ranks: WorkerGroup, council: RankAgreement | None
) -> KVConnector:
    if not config.stores_kv_externally:
        return NullConnector()
    if config.kv_offloading_backend != LMCACHE:
        return _make_tiers(config, copies, ranks, council)
    asked, key = dict(config.kv_offloading_lmcache or {}), kv_transfer_key(config.kv_transfer_config)
    if config.kv_offloading_size is not None:  # as in vLLM
        asked |= {"local_cpu": True, "max_local_cpu_size": float(config.kv_offloading_size)}
    return AsyncStoreConnector("LMCache", lambda: LMCacheStore(asked, copies.words, key), copies.words)


def _gather(channel: Channel, number: int) -> list[int]:
    """Returns the number of every rank."""
    return [msgspec.msgpack.decode(note, type=int) for note in channel.exchange(msgspec.msgpack.encode(number))]


def _make_tiers(
    config: EngineConfig, copies: PageCopier, ranks: WorkerGroup, council: RankAgreement | None
) -> TieredConnector:
    """Makes the connector for CPU memory, and for a folder if one is configured. Rank processes each hold their part of
    every page in their share of the memory: all hold the same number of pages, so that all know the same pages at the
    same step. Each rank has a subfolder of its own, and ranks agree on the pages there (rank_agreement.py)."""
    size, order = int(float(config.kv_offloading_size or 0) * GIB), config.kv_offloading_policy
    _check_memory(size)
    count = size // max(copies.nbytes, 1)
    if ranks.channel is not None:
        count = min(_gather(ranks.channel, count // ranks.workers[0].rank_info.size))
    host = HostTier(count, copies.words, order)
    if not host.capacity:
        raise ValueError(
            f"kv_offloading_size={size / GIB:g}: a page takes {copies.nbytes / 2**20:.2f} MiB, and none fits; raise it"
        )
    disk = None
    if config.kv_offloading_folder is not None:
        folder = Path(config.kv_offloading_folder).expanduser()
        disk_size, place = int(float(config.kv_offloading_folder_size) * GIB), ranks.workers[0].rank_info
        others = other_folders(folder, 0 if council is None else place.size)
        if council is not None:
            folder, disk_size = make_shared_folder(folder) / f"rank-{place.rank}", disk_size // place.size
        disk = DiskTier(folder, disk_size, copies.words, order, others)
    where = "" if disk is None else f", {disk.capacity} in {config.kv_offloading_folder} ({len(disk)} lie there)"
    logger.info("KV connector: %d pages of %.2f MiB in host memory%s", host.capacity, copies.nbytes / 2**20, where)
    return TieredConnector(host, disk, council)


def _check_memory(size: int) -> None:
    """Raises ValueError if the host has less free memory, now that the model is loaded: rows take memory as they fill,
    and a process that takes too much is killed."""
    free = psutil.virtual_memory().available
    if size > free:
        raise ValueError(f"kv_offloading_size={size / GIB:g}: {free / GIB:.1f} GiB of host memory are free; lower it")


def cache_fingerprint(
    config: EngineConfig, facts: Capabilities, ranks: WorkerGroup, weights: WeightFiles | None, hf: Any
) -> bytes:
    """Returns a digest of all that a page's content depends on, except its tokens: the checkpoint, what was made of it,
    dtypes, cache layout, ranks and device. Without weight files, the digest is valid for this start alone."""
    first, files = ranks.workers[0], _files(weights)
    computed = [first.kv_cache_layout, config.page_size, config.kv_cache_dtype, config.attention_backend, facts.detail]
    scales = (
        [hashlib.sha256(each).digest() for each in ranks.map_workers(scales_of)] if config.calculate_kv_scales else []
    )
    asked = [config.quantization, config.activation_bits, config.batch_invariant]
    whose = (len(ranks.workers), first.rank_info.rank, first.rank_info.size, first.rank_info.stages)
    parts = [whose, sorted(hf.to_dict().items()), asked, computed, scales]
    parts += [] if files else [os.urandom(16)]
    return digest([*parts, *placement_parts(first.model, first.platform, facts.layout_key)], files).encode()


def _files(weights: WeightFiles | None) -> list[Path]:
    if weights is None:
        return []
    if weights.load_format in SHARDED:
        return sorted(weights.folder.glob(SHARDS))
    try:
        return weights.files()
    except (OSError, ValueError) as error:
        logger.info("KV connector: pages are found only until the engine ends: %s", error)
        return []
