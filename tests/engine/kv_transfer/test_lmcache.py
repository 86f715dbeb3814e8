"""LMCache's tiers as a store of pages, with a stand-in for the library: what is asked of it, and what is believed."""

import asyncio
import sys
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from quintet.engine.kv_transfer.lmcache import store as lmcache_store
from quintet.engine.kv_transfer.lmcache.config import IGNORED, SUPPORTED, check_lmcache_config
from quintet.engine.kv_transfer.lmcache.store import HEADER, LMCacheStore

WORDS = 6
ROW = np.arange(WORDS, dtype=np.int32)
DEFAULTS: dict[str, Any] = {
    **dict.fromkeys((*SUPPORTED, *IGNORED)), "local_cpu": False,
    "max_local_cpu_size": 0.001, "lookup_timeout_ms": 3000, "remote_serde": "naive",
    "enable_p2p": False, "remote_config_url": None, "storage_plugins": None, "use_layerwise": False, "gds_path": None,
}  # fmt: skip


class Block:
    def __init__(self, nbytes: int) -> None:
        self.byte_array, self.holders = bytearray(nbytes), 1

    def ref_count_down(self) -> None:
        self.holders -= 1


class Memory:
    """A tier of this process."""

    def __init__(self, pages: dict[Any, Block]) -> None:
        self.pages = pages
        self.on = True
        self.busy = 0  # looks that are taken at it before a put has ended

    def exists_in_put_tasks(self, key: Any) -> bool:
        self.busy -= 1
        return self.busy >= 0

    def batched_submit_put_task(self, keys: list[Any], blocks: list[Block], on_complete_callback: Any) -> None:
        self.pages.update(zip(keys, blocks, strict=True) if self.on else ())


class Connection:
    def __init__(self, remote: "Remote") -> None:
        self.remote, self.fails = remote, False

    async def exists(self, key: Any) -> bool:
        if self.remote.down or self.fails:
            self.fails = True  # from then on: it does not heal by itself
            raise OSError("broken")
        while self.remote.hangs:
            await asyncio.sleep(0.001)
        return key in self.remote.pages


class Remote(Memory):
    def __init__(self, pages: dict[Any, Block]) -> None:
        super().__init__(pages)
        self.put_failed_count, self.down, self.hangs, self.silent = 0, False, False, False
        self.connection: Connection | None = Connection(self)

    def init_connection(self) -> None:
        self.connection = None if self.down else Connection(self)

    def batched_submit_put_task(self, keys: list[Any], blocks: list[Block], on_complete_callback: Any) -> None:
        if self.down:
            self.put_failed_count += 1
        else:
            super().batched_submit_put_task(keys, blocks, on_complete_callback)
        if not self.silent:
            on_complete_callback(keys[0])


LOOP = asyncio.new_event_loop()


@pytest.fixture(scope="module", autouse=True)
def loop() -> Iterator[None]:
    """Manager's."""
    thread = threading.Thread(target=LOOP.run_forever)
    thread.start()
    yield
    LOOP.call_soon_threadsafe(LOOP.stop)
    thread.join()  # the loop stays open: a worker that takes tests over comes back to this module


class Manager:
    """LMCache's StorageManager, as far as it is driven."""

    def __init__(self, config: Any, metadata: Any, events: Any) -> None:
        self.config, self.metadata, self.closed, self.full, self.loop = config, metadata, False, False, LOOP
        self.own, self.remote = Memory({}), Remote({})
        self.own.on = config.local_cpu
        self.storage_backends = {"LocalCPUBackend": self.own, "RemoteBackend": self.remote}
        self.bypassed: dict[str, bool] = {}
        self.removed: list[tuple[Any, list[str]]] = []

    def contains(self, key: Any, search_range: list[str]) -> str | None:
        assert search_range == ["LocalCPUBackend"]
        return search_range[0] if key in self.own.pages else None

    def get(self, key: Any) -> Block | None:
        block = self.own.pages.get(key) or self.remote.pages.get(key)
        if block is not None:
            block.holders += 1
        return block

    def allocate(self, shape: Any, dtype: Any, fmt: Any, eviction: bool, busy_loop: bool) -> Block | None:
        assert not busy_loop, "it would wait for room for ever"
        return None if self.full else Block(int(np.prod(shape)))

    def remove(self, key: Any, locations: list[str]) -> None:
        self.removed.append((key, locations))
        self.own.pages.pop(key, None)

    def set_backend_bypass(self, name: str, bypassed: bool) -> None:
        self.bypassed[name] = bypassed

    def clear(self, locations: list[str]) -> None:
        assert locations == ["LocalCPUBackend"]

    def close(self) -> None:
        self.closed = True


