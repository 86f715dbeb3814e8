"""Ends a worker of pytest-xdist whose CUDA context is broken: every later test in it would fail for that alone."""

import os
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch

ACCELERATOR_ERROR: type[BaseException] = getattr(torch, "AcceleratorError", ())  # type: ignore[assignment]


def is_broken(error: BaseException) -> bool:
    """Whether an error leaves the context unusable: a misaligned or illegal address, a failed assertion."""
    return isinstance(error, ACCELERATOR_ERROR) or "Triton Error [CUDA]" in str(error)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: Any, call: Any) -> Iterator[Any]:
    report = yield
    if "PYTEST_XDIST_WORKER" in os.environ and call.excinfo is not None and is_broken(call.excinfo.value):
        sys.__stderr__.write(f"\n{item.nodeid} broke the CUDA context: {str(call.excinfo.value).splitlines()[0]}\n")
        sys.__stderr__.flush()
        os._exit(3)  # xdist names the test as the one that crashed it, and starts another worker
    return report
