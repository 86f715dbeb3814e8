"""torch's profiler behind a trace: what the host calls, and the kernels of captured steps, too, on their streams."""

import json
import tempfile
from pathlib import Path
from typing import Any

from torch.profiler import profile, supported_activities

from quintet.config.observability import ProfilerConfig
from quintet.interface.platform import RecordEvent, Recording

DESCRIPTION = "as without a trace, captured steps included, under torch's profiler"


def record(config: ProfilerConfig, record_event: RecordEvent) -> Recording:
    """Begins to record; torch's RuntimeError if its profiler runs already."""
    profiler = profile(
        activities=supported_activities(),
        record_shapes=config.torch_profiler_record_shapes,
        with_stack=config.torch_profiler_with_stack,
        with_flops=config.torch_profiler_with_flops,
        profile_memory=config.torch_profiler_with_memory,
    )
    profiler.start()

    def stop() -> None:
        profiler.stop()
        with tempfile.TemporaryDirectory(prefix="quintet-trace-") as folder:
            path = Path(folder) / "trace.json"
            profiler.export_chrome_trace(str(path))
            _report_all(json.loads(path.read_bytes()), record_event)

    return Recording(DESCRIPTION, stop)


def _report_all(trace: dict[str, Any], tell: RecordEvent) -> None:
    """The stretches of a trace in Chrome's form; its times are us after a base in ns."""
    base = int(trace.get("baseTimeNanoseconds", 0))
    for each in trace["traceEvents"]:
        if each.get("ph") == "X" and each.get("cat") != "Trace":
            began = base + round(each["ts"] * 1000)
            tell(each["name"], each.get("cat", "torch"), _track(each), began, began + round(each.get("dur", 0) * 1000))


def _track(event: dict[str, Any]) -> str:
    arguments = event.get("args", {})
    if "stream" in arguments:
        return f"device {arguments.get('device', 0)}, stream {arguments['stream']}"
    return f"torch, thread {event['tid']}"
