"""quintet._cpu: what it says of the processor agrees with others, and its ceilings are sane."""

import math
import subprocess
import sys
import threading
import time
from pathlib import Path

import cpuinfo
import pytest

_cpu = pytest.importorskip("quintet._cpu", reason="the compiled module is not built: no C++ compiler at install")

MIB = 1 << 20
ISAS = [
    "baseline",
    "neon",
    "neon_dotprod",
    "neon_i8mm",
    "neon_bf16",
    "avx2",
    "avx2_vnni",
    "avx512",
    "avx512_bf16",
    "amx",
]
NEEDS = {
    "avx2": {"avx2", "fma", "f16c"},
    "avx2_vnni": {"avx_vnni"},
    "avx512": {"avx512f", "avx512bw", "avx512vl", "avx512dq"},
    "avx512_bf16": {"avx512_bf16"},
    "amx": {"amx_tile", "amx_int8", "amx_bf16"},
}


@pytest.fixture(scope="module")
def flags() -> set[str]:
    return set(cpuinfo.get_cpu_info()["flags"])


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="elsewhere py-cpuinfo names the flags otherwise")
def test_features_agree_with_cpuinfo(flags: set[str]) -> None:
    features = _cpu.features()
    if _cpu.arch() == "aarch64":
        features["asimd"] = features.pop("neon")
    assert features
    assert {name for name, value in features.items() if value} == set(features) & flags


def test_isa_is_the_best_that_the_features_allow() -> None:
    features, isa = _cpu.features(), _cpu.isa()
    assert isa in ISAS
    if _cpu.arch() != "x86_64":
        eight = "neon_bf16" if features.get("bf16") else "neon_i8mm"
        dots = eight if features.get("i8mm") else "neon_dotprod"
        neon = dots if features.get("asimddp") else "neon"
        assert isa == (neon if _cpu.arch() == "aarch64" else "baseline")
        return
    best = "baseline"
    for name, needs in NEEDS.items():
        if all(features[need] for need in needs):
            best = name
        elif name != "avx2_vnni":  # which AVX-512 does not build on
            break
    assert isa == best


def test_cores_are_counted_within_the_affinity() -> None:
    assert 1 <= _cpu.physical_cores() <= _cpu.logical_cores()
    code = (
        "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n"
        "from quintet import _cpu; print(_cpu.physical_cores(), _cpu.logical_cores())"
    )
    if sys.platform.startswith("linux"):
        run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert run.stdout.split() == ["1", "1"]


def test_last_level_cache_is_plausible() -> None:
    assert 0 <= _cpu.last_level_cache_bytes() < 1 << 34


def test_ceilings_are_positive_and_bounded() -> None:
    read = _cpu.read_bandwidth(16 * MIB, 1, 0.05)
    assert 0.1 < read < 2000  # GB/s: one core reads neither slower than a disk nor faster than any cache
    fma = _cpu.fma_peak(1, 0.05)
    assert 0.1 < fma < 1000  # GFLOP/s: 2 x 2 units x 16 lanes x 6 GHz is 384
    for numbers, times in (("bfloat16", 32), ("int8", 16)):  # a tile of bfloat16 is 32 multiply-adds of a vector
        assert 0.1 < _cpu.fma_peak(1, 0.05, numbers) < 1000 * times


def test_more_threads_than_cores_are_no_faster_than_the_cores() -> None:
    """The peak of one core is its best round: on a busy machine it takes some to find it."""
    cores, alone = _cpu.logical_cores(), 0.0
    several = _cpu.fma_peak(cores + 2, 0.05)
    for _ in range(100):
        alone = max(alone, _cpu.fma_peak(1, 0.05))
        if several < 2 * cores * alone:
            break
    assert several < 2 * cores * alone


