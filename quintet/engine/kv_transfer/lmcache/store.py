"""Store of pages in the tiers of the LMCache library: host memory, a disk, a remote.

Only its StorageManager is used, with keys of ours and blocks of bytes: not its engine, which knows vLLM's cache, and
not the parts that listen on the network or run code that they receive.
"""

import asyncio
import hashlib
import hmac
import importlib
import importlib.util
import logging
import struct
import threading
import time
from collections.abc import Mapping
from concurrent.futures import TimeoutError as TooLate
from typing import Any

import numpy as np
import psutil
import torch

from quintet.common.distribution import install_hint
from quintet.config.schema.environment import unchanged_environment
from quintet.engine.kv_transfer.connector import PageRows
from quintet.engine.kv_transfer.lmcache.config import check_lmcache_config

logger = logging.getLogger(__name__)

GIB = 2**30
NOT_INSTALLED = "kv_offloading_backend='lmcache' needs LMCache ({why}); {install}, or use 'native'"
MAGIC, VERSION = b"quintet: a page\0", 1  # raised with any change of a block's content
HEADER = struct.Struct("<16sI12x32s")  # magic, version, seal; a page follows
MODEL = "quintet"  # in place of the model's name, which is in our keys: other software finds no block of ours
MIN_PAGES = 4  # blocks that LMCache's memory must have room for: it waits for some while it reads
TIMEOUT = 10.0  # seconds that a disk or a remote may take for a block, until it counts as not stored
# seconds after which a remote that failed is asked again; LMCache waits ten before it connects anew
RETRY_SECONDS = 11.0
CLOSE_SECONDS = 1.0  # seconds that LMCache may take to end
MAX_BAD_KEYS = 4096  # damaged blocks that are remembered, to be written anew
_MEMORY, _DISK = "LocalCPUBackend", "LocalDiskBackend"  # the tiers of this process alone


class LMCacheLibrary:
    """LMCache's own modules; ValueError where it is not installed, or cannot be loaded."""

    def __init__(self) -> None:
        try:
            with unchanged_environment():
                self.config = importlib.import_module("lmcache.v1.config")
                self.keys = importlib.import_module("lmcache.utils")
                self.memory = importlib.import_module("lmcache.v1.memory_management")
                self.metadata = importlib.import_module("lmcache.v1.metadata")
                self.events = importlib.import_module("lmcache.v1.event_manager")
                self.storage = importlib.import_module("lmcache.v1.storage_backend.storage_manager")
        except ImportError as error:
            raise ValueError(NOT_INSTALLED.format(why=error, install=install_hint("lmcache"))) from None
        _redirect_logs()


def check_installed() -> None:
    """Raises ValueError where LMCache is not installed, before weights are read."""
    if importlib.util.find_spec("lmcache") is None:
        raise ValueError(NOT_INSTALLED.format(why="it is not installed", install=install_hint("lmcache")))


def _redirect_logs() -> None:
    """Sends LMCache's log where ours goes, from warnings on: each of its modules would write by itself."""
    for name, entry in list(logging.root.manager.loggerDict.items()):
        if (name == "lmcache" or name.startswith("lmcache.")) and isinstance(entry, logging.Logger):
            entry.handlers.clear()
            entry.filters[:] = [_log_as_lmcache]
            entry.propagate, entry.parent = True, logger
            if entry.level == logging.INFO:  # its default
                entry.setLevel(logging.WARNING)


def _log_as_lmcache(record: logging.LogRecord) -> bool:
    record.msg, record.args = f"LMCache: {record.getMessage()}", None
    return True


