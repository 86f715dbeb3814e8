"""Process that decodes images and videos, one after another, each under limits of time, memory and size. Run by
decoder.py."""

import contextlib
import os
import queue
import sys
from io import FileIO
from typing import Any, BinaryIO

import msgspec
import numpy as np
from numpy.typing import NDArray

from quintet.common.distribution import install_hint
from quintet.common.processes import follow_parent, read_orders
from quintet.media.children import ChildLimits, set_limits, shown_error
from quintet.media.decoding.images import decode_image, load_pillow
from quintet.media.decoding.jobs import MAX_PIXELS, DecodeJob, DecodeReport, Refused
from quintet.media.decoding.videos import decode_video
from quintet.media.items import IMAGE

MEMORY = 2**30 + 12 * MAX_PIXELS  # bytes beyond what the libraries take: several copies of the largest image
CPU_SECONDS = {"image": 20, "video": 60}  # of processor time, for one file
NICE = 5  # a third of the share of what is generated, where processors are busy: the caller waits for both
_SLACK = 2**16  # bytes that may be written beyond the array


class Orders(msgspec.Struct, array_like=True):
    """File descriptors: the file to decode, and the array."""

    source: int
    result: int


def main() -> None:
    """Answers each job, a line of its standard input, with a line of its standard output."""
    orders = read_orders(Orders)
    jobs: queue.SimpleQueue[str] = queue.SimpleQueue()
    follow_parent(jobs.put)
    os.nice(NICE)
    with (
        os.fdopen(orders.source, "rb", buffering=0) as source,
        os.fdopen(orders.result, "wb") as result,
        open(sys.stdout.fileno(), "wb", buffering=0, closefd=False) as answers,
    ):
        while True:
            job = msgspec.json.decode(jobs.get(), type=DecodeJob)
            answers.write(msgspec.json.encode(_run(job, source, result)) + b"\n")


def _run(job: DecodeJob, source: FileIO, result: BinaryIO) -> DecodeReport:
    library = _load(job.kind)
    if library is None:
        package, extra = ("pillow", "image") if job.kind == IMAGE else ("av", "video")
        what = f"{job.kind}s need the package {package}, which is not installed: {install_hint(extra)}"
        return DecodeReport(error=what, lacking=extra)
    set_limits(ChildLimits(MEMORY, job.max_bytes + _SLACK, CPU_SECONDS[job.kind]))
    try:
        picture, rate = _decode(job, source, library)
        if picture.nbytes > job.max_bytes:
            return DecodeReport(error=f"it takes {picture.nbytes} bytes, and {job.max_bytes} are left; send fewer or "
                                "smaller ones")  # fmt: skip
        result.seek(0)
        result.truncate()
        result.write(np.ascontiguousarray(picture).data)
        result.flush()
        return DecodeReport(list(picture.shape), rate)
    except Refused as error:
        return DecodeReport(error=str(error))
    except MemoryError:
        return DecodeReport(error="it takes too much memory to decode; send a smaller one")
    except Exception as error:  # the libraries raise errors of any type for damaged files
        return DecodeReport(error=f"it is damaged ({type(error).__name__}: {shown_error(error)}); write it again")


def _load(kind: str) -> Any:
    """Returns the library that decodes the kind, None if it is not installed. Imported outside the limits."""
    with contextlib.suppress(ImportError):
        if kind == IMAGE:
            load_pillow()
            return True
        return __import__("av")
    return None


def _decode(job: DecodeJob, source: FileIO, library: Any) -> tuple[NDArray[np.uint8], float]:
    if job.kind == IMAGE:
        source.seek(0)
        return decode_image(source, job.background), 0.0
    return decode_video(library, source, job)


if __name__ == "__main__":
    main()