def test_others_run_while_it_measures() -> None:
    """One tick would mean that the lock was held to the end; on a busy machine a few may take longer."""
    ticks = 0
    for seconds in (0.3, 3.0, 30.0):
        ticks, worker = 0, threading.Thread(target=_cpu.fma_peak, args=(1, seconds))
        worker.start()
        while worker.is_alive():
            time.sleep(0.005)
            ticks += 1
        if ticks >= 3:
            break
    assert ticks >= 3


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: _cpu.read_bandwidth(0, 1, 0.1), "bytes must be between 1048576 and 68719476736, got 0"),
        (lambda: _cpu.read_bandwidth(-1, 1, 0.1), "bytes must be"),
        (lambda: _cpu.read_bandwidth(1 << 40, 1, 0.1), "bytes must be"),
        (lambda: _cpu.read_bandwidth(MIB, 0, 0.1), "threads must be between 1 and 1024, got 0"),
        (lambda: _cpu.read_bandwidth(MIB, 1025, 0.1), "threads must be"),
        (lambda: _cpu.read_bandwidth(MIB, 1, 0.0), "seconds must be above 0 and at most 60"),
        (lambda: _cpu.fma_peak(-1, 0.1), "threads must be"),
        (lambda: _cpu.fma_peak(1, math.nan), "seconds must be"),
        (lambda: _cpu.fma_peak(1, math.inf), "seconds must be"),
        (lambda: _cpu.fma_peak(1, -1.0), "seconds must be"),
        (lambda: _cpu.fma_peak(1, 0.1, "int7"), "numbers must be float32, bfloat16 or int8"),
    ],
)
def test_bad_argument_is_refused_with_its_range(call, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        call()


@pytest.mark.parametrize("args", [("1", 0.1), (1.5, 0.1), (1,), (1, 0.1, 2), (1 << 80, 0.1)])
def test_argument_of_another_type_is_refused(args: tuple) -> None:
    with pytest.raises(TypeError):
        _cpu.fma_peak(*args)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="limits the address space, which Linux enforces")
def test_threads_that_cannot_start_are_an_error() -> None:
    code = (
        "import resource; from quintet import _cpu\n"
        "resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))\n"
        "try: _cpu.fma_peak(1024, 0.01)\n"
        "except RuntimeError as error: print(error)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert "of 1024 threads could be started" in run.stdout and "ask for fewer" in run.stdout


@pytest.mark.slow
def test_benchmark_reports_the_ceilings() -> None:
    from benchmarks.ceilings import measure

    ceilings = measure(threads=1, seconds=0.01)
    assert ceilings.source == "extension" and ceilings.isa == _cpu.isa() and ceilings.threads == 1
    assert min(ceilings.read_gbs, ceilings.fma_gflops, ceilings.bfloat16_gflops, ceilings.int8_gops) > 0
    assert ceilings.note == ""


def test_benchmark_does_without_the_module_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    import json

    from benchmarks import ceilings

    monkeypatch.setitem(sys.modules, "quintet._cpu", None)
    monkeypatch.delattr("quintet._cpu", raising=False)
    monkeypatch.setattr(ceilings, "MIN_BUFFER", MIB)
    out = json.loads(ceilings.measure(threads=1, seconds=0.01).to_json())
    assert out["source"] == "torch" and "quintet._cpu is not built" in out["note"]
    assert out["read_gbs"] > 0 and out["fma_gflops"] > 0


def test_module_stands_alone() -> None:
    """It loads without torch, so the facts are there before anything heavy is."""
    code = "import sys; from quintet import _cpu; print('torch' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parent, capture_output=True, text=True)
    assert run.stdout.strip() == "False"


def test_a_lower_instruction_set_can_be_chosen_and_no_higher_one() -> None:
    try:
        _cpu.choose_isa("baseline")
        assert _cpu.chosen_isa() == "baseline" and _cpu.isa() in ISAS
        with pytest.raises(ValueError, match=r"instruction set 'z80' cannot be used here; there are baseline"):
            _cpu.choose_isa("z80")
    finally:
        _cpu.choose_isa(_cpu.isa())
    assert _cpu.chosen_isa() == _cpu.isa()


def test_threads_are_set_and_bounded() -> None:
    before = _cpu.threads()
    try:
        _cpu.set_threads(3)
        assert _cpu.threads() == 3
        for wrong in (0, 257):
            with pytest.raises(ValueError, match=f"threads must be 1 to 256, not {wrong}"):
                _cpu.set_threads(wrong)
    finally:
        _cpu.set_threads(before)


def test_a_forked_child_begins_with_one_thread() -> None:
    """It has none of its parent's threads, and would wait for them forever."""
    code = (
        "import os; from quintet import _cpu; _cpu.set_threads(3)\n"
        "pid = os.fork()\n"
        "if pid == 0: os._exit(_cpu.threads() + 10)\n"
        "print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), _cpu.threads())"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout == "11 3\n"
