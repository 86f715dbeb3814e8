"""torch's profiler behind a trace, with whatever devices torch has here."""

import time

import torch

from quintet.config.observability import ProfilerConfig
from quintet.platforms.gpu.profiling import _track, record


def test_what_torch_saw_is_told_at_the_end_on_the_clock_of_the_others() -> None:
    told: list[tuple[str, str, int | str, int, int]] = []
    recording = record(ProfilerConfig(), lambda *event: told.append(event))
    began = time.time_ns()
    torch.ones(64, 64) @ torch.ones(64, 64)
    ended = time.time_ns()
    assert not told
    recording.stop()
    (product,) = [each for each in told if each[0] == "aten::matmul"]
    slack = 10**8  # ns between the two clocks
    assert product[1] == "cpu_op" and began - slack <= product[3] <= product[4] <= ended + slack


def test_a_kernel_lies_on_its_stream() -> None:
    assert _track({"tid": 7, "args": {"device": 1, "stream": 7}}) == "device 1, stream 7"
    assert _track({"tid": 12}) == "torch, thread 12"
