"""Process that decodes one audio file under limits of processor time, memory and file size. Run by decode.py.

Containers are known by their first bytes, and opened as that one alone: FFmpeg would open playlists too, which name
other files and addresses.
"""

import contextlib
import os
from collections.abc import Iterator
from io import FileIO
from typing import Any, BinaryIO

import msgspec

from quintet.common.processes import follow_parent, read_orders
from quintet.media.audio import SAMPLE_RATE
from quintet.media.audio.resample import BLOCK, MAX_RATE, MIN_RATE, Resampler, Samples
from quintet.media.children import ChildLimits, set_limits, shown_error
from quintet.media.lazy_numpy import np

MEMORY = 2**30  # bytes of address space beyond what the libraries take when they are loaded
CPU_SECONDS, CPU_SHARE = 20, 0.02  # of processor time: for any file, and for each second that a file may last
MAX_CHANNELS = 64
NICE = 5  # a third of the share of what is generated, where processors are busy: the caller waits for both
_SLACK = 2**16  # bytes that may be written beyond the longest audio

CONTAINERS = {  # what a file begins with: offset, bytes -> FFmpeg's name of the container
    (0, b"fLaC"): "flac", (0, b"OggS"): "ogg", (0, b"ID3"): "mp3", (4, b"ftyp"): "mp4",
    (0, b"\x1aE\xdf\xa3"): "matroska", (8, b"WAVE"): "wav",
}  # fmt: skip
_MPEG = {0xFB: "mp3", 0xFA: "mp3", 0xF3: "mp3", 0xF2: "mp3", 0xE3: "mp3", 0xE2: "mp3", 0xF1: "aac", 0xF9: "aac"}
SOUNDFILE = ("wav", "flac", "mp3", "ogg")  # containers that libsndfile reads; FFmpeg reads all
NO_CONTAINER = "it is no WAV, FLAC, MP3, Ogg, M4A, MP4, AAC or WebM file; convert it, such as by ffmpeg -i FILE a.wav"


class Orders(msgspec.Struct, array_like=True):
    """File descriptors: the audio, empty files for samples and for the report; and the longest audio in seconds."""

    source: int
    samples: int
    report: int
    max_seconds: float


class Decoded(msgspec.Struct):
    """Report of a decoded file, or the reason why nothing was decoded."""

    count: int = 0  # samples at 16 kHz
    rate: int = 0  # samples a second in the file
    channels: int = 0
    error: str = ""
    lacking: bool = False  # the error is about a package that is not installed


class Refused(Exception):
    """A file that is not decoded. Its text goes to the caller."""


def main() -> None:
    """Writes samples, then the report as JSON. Writes no report if a limit ends the process."""
    orders = read_orders(Orders)
    follow_parent()
    os.nice(NICE)
    libraries = load_libraries()  # imported outside the limits
    most = int(orders.max_seconds * SAMPLE_RATE)
    cpu_seconds = int(CPU_SECONDS + CPU_SHARE * orders.max_seconds)
    set_limits(ChildLimits(MEMORY, most * 4 + _SLACK, cpu_seconds), final=True)
    with (
        os.fdopen(orders.source, "rb", buffering=0) as source,
        os.fdopen(orders.samples, "wb") as samples,
        os.fdopen(orders.report, "wb") as report,
    ):
        try:
            decoded = decode(source, samples, most, libraries)
        except MemoryError:
            return
        except Refused as error:
            decoded = Decoded(error=str(error))
        except Exception as error:  # the libraries raise errors of any type for damaged files
            decoded = Decoded(error=f"it is damaged ({type(error).__name__}: {shown_error(error)}); write it again")
        with contextlib.suppress(MemoryError):
            report.write(msgspec.json.encode(decoded))


def container_of(head: bytes) -> str | None:
    """Returns FFmpeg's name of the container that begins with these 12 bytes, None if it is none that is read."""
    for (at, magic), name in CONTAINERS.items():
        if head[at : at + len(magic)] == magic and (name != "wav" or head[:4] in (b"RIFF", b"RF64")):
            return name
    return _MPEG.get(head[1]) if head[:1] == b"\xff" and len(head) > 1 else None


def load_libraries() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in ("soundfile", "av"):
        with contextlib.suppress(ImportError, OSError):  # OSError: soundfile without libsndfile
            found[name] = __import__(name)
    return found


