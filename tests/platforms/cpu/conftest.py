"""What the tests of kernels share: each instruction set that this processor can run, one after the other."""

from collections.abc import Iterator

import pytest

try:
    from quintet import _cpu
except ImportError:
    _cpu = None  # type: ignore[assignment]  # not compiled: the tests that would want it are left out

ORDER = ("baseline", "avx2", "avx512", "avx512_bf16", "amx")


def _here() -> list[str]:
    """Those up to the processor's own; architectures that are not x86 have the baseline."""
    best = _cpu.isa() if _cpu is not None else "baseline"
    return list(ORDER[: ORDER.index(best) + 1] if best in ORDER else ORDER[:1])


@pytest.fixture
def isas() -> Iterator[Iterator[str]]:
    """The same within one test."""
    before = _cpu.chosen_isa()

    def each() -> Iterator[str]:
        for name in _here():
            _cpu.choose_isa(name)
            yield name

    yield each()
    _cpu.choose_isa(before)


@pytest.fixture(params=_here())
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    before = _cpu.chosen_isa()
    _cpu.choose_isa(request.param)
    yield request.param
    _cpu.choose_isa(before)
