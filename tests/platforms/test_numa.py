"""Memory nodes: read from a tree laid out as Linux lays it, and who sits where."""

import os
import sys
from pathlib import Path

import pytest

from quintet import EngineConfig
from quintet.api.explain import explain
from quintet.config import AUTO
from quintet.platforms import choose, numa
from quintet.platforms.cpu import numa_binding as seats
from quintet.platforms.numa import NumaNode, nodes, numa_share

EVERY = range(16)


def laid_out(root: Path, cpus: dict[int, str], memory: str = "", distances: dict[int, str] | None = None) -> Path:
    """/sys/devices/system/node of a machine with these nodes."""
    root.mkdir(exist_ok=True)
    (root / "online").write_text(",".join(map(str, cpus)) + "\n")
    (root / "has_memory").write_text((memory or ",".join(map(str, cpus))) + "\n")
    for number, listed in cpus.items():
        (root / f"node{number}").mkdir()
        (root / f"node{number}" / "cpulist").write_text(listed + "\n")
        (root / f"node{number}" / "distance").write_text((distances or {}).get(number, "") + "\n")
    return root


def found(root: Path, usable: object = EVERY, mems: str | None = None) -> dict[int, list[int]]:
    status = root / "status"
    status.write_text("" if mems is None else f"Name:\tpython\nMems_allowed_list:\t{mems}\n")
    return {each.number: sorted(each.cpus) for each in nodes(usable, root, status)}  # type: ignore[arg-type]


def test_two_nodes_have_the_processors_that_are_online(tmp_path: Path) -> None:
    root = laid_out(tmp_path / "node", {0: "0-2,8", 1: "4-7"})  # 3 is offline, so in no list
    assert found(root) == {0: [0, 1, 2, 8], 1: [4, 5, 6, 7]}


def test_a_node_counts_as_far_as_the_process_may_use_it(tmp_path: Path) -> None:
    root = laid_out(tmp_path / "node", {0: "0-3", 1: "4-7"})
    assert found(root, {2, 3, 4}) == {0: [2, 3], 1: [4]}
    assert found(root, {2, 3}) == {0: [2, 3]}


def test_processors_without_memory_count_to_the_nearest_node_that_has_some(tmp_path: Path) -> None:
    root = laid_out(
        tmp_path / "node", {0: "0-3", 1: "4-7", 2: "8-9"}, "0-1", {2: "30 20 10", 0: "10 20 30", 1: "20 10 20"}
    )
    assert found(root) == {0: [0, 1, 2, 3], 1: [4, 5, 6, 7, 8, 9]}


def test_memory_alone_is_no_place_to_compute(tmp_path: Path) -> None:
    assert found(laid_out(tmp_path / "node", {0: "0-3", 1: ""})) == {0: [0, 1, 2, 3]}


def test_a_cpuset_may_grant_the_memory_of_one_node_alone(tmp_path: Path) -> None:
    root = laid_out(tmp_path / "node", {0: "0-3", 1: "4-7"}, distances={1: "20 10"})
    assert found(root, mems="0-1") == {0: [0, 1, 2, 3], 1: [4, 5, 6, 7]}
    assert found(root, mems="0") == {0: list(range(8))}


def test_no_tree_is_no_node(tmp_path: Path) -> None:
    assert found(tmp_path) == {}


def test_ranks_sit_node_after_node() -> None:
    there = [NumaNode(0, frozenset({0, 1})), NumaNode(3, frozenset({2, 3}))]
    places = [numa_share(place, 4, there) for place in range(4)]
    assert [(each.node.number, each.place, each.ranks) for each in places if each] == [
        (0, 0, 2), (0, 1, 2), (3, 0, 2), (3, 1, 2),
    ]  # fmt: skip
    assert numa_share(0, 3, there) is None and numa_share(0, 2, there[:1]) is None and numa_share(0, 2, []) is None


@pytest.fixture
def two_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two processors each, as the platform sees the machine."""
    there = (NumaNode(0, frozenset({0, 1})), NumaNode(1, frozenset({2, 3})))
    monkeypatch.setattr(seats, "nodes", lambda: there)


def settled(**settings: object) -> tuple[int, str]:
    config = EngineConfig.from_kwargs(model="bundled", device="cpu", **settings)
    config, reasons = choose("cpu").configure(config)
    return config.tensor_parallel_size, " ".join(reasons)


@pytest.mark.usefixtures("two_nodes")
def test_auto_is_a_rank_for_each_node_and_engines_share_the_nodes() -> None:
    pytest.importorskip("quintet._cpu", reason="ranks on the CPU meet by the compiled extension")
    ranks, why = settled(tensor_parallel_size="auto")
    assert ranks == 2
    assert "auto, a rank for each NUMA node, of which this process may use node 0 (2 processors), node 1" in why
    assert "each stays at one of the NUMA nodes" in why
    ranks, why = settled(tensor_parallel_size="auto", data_parallel_size=2)
    assert ranks == 1 and "for 2 engines" in why and "each stays at one of the NUMA nodes" in why
    assert settled(tensor_parallel_size="auto", data_parallel_size=4)[0] == 1
    _, why = settled(tensor_parallel_size=3)
    assert "stays at" not in why


def test_auto_is_told_by_explain_and_starts_nothing() -> None:
    page = str(explain(EngineConfig.from_kwargs(model="bundled", device="cpu", tensor_parallel_size="auto")))
    assert "auto, a rank for each NUMA node" in page


def test_elsewhere_auto_is_all_devices() -> None:
    config, reasons = choose("null").configure(EngineConfig.from_kwargs(device="null", tensor_parallel_size="auto"))
    assert config.tensor_parallel_size == 1 and "so many devices are visible" in reasons[0]


@pytest.mark.parametrize("size", [0, "some", True, 1.5])
def test_other_words_are_refused(size: object) -> None:
    with pytest.raises(ValueError, match="tensor_parallel_size"):
        EngineConfig.from_kwargs(tensor_parallel_size=size)
    assert EngineConfig.from_kwargs(tensor_parallel_size="auto").tensor_parallel_size == AUTO


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="no system call for it")
def test_who_sits_stays_and_what_it_starts_may_stand() -> None:
    before = os.sched_getaffinity(0)
    if len(before) < 2:
        pytest.skip("one processor")
    one = frozenset({min(before)})
    try:
        numa.bind_to_node(numa.NumaShare(NumaNode(0, one), 0, 1))
        assert os.sched_getaffinity(0) == one and numa.allowed() == before
        with numa.unbound():
            assert os.sched_getaffinity(0) == before
        assert os.sched_getaffinity(0) == one
    finally:
        os.sched_setaffinity(0, before)
        if sys.platform == "linux":
            _local_again()
    with numa.unbound():
        assert os.sched_getaffinity(0) == before


def _local_again() -> None:
    """Memory of this thread comes from wherever it runs, as at first."""
    import ctypes

    call = numa._SET_MEMPOLICY.get(os.uname().machine)
    if call is not None:
        ctypes.CDLL(None).syscall(call, 0, None, 0)