class StandIn:
    """In the place of Library."""

    settings: dict[str, Any] = {}

    def __init__(self) -> None:
        self.config = SimpleNamespace(load_engine_config_with_overrides=self._config)
        self.keys = SimpleNamespace(CacheEngineKey=lambda *parts: parts)
        self.memory = SimpleNamespace(MemoryFormat=SimpleNamespace(KV_2LTD="a form"))
        self.metadata = SimpleNamespace(LMCacheMetadata=SimpleNamespace)
        self.events = SimpleNamespace(EventManager=object)
        self.storage = SimpleNamespace(StorageManager=Manager)

    def _config(self, overrides: dict[str, Any]) -> Any:
        known = {name: value for name, value in overrides.items() if name in DEFAULTS}
        return SimpleNamespace(_user_set_keys=set(self.settings), **{**DEFAULTS, **self.settings, **known})


@pytest.fixture(autouse=True)
def library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lmcache_store, "LMCacheLibrary", StandIn)


def store(key: bytes = b"", **asked: Any) -> LMCacheStore:
    return LMCacheStore(asked, WORDS, key)


def test_a_page_comes_back_as_it_was_put() -> None:
    kept = store()
    assert not kept.has(b"1") and kept.put(b"1", ROW) and kept.has(b"1")
    assert np.array_equal(kept.get(b"1"), ROW)
    assert all(block.holders == 0 for block in kept._manager.remote.pages.values()), "LMCache could not let go of it"
    with pytest.raises(ValueError, match="does not have a page any more"):
        kept.get(b"2")
    assert kept._manager.removed == [(kept._named(b"1"), ["LocalCPUBackend"])], "its memory, which is off, fills up"
    kept.close()
    assert kept._manager.closed


def test_names_are_the_same_in_every_engine_and_short_enough_for_lmcache() -> None:
    first, second = store()._named(b"k" * 48), store()._named(b"k" * 48)
    assert first == second and first[:3] == ("quintet", 1, 0) and first[3] < 2**128
    assert first != store()._named(b"l" * 48)


@pytest.mark.parametrize("at", [0, 16, HEADER.size - 1, HEADER.size, HEADER.size + 4 * WORDS - 1])
def test_a_damaged_page_does_not_come_and_is_written_anew(at: int) -> None:
    kept = store()
    kept.put(b"1", ROW)
    (block,) = kept._manager.remote.pages.values()
    block.byte_array[at] ^= 1
    with pytest.raises(ValueError, match="damaged"):
        kept.get(b"1")
    assert not kept.has(b"1")
    assert kept._manager.removed[-1] == (kept._named(b"1"), ["LocalCPUBackend", "LocalDiskBackend"])
    kept.put(b"1", ROW)
    assert kept.has(b"1") and np.array_equal(kept.get(b"1"), ROW)


def test_what_else_lies_there_is_no_page() -> None:
    kept = store()
    kept.put(b"1", ROW)
    pages = kept._manager.remote.pages
    pages[kept._named(b"2")] = pages[kept._named(b"1")]
    pages[kept._named(b"3")] = Block(5)
    for other in (b"2", b"3"):
        with pytest.raises(ValueError, match="damaged"):
            kept.get(other)


def test_what_cannot_be_read_is_not_there_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(key: Any) -> Block:
        raise FileNotFoundError("another engine has removed it")

    kept = store()
    kept.put(b"1", ROW)
    monkeypatch.setattr(kept._manager, "get", gone)
    with pytest.raises(ValueError, match="cannot be read .*another engine has removed it"):
        kept.get(b"1")
    assert not kept.has(b"1")


def test_who_has_no_key_cannot_make_up_pages() -> None:
    ours, theirs = store(b"a key of sixteen b."), store()
    theirs.put(b"1", ROW)
    ours._manager.remote.pages.update(theirs._manager.remote.pages)
    with pytest.raises(ValueError, match="engine with this one's key"):
        ours.get(b"1")


def test_lmcaches_memory_may_be_full() -> None:
    kept = store()
    kept._manager.full = True
    assert not kept.put(b"1", ROW)


def test_a_put_ends_when_every_tier_has_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = store()
    kept._manager.own.busy = 5
    assert kept.put(b"1", ROW) and kept._manager.own.busy < 0
    monkeypatch.setattr(lmcache_store, "TIMEOUT", 0.01)
    kept._manager.own.busy = 10**9
    kept._manager.remote.silent = True
    assert not kept.put(b"2", ROW)


