"""Process that decodes images and videos in turn, each under limits. Run by decoder.py."""

from __future__ import annotations

import contextlib
from io import FileIO
from typing import TYPE_CHECKING, Any, BinaryIO

import msgspec

from quintet.common.distribution import install_hint
from quintet.media.children import ChildLimits, set_limits, shown_error
from quintet.media.decoding.images import decode_image, load_pillow
from quintet.media.decoding.jobs import MAX_PIXELS, DecodeJob, DecodeReport, Refused
from quintet.media.decoding.videos import decode_video
from quintet.media.file_child import serve_orders
from quintet.media.items import IMAGE, VideoTimes
from quintet.media.lazy_numpy import np

if TYPE_CHECKING:
    from numpy.typing import NDArray

MEMORY = 2**30 + 12 * MAX_PIXELS  # bytes beyond what the libraries take: several copies of the largest image
CPU_SECONDS = {"image": 20, "video": 60}  # of processor time, for one file
NICE = 5  # a third of the share of what is generated, where processors are busy: the caller waits for both
_SLACK = 2**16  # bytes that may be written beyond the array


def main() -> None:
    """Answers each DecodeJob with a DecodeReport."""
    serve_orders(lambda line, source, result: _run(msgspec.json.decode(line, type=DecodeJob), source, result), NICE)


def _run(job: DecodeJob, source: FileIO, result: BinaryIO) -> DecodeReport:
    library = _load(job.kind)
    if library is None:
        package, extra = ("pillow", "image") if job.kind == IMAGE else ("av", "video")
        what = f"{job.kind}s need the package {package}, which is not installed: {install_hint(extra)}"
        return DecodeReport(error=what, lacking=extra)
    set_limits(ChildLimits(MEMORY, job.max_bytes + _SLACK, CPU_SECONDS[job.kind]))
    try:
        picture, times = _decode(job, source, library)
        if picture.nbytes > job.max_bytes:
            return DecodeReport(error=f"it takes {picture.nbytes} bytes, and {job.max_bytes} are left; send fewer or "
                                "smaller ones")  # fmt: skip
        result.write(np.ascontiguousarray(picture).data)
        result.flush()  # within the limits
        return DecodeReport(list(picture.shape), times)
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


def _decode(job: DecodeJob, source: FileIO, library: Any) -> tuple[NDArray[np.uint8], VideoTimes | None]:
    if job.kind == IMAGE:
        return decode_image(source, job.background), None
    return decode_video(library, source, job)


if __name__ == "__main__":
    main()