class LMCacheStore:
    """LMCache store of one engine. One thread makes and calls it; LMCache's threads inherit its daemon flag: a thread
    that hangs would otherwise keep the process from ending."""

    def __init__(self, asked: Mapping[str, Any], words: int, key: bytes) -> None:
        """asked: LMCache settings, which override those of its file and environment variables. key: the secret of all
        who may write pages; empty: anyone may. ValueError says what is not possible."""
        self._library, self._words, self._key = LMCacheLibrary(), words, hashlib.sha256(key).digest() if key else b""
        self._nbytes = HEADER.size + 4 * words
        self._config = config = self._make_config(asked)
        self.timeout = config.lookup_timeout_ms / 1000
        self._dtype, self._shape = torch.uint8, torch.Size((1, 1, 1, self._nbytes))
        metadata = self._library.metadata.LMCacheMetadata(
            model_name=MODEL, world_size=1, local_world_size=1, worker_id=0, local_worker_id=0, role="worker",
            kv_dtype=self._dtype, kv_shape=(1, 1, 1, 1, self._nbytes), chunk_size=1,
        )  # fmt: skip
        self._manager = manager = self._made(config, metadata)
        _redirect_logs()
        self._bad_keys = dict[bytes, None]()
        self._remotes = RemoteTiers(manager, self.timeout)
        names = ", ".join(manager.storage_backends)
        logger.info("KV connector: LMCache stores blocks of %.2f MiB in %s", self._nbytes / 2**20, names)

    def _make_config(self, asked: Mapping[str, Any]) -> Any:
        """Returns LMCache's settings, with those that our blocks need."""
        try:
            config = self._library.config.load_engine_config_with_overrides(overrides=dict(asked))
        except Exception as error:
            raise ValueError(f"LMCache's settings cannot be read: {error}") from None
        check_lmcache_config(config, asked)
        size, free = float(config.max_local_cpu_size), psutil.virtual_memory().available / GIB
        if not MIN_PAGES * self._nbytes / GIB <= size <= free:
            raise ValueError(
                f"LMCache's max_local_cpu_size={size:g} (GiB): it must have room for {MIN_PAGES} pages of "
                f"{self._nbytes / 2**20:.2f} MiB, and {free:.1f} GiB of host memory are free"
            )
        config.chunk_size = 1  # a block is one page, whatever its tokens
        # else LMCache would trust the size that is written before a block
        config.extra_config = {**(config.extra_config or {}), "save_chunk_meta": False}
        return config

    def _made(self, config: Any, metadata: Any) -> Any:
        """Makes LMCache's tiers."""
        try:
            with unchanged_environment():
                manager = self._library.storage.StorageManager(config, metadata, self._library.events.EventManager())
        except Exception as error:
            raise ValueError(f"LMCache cannot begin ({type(error).__name__}: {error}); see its settings") from None
        lacking = [f"RemoteBackend-{each}" for each in config.remote_storage_plugins or ()]
        if lacking := [each for each in lacking if each not in manager.storage_backends]:
            manager.close()
            raise ValueError(f"LMCache cannot begin its {lacking[0]}; the log says why")
        return manager

    def has(self, key: bytes) -> bool:
        if key in self._bad_keys:
            return False
        named, manager = self._named(key), self._manager
        own = [name for name, tier in manager.storage_backends.items() if not _is_remote(tier)]
        if own and manager.contains(named, own) is not None:
            return True
        return any(self._remotes.has(name, named) for name in list(manager.storage_backends) if name not in own)

    def get(self, key: bytes) -> PageRows:
        named = self._named(key)
        try:
            block = self._manager.get(named)
        except Exception as error:
            self._mark_bad(key)
            raise ValueError(f"a page cannot be read ({type(error).__name__}: {error})") from None
        if block is None:
            raise ValueError("it does not have a page any more")
        try:
            row = self._opened(key, _block_bytes(block))
        finally:
            block.ref_count_down()
            if not self._config.local_cpu:  # StorageManager.get() keeps the block all the same, for ever
                self._manager.remove(named, [_MEMORY])
        if row is None:
            self._mark_bad(key)
            raise ValueError("a page is damaged, or was not written by an engine with this one's key")
        return row

    def put(self, key: bytes, row: PageRows) -> bool:
        named = self._named(key)
        block = self._manager.allocate(self._shape, self._dtype, self._library.memory.MemoryFormat.KV_2LTD, True, False)
        if block is None:
            return False
        into = _block_bytes(block)
        page = np.ascontiguousarray(row).data.cast("B")
        into[: HEADER.size] = HEADER.pack(MAGIC, VERSION, self._seal(key, page))
        into[HEADER.size : self._nbytes] = page
        try:
            taken = self._put_in_tiers(named, block)
        finally:
            block.ref_count_down()
        self._bad_keys.pop(key, None)
        return taken

    def close(self) -> None:
        self._manager.clear([_MEMORY])  # else LMCache logs a complaint about each block
        closing = threading.Thread(target=self._manager.close, name="quintet-pages", daemon=True)
        closing.start()
        closing.join(CLOSE_SECONDS)  # its connection to Redis waits for itself for ever (0.5.6)

    def _mark_bad(self, key: bytes) -> None:
        """Treats the page as missing until it is written anew."""
        self._bad_keys[key] = None
        if len(self._bad_keys) > MAX_BAD_KEYS:
            del self._bad_keys[next(iter(self._bad_keys))]
        self._manager.remove(self._named(key), [_MEMORY, _DISK])

    def _named(self, key: bytes) -> Any:
        digest = int.from_bytes(hashlib.blake2b(key, digest_size=16).digest(), "big")
        return self._library.keys.CacheEngineKey(MODEL, 1, 0, digest, self._dtype)

    def _seal(self, key: bytes, page: memoryview) -> bytes:
        """Returns the seal of a page, which detects a damaged page, another page and, where there is a key, a forged
        one."""
        seal = hashlib.blake2b(key, digest_size=32, key=self._key)
        seal.update(page)
        return seal.digest()

    def _opened(self, key: bytes, block: memoryview) -> PageRows | None:
        """Returns a copy of the page in a block; None if it is not that page."""
        if len(block) < self._nbytes:
            return None
        magic, version, seal = HEADER.unpack(block[: HEADER.size])
        page = block[HEADER.size : self._nbytes]
        if magic != MAGIC or version != VERSION or not hmac.compare_digest(seal, self._seal(key, page)):
            return None
        return np.frombuffer(page, np.int32).copy()

    def _put_in_tiers(self, named: Any, block: Any) -> bool:
        """Puts a block into every tier, one by one: a connection of LMCache's (lm://) mixes up answers if it gets a
        second request meanwhile. Returns whether a tier has taken it."""
        until, taken = time.monotonic() + TIMEOUT, self._config.local_cpu
        for name, tier in list(self._manager.storage_backends.items()):
            if self._remotes.is_lost(name):
                continue
            done = threading.Event()
            tier.batched_submit_put_task([named], [block], on_complete_callback=lambda _, done=done: done.set())
            if _is_remote(tier):
                in_time = done.wait(max(0.0, until - time.monotonic()))
                self._remotes.check(name)
                taken |= in_time and not self._remotes.is_lost(name)
                continue
            while tier.exists_in_put_tasks(named) and time.monotonic() < until:
                time.sleep(0.001)  # a disk does not report that it already has the block
            taken |= name != _MEMORY
        return bool(taken)


