"""What the tests of kernels share: each instruction set that this processor can run, one after the other."""

from collections.abc import Iterator

import pytest

try:
    from quintet import _cpu
except ImportError:
    _cpu = None  # type: ignore[assignment]  # not compiled: the tests that would want it are left out

ORDER = ("baseline", "avx2", "avx2_vnni", "avx512", "avx512_bf16", "amx")


def _can_choose(name: str) -> bool:
    try:
        _cpu.choose_isa(name)
    except ValueError:
        return False
    return True


def _here() -> list[str]:
    """Those that the processor has; architectures that are not x86 have the baseline."""
    if _cpu is None:
        return [ORDER[0]]
    before = _cpu.chosen_isa()
    here = [name for name in ORDER if _can_choose(name)]
    _cpu.choose_isa(before)
    return here


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
