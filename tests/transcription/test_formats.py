"""Formats of transcripts, compared with openai-whisper's writers where that is installed."""

import importlib.util
import io
from pathlib import Path
from types import ModuleType

import pytest
from openai.types.audio import TranscriptionVerbose

from quintet.transcription.formats import to_srt, to_text, to_verbose_json, to_vtt
from quintet.transcription.segments import Segment

SEGMENTS = [
    Segment(0.0, 2.5, (50364, 1, 50489), " Hello --> you."),
    Segment(62.1234, 3723.9996, (7,), " Grüße,\n twice. ", id=1, seek=6212, temperature=0.2, avg_logprob=-0.3,
            compression_ratio=1.2, no_speech_prob=0.01),
]  # fmt: skip

SRT = """1
00:00:00,000 --> 00:00:02,500
Hello -> you.

2
00:01:02,123 --> 01:02:04,000
Grüße,
 twice.

"""
VTT = """WEBVTT

00:00.000 --> 00:02.500
Hello -> you.

01:02.123 --> 01:02:04.000
Grüße,
 twice.

"""


def test_subtitles() -> None:
    assert to_srt(SEGMENTS) == SRT and to_srt([]) == ""
    assert to_vtt(SEGMENTS) == VTT and to_vtt([]) == "WEBVTT\n\n"
    assert to_text(SEGMENTS) == "Hello --> you. Grüße,\n twice." and to_text([]) == ""


def writers() -> ModuleType:
    """Its utils.py alone: the package imports numba."""
    package = importlib.util.find_spec("whisper")
    if package is None or not package.submodule_search_locations:
        pytest.skip("pip install --no-deps openai-whisper compares with its writers")
    file = Path(package.submodule_search_locations[0]) / "utils.py"
    spec = importlib.util.spec_from_file_location("openai_whisper_utils", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_subtitles_are_those_of_openai_whisper() -> None:
    theirs = writers()
    result = {"segments": [{"start": each.start, "end": each.end, "text": each.text} for each in SEGMENTS]}
    for kind, ours in (("WriteSRT", to_srt), ("WriteVTT", to_vtt)):
        out = io.StringIO()
        getattr(theirs, kind)(".").write_result(result, out)
        assert out.getvalue() == ours(SEGMENTS)


def test_verbose_json_is_what_openais_client_reads() -> None:
    found = to_verbose_json(SEGMENTS, "transcribe", "de", 3724.5)
    read = TranscriptionVerbose.model_validate(found, strict=True)
    assert read.language == "german" and read.duration == 3724.5 and read.segments is not None
    assert found["task"] == "transcribe" and found["text"] == to_text(SEGMENTS)
    assert found["segments"][1] == {
        "id": 1, "seek": 6212, "start": 62.1234, "end": 3723.9996, "text": " Grüße,\n twice. ", "tokens": [7],
        "temperature": 0.2, "avg_logprob": -0.3, "compression_ratio": 1.2, "no_speech_prob": 0.01,
    }  # fmt: skip
