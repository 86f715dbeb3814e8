"""Audio files of all kinds as samples, decoded within limits that a hostile file cannot leave."""

import asyncio
import io
import random
import signal
import struct
import tempfile
from typing import Any, BinaryIO

import numpy as np
import psutil
import pytest

from quintet.common.distribution import install_hint
from quintet.media.audio import SAMPLE_RATE, worker
from quintet.media.audio.decode import (
    TOO_MUCH,
    Audio,
    AudioDecoder,
    AudioError,
    AudioPackageMissing,
    result_of,
)
from quintet.media.audio.resample import Samples, resample
from quintet.media.audio.worker import NO_CONTAINER, Decoded

RATE = 22_050
SOUND = (np.sin(np.arange(RATE) ** 1.3 / 300) * np.hanning(RATE) / 2).astype(np.float32)  # a second


def wav(samples: Samples, rate: int = RATE, channels: int = 1) -> bytes:
    """A WAV file of 32-bit floats."""
    data = samples.astype("<f4").tobytes()
    form = struct.pack("<4sIHHIIHH", b"fmt ", 16, 3, channels, rate, rate * channels * 4, channels * 4, 32)
    return struct.pack("<4sI4s", b"RIFF", 4 + len(form) + 8 + len(data), b"WAVE") + form + struct.pack(
        "<4sI", b"data", len(data)
    ) + data  # fmt: skip


def opened(content: bytes) -> BinaryIO:
    file = tempfile.TemporaryFile()
    file.write(content)
    file.flush()
    return file


def decoded(content: bytes, **options: Any) -> Audio:
    with opened(content) as file:
        return AudioDecoder(**options).decode_here(file)


def in_process(content: bytes, max_seconds: float = 60.0, **libraries: Any) -> tuple[Decoded, Samples]:
    """Does what the worker does with a file, without its process."""
    with opened(content) as source, tempfile.TemporaryFile() as out:
        unbuffered = open(source.fileno(), "rb", buffering=0, closefd=False)
        try:
            report = worker.decode(
                unbuffered, out, int(max_seconds * SAMPLE_RATE), libraries or worker.load_libraries()
            )
        except worker.Refused as error:
            report = Decoded(error=str(error))
        out.seek(0)
        return report, np.frombuffer(out.read(), np.float32)


def encoded(kind: str) -> bytes:
    """SOUND in a file of another kind, written by the library that has an encoder for it."""
    if kind in ("flac", "mp3", "ogg"):
        soundfile, out = pytest.importorskip("soundfile", reason="needs the extra audio"), io.BytesIO()
        soundfile.write(out, SOUND, RATE, format=kind)
        return out.getvalue()
    av, out = pytest.importorskip("av", reason="needs the extra audio"), io.BytesIO()
    codec, container = {"m4a": ("aac", "mp4"), "webm": ("libopus", "webm"), "opus": ("libopus", "ogg")}[kind]
    with av.open(out, "w", format=container) as file:
        stream = file.add_stream(codec, rate=48_000)
        stream.layout = "mono"
        fifo = av.AudioFifo()
        resampler = av.AudioResampler(format=stream.codec_context.format or "fltp", layout="mono", rate=48_000)
        frame = av.AudioFrame.from_ndarray((SOUND * 32767).astype(np.int16)[None], format="s16", layout="mono")
        frame.sample_rate = RATE
        for piece in [*resampler.resample(frame), *resampler.resample(None)]:
            fifo.write(piece)
        while (piece := fifo.read(stream.codec_context.frame_size, partial=True)) is not None:
            file.mux(stream.encode(piece))
        file.mux(stream.encode(None))
    return out.getvalue()


@pytest.fixture
def _soundfile() -> None:
    pytest.importorskip("soundfile", reason="needs the extra audio")


needs_soundfile = pytest.mark.usefixtures("_soundfile")


@needs_soundfile
def test_a_process_decodes_a_file_and_is_gone() -> None:
    audio = decoded(wav(np.stack([SOUND, 3 * SOUND], axis=1), channels=2))
    assert (audio.rate, audio.channels, audio.seconds) == (RATE, 2, 1.0)
    np.testing.assert_allclose(audio.samples, resample(2 * SOUND, RATE), atol=1e-6)  # the mean of the channels
    assert children() == []