class RemoteTiers:
    """LMCache's connections to remotes. One that fails is left alone for a while, and then asked again, or connected
    anew: LMCache itself would try each page on a broken connection, and never reconnect."""

    def __init__(self, manager: Any, patience: float) -> None:
        """patience: seconds that a remote may take to answer."""
        self._manager, self._patience = manager, patience
        self._failed = dict[str, int]()  # puts that failed, by remote
        self._lost = dict[str, float]()  # failed remotes, and when they failed
        for name in manager.storage_backends:
            self.check(name)

    def is_lost(self, name: str) -> bool:
        return name in self._lost

    def has(self, name: str, named: Any) -> bool:
        """Returns whether the remote answers, and has the block."""
        since = self._lost.get(name)
        if since is not None and time.monotonic() - since < RETRY_SECONDS:
            return False
        tier = self._manager.storage_backends[name]
        if tier.connection is None:
            tier.init_connection()
        try:
            found = bool(self._answer(tier, named))
        except TooLate:
            self._lose(name, f"it does not answer within {self._patience:g} s")
            return False
        except Exception as error:
            if since is not None and isinstance(error, OSError):
                tier.connection = None
            self._lose(name, f"{type(error).__name__} {error}")
            return False
        if since is not None:
            del self._lost[name]
            self._manager.set_backend_bypass(name, False)
            logger.warning("LMCache's %s answers again", name)
        return found

    def check(self, name: str) -> None:
        """Checks a remote after it was started, or was given a block."""
        tier = self._manager.storage_backends[name]
        failed = getattr(tier, "put_failed_count", 0)
        if _is_remote(tier) and (tier.connection is None or failed > self._failed.get(name, 0)):
            self._lose(name, "it takes no pages" if tier.connection is not None else "it cannot be connected")
        self._failed[name] = failed

    def _answer(self, tier: Any, named: Any) -> Any:
        if tier.connection is None:
            raise OSError("it cannot be connected")
        asked = asyncio.run_coroutine_threadsafe(tier.connection.exists(named), self._manager.loop)
        try:
            return asked.result(self._patience)
        finally:
            asked.cancel()

    def _lose(self, name: str, why: str) -> None:
        if name not in self._lost:
            logger.warning("LMCache's %s fails: %s; until it answers its pages are computed", name, why)
            self._manager.set_backend_bypass(name, True)
        self._lost[name] = time.monotonic()


def _is_remote(tier: Any) -> bool:
    return hasattr(tier, "connection")


def _block_bytes(block: Any) -> memoryview:
    """Returns the bytes of a block in LMCache's memory."""
    return memoryview(block.byte_array).cast("B")