@pytest.mark.parametrize("what", ["a look-up", "a put", "the start"])
def test_a_remote_that_fails_is_left_alone_and_connected_again(
    what: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if what == "the start":
        monkeypatch.setattr(Remote, "__init__", _unconnected)
    kept = store()
    manager = kept._manager
    manager.remote.down = True
    if what == "a look-up":
        assert not kept.has(b"1")
    elif what == "a put":
        assert not kept.put(b"1", ROW)
    assert manager.bypassed == {"RemoteBackend": True}
    manager.remote.down = False
    assert not kept.put(b"1", ROW) and not kept.has(b"1"), "it was not left alone"
    manager.remote.down = True
    monkeypatch.setattr(lmcache_store, "RETRY_SECONDS", -1.0)
    assert not kept.has(b"1") and manager.bypassed == {"RemoteBackend": True}, "it is not there yet"
    manager.remote.down = False
    kept.has(b"1")
    assert manager.bypassed == {"RemoteBackend": False}
    assert kept.put(b"1", ROW) and kept.has(b"1")
    said = [each.getMessage() for each in caplog.records]
    assert sum("fails" in each for each in said) == 1 == sum("answers again" in each for each in said), said


def _unconnected(self: Remote, pages: dict[Any, Block]) -> None:
    Memory.__init__(self, pages)
    self.put_failed_count, self.down, self.hangs, self.silent, self.connection = 0, True, False, False, None


def test_a_remote_that_hangs_costs_its_patience_once(caplog: pytest.LogCaptureFixture) -> None:
    kept = store(lookup_timeout_ms=20)
    kept._manager.remote.hangs = True
    assert not kept.has(b"1")
    assert "RemoteBackend fails: it does not answer within 0.02 s; until it answers" in caplog.text
    kept._manager.remote.hangs = False
    assert not kept.has(b"1") and kept._manager.bypassed == {"RemoteBackend": True}


def test_a_block_is_one_page_whatever_the_file_says() -> None:
    config = store(chunk_size=256, extra_config={"save_chunk_meta": True, "fs_base_path": "x"})._manager.config
    assert config.chunk_size == 1
    assert config.extra_config == {"save_chunk_meta": False, "fs_base_path": "x"}


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"enable_p2p": True}, "enable_p2p cannot be used here: LMCache would listen for others"),
    ({"remote_config_url": "http://x"}, "would send all variables of this environment there; leave it out"),
    ({"storage_plugins": ["x"]}, "names code that LMCache would load"),
    ({"gds_path": "/x"}, "gds_path cannot be used here: it is not driven"),
    ({"remote_serde": "cachegen"}, "remote_serde='cachegen' cannot be used here: pages would come back changed"),
    ({"remote_url": "external://h:0/a.b/?c=d"}, "names code that LMCache would load; give another"),
    ({"extra_config": {"remote_storage_plugin.x.module_path": "y"}}, "module_path cannot be used here: it names code"),
    ({"extra_config": {"enable_nixl_storage": True}}, "enable_nixl_storage cannot be used here: it is not driven"),
    ({"max_local_cpu_size": 1e-9}, "must have room for 4 pages"),
    ({"max_local_cpu_size": 1e9}, "GiB of host memory are free"),
    ({"remote_storage_plugins": ["fs.a"]}, "cannot begin its RemoteBackend-fs.a"),
]


@pytest.mark.parametrize(("settings", "says"), REFUSED, ids=lambda value: str(value)[:40])
@pytest.mark.parametrize("by_file", [False, True])
def test_settings_that_cannot_be_say_why(
    settings: dict[str, Any], says: str, by_file: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if by_file:
        monkeypatch.setattr(StandIn, "settings", settings)
    with pytest.raises(ValueError, match=says):
        store(**({} if by_file else settings))


def test_a_setting_that_lmcache_does_not_have_is_refused() -> None:
    with pytest.raises(ValueError, match="LMCache has no setting chunk_sise"):
        store(chunk_sise=2)


def test_what_is_off_is_not_refused() -> None:
    config = StandIn()._config({})
    config._user_set_keys = {"enable_p2p", "use_layerwise", "chunk_size"}
    check_lmcache_config(config, ())


def test_without_the_library_one_line_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setitem(sys.modules, "lmcache", None)
    with pytest.raises(ValueError, match=r"needs LMCache \(.*\); pip install '.*\[lmcache\]', or use 'native'"):
        store()
