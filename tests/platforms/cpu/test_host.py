"""Host memory and cores, as containers limit them, and what the platform makes of them."""

from pathlib import Path

import psutil
import pytest
import torch

from quintet.config import EngineConfig
from quintet.interface.types import Layout
from quintet.platforms.cpu import PLATFORM
from quintet.platforms.cpu.configure import granted_threads, load_extension
from quintet.platforms.host import host_memory, physical_cores, threads


def write(folder: Path, **files: str) -> Path:
    for name, text in files.items():
        target = folder / name.replace("__", "/").replace("_DOT_", ".")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)
    return folder


def test_a_containers_limit_counts(tmp_path: Path) -> None:
    stat = "anon 5\ninactive_file 150000\nactive_file 50000\n"  # the kernel takes back what is of files
    group = write(tmp_path, memory_DOT_max="1000000", memory_DOT_current="700000", memory_DOT_stat=stat)
    memory = host_memory(group)
    assert memory.total == 1000000 and memory.free == 500000


def test_a_version_1_container_counts_too(tmp_path: Path) -> None:
    group = write(
        tmp_path,
        memory__memory_DOT_limit_in_bytes="1000000",
        memory__memory_DOT_usage_in_bytes="400000",
        memory__memory_DOT_stat="inactive_file 5\ntotal_inactive_file 60000\ntotal_active_file 40000\n",
    )
    assert host_memory(group).free == 700000


def test_the_tightest_limit_above_the_process_counts(tmp_path: Path) -> None:
    """A service manager's, where nothing is a container."""
    inner, outer = (
        {"a__b__memory_DOT_max": "900000", "a__b__memory_DOT_current": "100000"},
        {"a__memory_DOT_max": "500000"},
    )
    group = write(tmp_path, **inner, **outer, a__memory_DOT_current="200000", own="0::/a/b\n")
    memory = host_memory(group, own=tmp_path / "own")
    assert (memory.total, memory.free) == (500000, 300000)
    assert host_memory(group, own=write(tmp_path, other="0::/c\n") / "other").total == psutil.virtual_memory().total


def test_no_limit_is_the_machines_own(tmp_path: Path) -> None:
    assert host_memory(write(tmp_path, memory_DOT_max="max")).total == host_memory(tmp_path / "none").total > 2**30
    assert 0 < host_memory().free <= host_memory().total


def test_threads_follow_the_quota(tmp_path: Path) -> None:
    free = threads(tmp_path)
    assert threads(write(tmp_path, cpu_DOT_max="max 100000")) == free >= 1
    assert threads(write(tmp_path, cpu_DOT_max="50000 100000")) == 1


def test_a_version_1_quota_counts_too(tmp_path: Path) -> None:
    group = write(tmp_path, cpu__cpu_DOT_cfs_quota_us="50000", cpu__cpu_DOT_cfs_period_us="100000")
    assert threads(group) == 1
    free = threads(tmp_path / "none")
    assert threads(write(tmp_path, cpu__cpu_DOT_cfs_quota_us="-1", cpu__cpu_DOT_cfs_period_us="100000")) == free


def test_the_tightest_quota_above_the_process_counts(tmp_path: Path) -> None:
    group = write(tmp_path, a__b__cpu_DOT_max="max 100000", a__cpu_DOT_max="50000 100000", own="0::/a/b\n")
    assert threads(group, own=tmp_path / "own") == 1
    assert threads(group, own=write(tmp_path, other="0::/c\n") / "other") == threads(tmp_path / "none")


def test_a_cores_threads_count_once(tmp_path: Path) -> None:
    """Numbered as on servers, 0 and 4 on one core, and as on laptops, 8 and 9 beside each other."""
    for cpu, siblings in {0: "0,4", 1: "1,5", 4: "0,4", 5: "1,5", 8: "8-9", 9: "8-9", 10: "10"}.items():
        write(tmp_path / f"cpu{cpu}" / "topology", thread_siblings_list=siblings + "\n")
    assert physical_cores({0, 1, 4, 5, 8, 9, 10}, tmp_path) == 4
    assert physical_cores({0, 4}, tmp_path) == 1
    assert physical_cores({0, 5, 9, 10}, tmp_path) == 4  # a cpuset with holes
    assert 1 <= physical_cores({0, 1, 2}, tmp_path / "none") <= 3


