"""A trace as a file that Perfetto and chrome://tracing open.

Source: "Trace Event Format", the JSON object form with complete ("X") and metadata ("M") events; times in microseconds.
"""

import gzip
import json
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from quintet.engine.observability.spans import TraceEvent

EVENT_BYTES = 160  # of an event in the file, about


def write_trace(path: Path, events: Sequence[TraceEvent], facts: Mapping[str, Any], base: int, most: int) -> None:
    """The events, until they take `most` bytes; `base` is the time 0, ns of the Unix clock.

    The file has its name once it is whole. OSError as the system says.
    """
    part, pid = path.with_name(path.name + ".part"), os.getpid()
    tracks: dict[int | str, int] = {}
    written = size = 0
    try:
        with part.open("xb") as raw, gzip.open(raw, "wb") if path.suffix == ".gz" else raw as file:
            size += file.write(b'{"displayTimeUnit": "ms", "traceEvents": [\n')
            for event in sorted(events, key=lambda each: (each.started, -each.ended)):
                if size >= most:
                    break
                track = tracks.setdefault(event.track, len(tracks) + 1)
                size += file.write(_line(_complete_event(event, pid, track, base)))
                written += 1
            lines = [_line(each)[:-2] for each in _name_events(tracks, pid)]
            metadata = {**facts, "baseTimeNanoseconds": base, "events left out": len(events) - written}
            file.write(b",\n".join(lines) + b'\n], "otherData": ' + json.dumps(metadata).encode() + b"}\n")
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def _line(event: Mapping[str, Any]) -> bytes:
    return json.dumps(event).encode() + b",\n"


def _complete_event(event: TraceEvent, pid: int, track: int, base: int) -> dict[str, Any]:
    began, lasted = (event.started - base) / 1000, (event.ended - event.started) / 1000
    made = {"name": event.name, "cat": event.kind, "ph": "X", "pid": pid, "tid": track, "ts": began, "dur": lasted}
    return made if event.arguments is None else {**made, "args": event.arguments}


def _name_events(tracks: Mapping[int | str, int], pid: int) -> Iterator[dict[str, Any]]:
    """The process has one, and every track: so that there is always a last event."""
    yield {"name": "process_name", "ph": "M", "pid": pid, "args": {"name": "quintet"}}
    threads = {each.ident: each.name for each in threading.enumerate()}
    for track, number in tracks.items():
        name = track if isinstance(track, str) else threads.get(track, f"thread {track}")
        yield {"name": "thread_name", "ph": "M", "pid": pid, "tid": number, "args": {"name": name}}
