"""The kernels of aarch64: built by a cross compiler, and tried in QEMU."""

import pytest

from scripts.on_aarch64 import qemu


@pytest.mark.sweep  # a minute of the compiler and one of QEMU
@pytest.mark.timeout(1200)
@pytest.mark.skipif(bool(qemu.missing()), reason=f"not installed: {', '.join(qemu.missing())}")
def test_the_cpp_tests_pass_on_aarch64() -> None:
    assert qemu.cpp_tests()