def decode(source: FileIO, samples: BinaryIO, most: int, libraries: dict[str, Any]) -> Decoded:
    source.seek(0)
    head = source.read(12)
    if not head:
        raise Refused("it is empty; send a file with sound")
    if (container := container_of(head)) is None:
        raise Refused(NO_CONTAINER)
    source.seek(0)
    if container in SOUNDFILE and "soundfile" in libraries:
        try:
            return _write(_of_soundfile(libraries["soundfile"], source), samples, most)
        except libraries["soundfile"].LibsndfileError:
            if "av" not in libraries or samples.tell():
                raise
            source.seek(0)  # WAV of a codec that libsndfile lacks, say
    if "av" in libraries:
        return _write(_of_ffmpeg(libraries["av"], source, container), samples, most)
    package = "av" if "soundfile" in libraries or container not in SOUNDFILE else "soundfile"
    return Decoded(error=f"{container} files need the package {package}, which is not installed", lacking=True)


Piece = tuple[int, Samples]  # samples a second; [frames, channels]


def _write(pieces: Iterator[Piece], out: BinaryIO, most: int) -> Decoded:
    """Writes the mean of the channels at 16 kHz."""
    decoded, waiting, resampler = Decoded(), [np.zeros(0, np.float32)], None
    for rate, piece in pieces:
        if resampler is None:
            decoded.rate, decoded.channels = rate, piece.shape[1]
            if not MIN_RATE <= rate <= MAX_RATE or decoded.channels > MAX_CHANNELS:
                raise Refused(
                    f"it has {rate} samples a second and {decoded.channels} channels; {MIN_RATE} to {MAX_RATE} and up "
                    f"to {MAX_CHANNELS} are read: convert it, for instance: ffmpeg -i FILE -ar 16000 -ac 1 a.wav"
                )
            resampler = Resampler(rate)
        if rate != decoded.rate:
            raise Refused(f"it changes from {decoded.rate} to {rate} samples a second; convert it to one of them")
        mono = piece.mean(axis=1, dtype=np.float32)
        if not np.isfinite(mono).all():
            raise Refused("it holds samples that are NaN or infinite; write it again with finite ones")
        waiting.append(mono)
        if sum(map(len, waiting)) >= BLOCK:
            _put(resampler.feed(np.concatenate(waiting)), out, decoded, most)
            waiting = []
    if resampler is not None:
        _put(resampler.feed(np.concatenate([*waiting, np.zeros(0, np.float32)])), out, decoded, most)
        _put(resampler.finish(), out, decoded, most)
    if not decoded.count:
        raise Refused("it has no samples; send a file with sound")
    return decoded


def _put(samples: Samples, out: BinaryIO, decoded: Decoded, most: int) -> None:
    decoded.count += len(samples)
    if decoded.count > most:
        raise Refused(f"it lasts longer than {most / SAMPLE_RATE:g} s; cut it into parts")
    out.write(samples.tobytes())


def _of_soundfile(soundfile: Any, source: FileIO) -> Iterator[Piece]:
    with soundfile.SoundFile(source.fileno(), closefd=False) as file:
        if file.channels > MAX_CHANNELS:
            raise Refused(f"it has {file.channels} channels; mix it down to one")
        while len(block := file.read(BLOCK, dtype="float32", always_2d=True)):
            yield file.samplerate, block


def _of_ffmpeg(library: Any, source: FileIO, container: str) -> Iterator[Piece]:
    """Packets that cannot be decoded are left out, as players do. `library`: the module av."""
    with library.open(source, format=container, options={"protocol_whitelist": ""}) as file:
        if not file.streams.audio:
            raise Refused("it has no sound, only pictures or data; send a file with sound")
        stream = file.streams.audio[0]
        stream.codec_context.thread_count = 1
        for packet in file.demux(stream):
            try:
                frames = packet.decode()
            except library.error.InvalidDataError:
                continue
            for frame in frames:
                yield frame.sample_rate, floats(frame)


def floats(frame: Any) -> Samples:
    """Returns the samples of FFmpeg's frame, [frames, channels], from -1 to 1."""
    raw = frame.to_ndarray()
    raw = raw.T if frame.format.is_planar else raw.reshape(-1, len(frame.layout.channels))
    if raw.dtype.kind == "f":
        return np.asarray(raw, np.float32)
    half = 2 ** (8 * raw.dtype.itemsize - 1)
    centred = raw.astype(np.float64) - (half if raw.dtype.kind == "u" else 0)
    return np.asarray(centred / half, np.float32)


if __name__ == "__main__":
    main()