def test_a_cache_that_does_not_fit_is_an_error_with_the_numbers() -> None:
    layout = Layout(torch.float32, (16, 2, 8, 128))
    with pytest.raises(MemoryError, match="needs .* GiB, .* GiB of host memory are free; lower kv_cache_memory_bytes"):
        PLATFORM().open(0).allocate([layout] * 100, 10**9)


def test_an_unasked_for_cache_is_modest_and_says_so() -> None:
    config, reasons = PLATFORM().configure(EngineConfig())
    assert 0 < (config.kv_cache_memory_bytes or 0) <= 4 * 2**30
    assert "nothing was asked for" in reasons[0]
    asked = EngineConfig(num_pages=9)
    assert PLATFORM().configure(asked) == (asked, [])


@pytest.mark.parametrize(
    ("settings", "says"), [({"page_size": 24}, "divide 128"), ({"tensor_parallel_size": 17}, "at most 16 ranks")]
)
def test_what_it_cannot_do_is_refused_before_anything_is_loaded(settings: dict[str, int], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        PLATFORM().configure(EngineConfig(**settings))  # type: ignore[arg-type]


def test_ranks_share_the_host_and_say_how() -> None:
    config, (how, cache) = PLATFORM().configure(EngineConfig(tensor_parallel_size=2))
    assert "2 ranks: a process each" in how and "communicator: shared memory" in how and "for all ranks" in cache
    alone, _ = PLATFORM().configure(EngineConfig())
    assert (config.kv_cache_memory_bytes or 0) <= (alone.kv_cache_memory_bytes or 0) * 0.6
    one, two = (PLATFORM(EngineConfig(tensor_parallel_size=size)).open(0).memory().total for size in (1, 2))
    assert two == one // 2
    several = PLATFORM().configure(EngineConfig(tensor_parallel_size=16))[1][0]
    assert threads() >= 16 or "fewer cores" in several


def test_without_the_extension_there_is_one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("platform", "configure"):
        monkeypatch.setattr(f"quintet.platforms.cpu.{module}.load_extension", lambda: None)
    with pytest.raises(ValueError, match="tensor_parallel_size must be 1: .* install a C\\+\\+ compiler"):
        PLATFORM().configure(EngineConfig(tensor_parallel_size=2))


def test_a_cache_takes_memory_when_it_is_used_and_not_before() -> None:
    layout, size = Layout(torch.bfloat16, (16, 2, 8, 128)), 2**29
    device, before = PLATFORM().open(0), psutil.Process().memory_info().rss
    (cache,) = device.allocate([layout], size // layout.nbytes)
    assert cache.shape[1:] == (16, 2, 8, 128) and cache.dtype == torch.bfloat16
    assert psutil.Process().memory_info().rss - before < size // 4
    assert not cache[-1].any()


def test_engines_share_the_host_with_all_their_ranks() -> None:
    config, (engines, ranks, cache) = PLATFORM().configure(EngineConfig(tensor_parallel_size=2, data_parallel_size=3))
    assert engines.startswith("3 engines: a process each, with ") and "2 ranks: a process each" in ranks
    alone, _ = PLATFORM().configure(EngineConfig())
    assert (config.kv_cache_memory_bytes or 0) <= (alone.kv_cache_memory_bytes or 0) * 0.2 and "for all ranks" in cache
    one, six = (
        PLATFORM(EngineConfig(tensor_parallel_size=ranks, data_parallel_size=engines)).open(0).memory().total
        for ranks, engines in ((1, 1), (2, 3))
    )
    assert six == one // 6
    many = PLATFORM().configure(EngineConfig(data_parallel_size=512))[1][0]
    assert f"with 1 of {granted_threads()} threads" in many and "fewer cores" in many


def test_every_rank_of_every_engine_has_a_place_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which cores are whose follows from it."""
    taken: list[tuple[int, int]] = []
    extension = load_extension()
    monkeypatch.setattr(extension, "set_threads", lambda count, bind, place, places: taken.append((place, places)))
    for number in range(3):
        for rank in range(2):
            config = EngineConfig(tensor_parallel_size=2, data_parallel_size=3, data_parallel_rank=number)
            PLATFORM(config).open(rank)
    assert taken == [(place, 6) for place in range(6)]
    taken.clear()
    for number in (2, 3):  # of four, this machine's two
        config = EngineConfig(
            tensor_parallel_size=2, data_parallel_size=4, data_parallel_size_local=2, data_parallel_start_rank=2,
            data_parallel_rank=number,
        )  # fmt: skip
        PLATFORM(config).open(1)
    assert taken == [(1, 4), (3, 4)]
