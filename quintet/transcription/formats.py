"""Formats of a transcript: text, SubRip (srt), WebVTT (vtt), and OpenAI's json and verbose_json."""

from collections.abc import Iterable, Sequence
from typing import Any

from quintet.media.audio.whisper_vocabulary import NAMES
from quintet.transcription.segments import Segment

FORMATS = ("json", "text", "srt", "verbose_json", "vtt")


def to_text(segments: Sequence[Segment]) -> str:
    """Returns the text of all segments on one line."""
    return "".join(each.text for each in segments).strip()


def to_srt(segments: Iterable[Segment]) -> str:
    """Returns SubRip: numbered blocks, times as 00:00:01,500."""
    return "".join(
        f"{number}\n{_time(each.start, ',', True)} --> {_time(each.end, ',', True)}\n{_line(each)}\n\n"
        for number, each in enumerate(segments, 1)
    )


def to_vtt(segments: Iterable[Segment]) -> str:
    """Returns WebVTT: times as 00:01.500, with hours where there are any."""
    blocks = (f"{_time(each.start, '.')} --> {_time(each.end, '.')}\n{_line(each)}\n\n" for each in segments)
    return "WEBVTT\n\n" + "".join(blocks)


def to_verbose_json(
    segments: Sequence[Segment], task: str, language: str, seconds: float, words: bool = False
) -> dict[str, Any]:
    """Returns OpenAI's verbose_json. `language`: a code, of which the name is given; `seconds`: length of the audio;
    `words`: with the words of all segments."""
    found: dict[str, Any] = {
        "task": task, "language": NAMES.get(language, language), "duration": round(seconds, 6),
        "text": to_text(segments),
        "segments": [
            {
                "id": each.id, "seek": each.seek, "start": each.start, "end": each.end, "text": each.text,
                "tokens": list(each.tokens), "temperature": each.temperature, "avg_logprob": each.avg_logprob,
                "compression_ratio": each.compression_ratio, "no_speech_prob": each.no_speech_prob,
            }
            for each in segments
        ],
    }  # fmt: skip
    if words:
        spoken = [word for each in segments for word in each.words]
        found["words"] = [{"word": each.text.strip(), "start": each.start, "end": each.end} for each in spoken]
    return found


def _line(segment: Segment) -> str:
    """Returns the text without what a reader of subtitles would take for a line of times."""
    return segment.text.strip().replace("-->", "->")


def _time(seconds: float, point: str, hours: bool = False) -> str:
    thousandths = round(seconds * 1000)
    minutes, rest = divmod(thousandths, 60_000)
    hour, minute = divmod(minutes, 60)
    begins = f"{hour:02d}:" if hours or hour else ""
    return f"{begins}{minute:02d}:{rest // 1000:02d}{point}{rest % 1000:03d}"
