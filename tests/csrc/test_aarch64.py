"""The kernels of aarch64: built by a cross compiler, and tried in QEMU."""

import pytest

from scripts import aarch64


@pytest.mark.sweep  # a minute of the compiler and one of QEMU
@pytest.mark.timeout(1200)
@pytest.mark.skipif(bool(aarch64.missing()), reason=f"not installed: {', '.join(aarch64.missing())}")
def test_the_cpp_tests_pass_on_aarch64() -> None:
    assert aarch64.cpp_tests()