@pytest.mark.parametrize(("kind", "least"), [("flac", 1.0), ("mp3", 0.999), ("ogg", 0.99), ("m4a", 0.99),
                                             ("webm", 0.99), ("opus", 0.99)])  # fmt: skip
def test_every_kind_of_file_has_the_same_sound_at_the_same_place(kind: str, least: float) -> None:
    report, found = in_process(encoded(kind))
    assert not report.error and abs(len(found) - 16_000) < 700  # AAC is padded to whole frames
    wanted = resample(SOUND, RATE)
    assert np.corrcoef(found[:16_000], wanted)[0, 1] > least - 1e-6


@pytest.mark.parametrize("kind", ["flac", "mp3", "ogg"])
def test_both_libraries_hear_the_same(kind: str) -> None:
    av, content = pytest.importorskip("av", reason="needs the extra audio"), encoded(kind)
    report, found = in_process(content, av=av)
    np.testing.assert_allclose(found[:16_000], in_process(content)[1][:16_000], atol=2e-4)


def test_samples_of_any_type_are_the_same_floats() -> None:
    av = pytest.importorskip("av", reason="needs the extra audio")
    exact = np.array([[-1.0, 0.0, 0.5], [0.25, 0.75, -0.5]])
    for name, scale in {"u8": 128, "s16": 2**15, "s32": 2**31, "flt": 1, "dbl": 1}.items():
        for planar in ("", "p"):
            kind = {"u8": "u1", "s16": "i2", "s32": "i4", "flt": "f4", "dbl": "f8"}[name]
            numbers = np.minimum(exact * scale + (128 if name == "u8" else 0), np.inf).astype(kind)
            raw = numbers if planar else numbers.T.reshape(1, -1)
            frame = av.AudioFrame.from_ndarray(np.ascontiguousarray(raw), format=name + planar, layout="stereo")
            np.testing.assert_allclose(worker.floats(frame), exact.T, atol=1e-6)


@needs_soundfile
@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "it is empty"),
        (b"%PDF-1.7 and more of it", NO_CONTAINER),
        (b"#EXTM3U\n#EXTINF:1\nhttp://127.0.0.1/a.ts\n", NO_CONTAINER),
        (wav(SOUND[:0]), "it has no samples"),
        (wav(np.array([0, np.nan], np.float32)), "NaN or infinite"),
        (wav(np.array([0, -np.inf], np.float32)), "NaN or infinite"),
        (wav(SOUND, rate=500), "it has 500 samples a second and 1 channels"),
        (wav(np.zeros(130, np.float32), channels=65), "65 channels"),
        (wav(np.zeros(61 * 8000, np.float32), rate=8000), "it lasts longer than 60 s; cut it into parts"),
        (b"fLaC" + bytes(200), "it is damaged ("),
    ],
    ids=["empty", "pdf", "playlist", "no-samples", "nan", "infinite", "rate", "channels", "long", "damaged"],
)
def test_a_file_without_sound_that_can_be_read_is_refused_with_the_reason(content: bytes, reason: str) -> None:
    try:
        assert reason in in_process(content)[0].error
    except Exception as error:  # main() makes the same of it
        assert reason.startswith("it is damaged") and type(error).__name__.endswith("Error")


def test_a_video_without_sound_is_refused() -> None:
    av, out = pytest.importorskip("av", reason="needs the extra audio"), io.BytesIO()
    with av.open(out, "w", format="mp4") as file:
        stream = file.add_stream("mpeg4", rate=5)
        stream.width, stream.height, stream.pix_fmt = 16, 16, "yuv420p"
        file.mux(stream.encode(av.VideoFrame.from_ndarray(np.zeros((16, 16, 3), np.uint8), format="rgb24")))
        file.mux(stream.encode(None))
    assert "it has no sound" in in_process(out.getvalue())[0].error


