"""Files of strangers in child processes: what a file costs, and that none harms the next."""

import os
import signal
import threading
import zlib
from typing import Any

import msgspec
import numpy as np
import psutil
import pytest

from quintet.common.distribution import install_hint
from quintet.media.decoding.decoder import PROCESSES, MediaDecoder, _is_timed
from quintet.media.decoding.jobs import DecodeJob, DecodeReport
from quintet.media.errors import MediaError, MediaPackageMissing
from quintet.media.items import IMAGE, VIDEO, VideoTimes
from tests.helpers.media_files import picture_file, png_bomb
from tests.media.decoding.files import video_file


@pytest.fixture(scope="module")
def decoder() -> Any:
    made = MediaDecoder()
    yield made
    made.close()


def refused(decoder: MediaDecoder, content: bytes, **job: Any) -> str:
    with pytest.raises(MediaError) as error:
        decoder.decode(content, DecodeJob(**job))
    return str(error.value)


def test_one_process_decodes_many_files_and_damaged_ones_between(decoder: MediaDecoder) -> None:
    whole = picture_file("PNG", (9, 5))
    first, _ = decoder.decode(whole, DecodeJob())
    [child] = decoder._idle
    for content in (b"", b"nonsense", whole[:-30], whole[:40], b"\x89PNG\r\n\x1a\n" + os.urandom(100)):
        assert "\n" not in refused(decoder, content)
        again, times = decoder.decode(whole, DecodeJob())
        assert np.array_equal(first, again) and times is None
    assert decoder._idle == [child]
    small, _ = decoder.decode(picture_file("PNG", (2, 1)), DecodeJob())  # nothing is left of a larger one
    assert small.shape == (1, 2, 3)
    frames, times = decoder.decode(video_file(20), DecodeJob(VIDEO, num_frames=4))
    assert frames.shape == (4, 48, 64, 3) and times == VideoTimes((0, 6, 12, 19), 20, 10.0)
    assert decoder._idle == [child]


def test_a_bomb_is_refused_whatever_it_claims(decoder: MediaDecoder) -> None:
    assert "pixels" in refused(decoder, png_bomb(60_000, 60_000))
    assert "are left" in refused(decoder, picture_file("PNG", (100, 100)), max_bytes=29_999)
    text = picture_file("PNG")  # a chunk of text that grows to 200 MB
    chunk = b"zTXta\0\0" + zlib.compress(b"\0" * 200_000_000, 9)
    bomb = text[:33] + (len(chunk) - 4).to_bytes(4, "big") + chunk + zlib.crc32(chunk).to_bytes(4, "big") + text[33:]
    assert "damaged" in refused(decoder, bomb)
    assert decoder.decode(picture_file(), DecodeJob())[0].shape == (4, 6, 3)


@pytest.mark.parametrize("by", [signal.SIGSEGV, signal.SIGXCPU, signal.SIGKILL, signal.SIGABRT])
def test_a_file_that_ends_its_process_is_an_error_of_that_file_alone(
    decoder: MediaDecoder, by: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder.decode(picture_file(), DecodeJob())
    child = decoder._idle[-1]
    process = psutil.Process(child.child.pid)
    process.suspend()  # so that it cannot answer before it is ended
    send = child.child.tell

    def tell(data: bytes) -> bool:
        process.send_signal(by)
        process.resume()
        return send(data)

    monkeypatch.setattr(child.child, "tell", tell)
    message = refused(decoder, picture_file())
    assert ("crashed" in message) == (by in (signal.SIGSEGV, signal.SIGABRT))
    assert child not in decoder._idle and not psutil.pid_exists(process.pid)
    assert decoder.decode(picture_file(), DecodeJob())[0].shape == (4, 6, 3)


def test_a_file_that_takes_too_long_is_given_up() -> None:
    made = MediaDecoder(timeout=-60.0)  # what is left of the seconds in which a process starts
    assert "too much time" in refused(made, picture_file())
    assert made._idle == []


def test_a_report_that_is_not_true_is_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that a file has taken over may say anything."""
    made = MediaDecoder()
    made.decode(picture_file(), DecodeJob())
    [child] = made._idle
    for shape in ([10**9, 10**9], [4, 6, 4], [0], [-1, -72], []):
        reports = [msgspec.json.encode(DecodeReport(shape)), msgspec.json.encode(DecodeReport([4, 6, 4])), b"x\n"]
        for line in reports:
            monkeypatch.setattr(child, "ask", lambda *args, line=line: line)
            with pytest.raises(MediaError):
                child.run(picture_file(), DecodeJob(), 1.0)
    made.close()


def test_files_of_many_threads_are_decoded_in_turn(decoder: MediaDecoder) -> None:
    files = {size: picture_file("PNG", (size, 3)) for size in range(1, 25)}
    found: dict[int, Any] = {}

    def work(size: int) -> None:
        found[size] = decoder.decode(files[size], DecodeJob())[0].shape

    threads = [threading.Thread(target=work, args=(size,)) for size in files]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found == {size: (3, size, 3) for size in files}
    assert len(decoder._idle) <= PROCESSES


@pytest.mark.parametrize(("kind", "extra"), [(IMAGE, "image"), (VIDEO, "video")])
def test_a_missing_package_is_one_line_with_the_remedy(
    kind: str, extra: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    """The process finds a package that cannot be imported before the true one."""
    for name in ("PIL", "av"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise ImportError('not there')")
    monkeypatch.syspath_prepend(str(tmp_path))
    made = MediaDecoder()
    with pytest.raises(MediaPackageMissing) as error:
        made.decode(picture_file(), DecodeJob(kind))
    assert str(error.value).endswith(install_hint(extra)) and "\n" not in str(error.value)
    made.close()


def test_the_process_has_limits(decoder: MediaDecoder) -> None:
    decoder.decode(picture_file(), DecodeJob())
    process = psutil.Process(decoder._idle[-1].child.pid)
    assert process.rlimit(psutil.RLIMIT_CPU)[0] < 60
    assert process.rlimit(psutil.RLIMIT_AS)[0] < 2**33
    assert process.rlimit(psutil.RLIMIT_CORE)[0] == 0
    assert process.rlimit(psutil.RLIMIT_FSIZE)[0] < 2**30


@pytest.mark.parametrize("times", [
    None, VideoTimes((0,), 20, 10.0), VideoTimes((0, 20), 20, 10.0), VideoTimes((3, 2), 20, 10.0),
    VideoTimes((-1, 2), 20, 10.0), VideoTimes((0, 1), 20, -1.0),
])  # fmt: skip
def test_times_that_a_file_may_have_made_up_are_not_believed(times: VideoTimes | None) -> None:
    assert not _is_timed(times, [2, 4, 4, 3])
    assert _is_timed(VideoTimes((0, 19), 20, 0.0), [2, 4, 4, 3])
