"""Settings of every test."""

import gc
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.helpers import selection
from tests.helpers.cpu_times import CpuTimes
from tests.helpers.logs import as_before

torch.set_num_threads(1)  # tiny products gain nothing from threads that wait for each other on busy cores

# JAX reads it when it opens its devices: the tests of the TPU platform want eight
# (what is compiled runs once or twice: optimising it costs more than it saves)
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

# Triton reads it when a kernel is declared: without a GPU kernels run in its interpreter
os.environ.setdefault("TRITON_INTERPRET", "1")

# A shell starts what runs in the background with Ctrl-C ignored, and so would be what the tests start
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(optionalhook=True)  # also without xdist
def pytest_xdist_auto_num_workers() -> int:
    """Returns one more than there are processors: a third of the time a test waits for a process."""
    return (os.process_cpu_count() if hasattr(os, "process_cpu_count") else len(os.sched_getaffinity(0))) + 1


def pytest_addoption(parser: pytest.Parser) -> None:
    selection.add_options(parser)
    parser.addoption("--cpu-times", metavar="FOLDER", help="write the processor time of each test into files there")


def pytest_configure(config: pytest.Config) -> None:
    if folder := config.getoption("--cpu-times"):
        config.pluginmanager.register(CpuTimes(Path(folder)))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Takes modules and tests, which stay to the end, out of garbage collection: to look at all takes a second."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(tryfirst=True)  # -m counts the marks that are given here
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    selection.choose(config, items)


@pytest.fixture(autouse=True)
def _the_same_numbers() -> None:
    """torch.randn() gives each test what it gave it the last time, whatever this worker ran before."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _the_same_log() -> Iterator[None]:
    """A command sets the log up for the whole process."""
    with as_before():
        yield


@pytest.fixture(autouse=True)
def _the_same_ctrl_c() -> Iterator[None]:
    """A test that leaves SIGINT blocked, or with another handler, fails; the next one has what it would have alone."""
    before = signal.getsignal(signal.SIGINT), signal.pthread_sigmask(signal.SIG_BLOCK, ())
    yield
    after = signal.getsignal(signal.SIGINT), signal.pthread_sigmask(signal.SIG_SETMASK, before[1])
    if after[0] is not before[0]:
        signal.signal(signal.SIGINT, before[0])
    assert after == before