@needs_soundfile
def test_long_silence_in_a_few_kilobytes_ends_at_the_limit() -> None:
    """FLAC has a few KB for minutes of zeros: what is decoded is counted, not what came."""
    soundfile, out = pytest.importorskip("soundfile"), io.BytesIO()
    with soundfile.SoundFile(out, "w", 8000, 1, format="FLAC") as file:
        for _ in range(12):
            file.write(np.zeros(8000 * 60, np.float32))
    assert len(out.getvalue()) < 60_000
    report, samples = in_process(out.getvalue(), max_seconds=60.0)
    assert "it lasts longer than 60 s" in report.error and len(samples) <= 60 * SAMPLE_RATE


@needs_soundfile
def test_a_process_that_does_not_end_in_time_is_killed() -> None:
    with pytest.raises(AudioError, match="takes too much time or memory"):
        decoded(wav(SOUND), timeout=0.0)
    assert children() == []


def test_ends_of_the_process_are_the_errors_of_its_file() -> None:
    from quintet.common.processes import Exit

    empty = io.BytesIO()
    for status in (None, Exit(-9), Exit(-24), Exit(0)):
        with pytest.raises(AudioError, match=TOO_MUCH[:40]):
            result_of(status, empty, empty)
    with pytest.raises(RuntimeError, match="the process that decodes audio failed"):
        result_of(Exit(1), empty, empty)


def test_a_package_that_is_missing_is_named_with_the_command() -> None:
    for content, package in ((wav(SOUND), "soundfile"), (b"\x1aE\xdf\xa3" + bytes(20), "av")):
        report, _ = in_process(content, none=None)
        assert report.lacking and f"the package {package}, which is not installed" in report.error
        with pytest.raises(AudioPackageMissing) as caught:
            result_of_report(report)
        assert str(caught.value).endswith(install_hint("audio"))


def result_of_report(report: Decoded) -> Audio:
    import msgspec

    from quintet.common.processes import Exit

    return result_of(Exit(0), io.BytesIO(msgspec.json.encode(report)), io.BytesIO())


@needs_soundfile
async def test_a_caller_that_leaves_ends_the_process() -> None:
    with opened(wav(SOUND)) as file:
        task = asyncio.create_task(AudioDecoder().decode(file))
        while not children():
            await asyncio.sleep(0.005)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert children() == []


@needs_soundfile
async def test_a_decoder_that_crashes_is_an_error_of_its_file() -> None:
    with opened(wav(SOUND)) as file:
        decoder = AudioDecoder()
        crash = asyncio.create_task(decoder.decode(file))
        while not (there := children()):
            await asyncio.sleep(0.005)
        there[0].send_signal(signal.SIGSEGV)
        with pytest.raises(AudioError, match="its decoder crashed"):
            await crash
        assert (await decoder.decode(file)).seconds == 1.0


@needs_soundfile
async def test_files_are_decoded_from_an_event_loop() -> None:
    with opened(wav(SOUND)) as file, opened(b"RIFF....WAVErubbish") as rubbish:
        decoder = AudioDecoder()
        good, bad = await asyncio.gather(decoder.decode(file), decoder.decode(rubbish), return_exceptions=True)
    assert isinstance(good, Audio) and good.seconds == 1.0
    assert isinstance(bad, AudioError) and "it is damaged" in str(bad)


@needs_soundfile
@pytest.mark.parametrize("kind", ["wav", "flac", "mp3", "ogg", "m4a", "webm"])
def test_changed_bytes_are_an_error_or_other_samples(kind: str) -> None:
    good, draw = wav(SOUND[:3000]) if kind == "wav" else encoded(kind), random.Random(kind)
    for _ in range(25):
        raw = bytearray(good[: draw.randrange(len(good))] if draw.random() < 0.3 else good)
        for _ in range(draw.randint(0, 5) if raw else 0):
            reach = len(raw) if draw.random() < 0.5 else min(len(raw), 200)
            raw[draw.randrange(reach)] ^= 1 << draw.randrange(8)
        try:
            report, samples = in_process(bytes(raw))
        except Exception as error:
            assert type(error).__module__.split(".")[0] in ("soundfile", "av", "builtins"), error
        else:
            assert report.error or np.isfinite(samples).all()


def children() -> list[psutil.Process]:
    return [each for each in psutil.Process().children() if worker.__name__ in each.cmdline()]
