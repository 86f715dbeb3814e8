"""quintet transcribe over a simulated engine: files and folders, formats, errors of one file, the exit code."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import quintet
from quintet.api import speech
from quintet.cli import main as cli
from quintet.cli.commands.transcribe import find_files
from quintet.media.audio.decode import Audio, AudioDecoder
from quintet.transcription.transcriber import Transcriber, TranscriptionOptions
from tests.media.audio.test_decode import wav
from tests.transcription.simulated import TOKENS, SimulatedEngine, at, model, says, silence, voice

SPEECH = wav(voice(1.5), 16_000)
Run = Callable[..., int]


class NoLLM:
    """Stands where the engine would."""

    ends = 0

    def __init__(self, **settings: Any) -> None:
        self.settings = settings

    def shutdown(self) -> None:
        NoLLM.ends += 1


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[TranscriptionOptions]:
    """The options of each run; the engine answers each window with " w1 w2"."""
    found: list[TranscriptionOptions] = []

    def make(llm: Any, options: TranscriptionOptions) -> Transcriber:
        found.append(options)
        return Transcriber(SimulatedEngine(voice(1), says(at(0), 1, 2, at(1.2), TOKENS.eot)), model(), options)

    monkeypatch.setattr(quintet, "AsyncLLM", NoLLM, raising=False)
    monkeypatch.setattr(speech, "make_transcriber", make)
    return found


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files are not decoded: that takes a process each."""

    async def decode(self: AudioDecoder, source: Any) -> Audio:
        return Audio(voice(1.5), 16_000, 1)

    monkeypatch.setattr(AudioDecoder, "decode", decode)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "deeper").mkdir()
    for name in ("b.wav", "a.WAV", "deeper/c.wav"):
        (tmp_path / name).write_bytes(SPEECH)
    (tmp_path / "notes.txt").write_text("no audio", encoding="utf-8")
    return tmp_path


def run(*words: str) -> int:
    return cli.main(["transcribe", *words])


def test_one_file(asked: list[TranscriptionOptions], folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ends = NoLLM.ends
    assert run(str(folder / "b.wav")) == 0
    out, err = capsys.readouterr()
    assert out == "w1 w2\n" and NoLLM.ends == ends + 1
    assert err.splitlines()[0] == "loading openai/whisper-base" and err.splitlines()[-1].startswith("1 of 1 files, 2 s")
    assert asked == [TranscriptionOptions()]


@pytest.mark.usefixtures("decoded")
def test_flags_become_options(asked: list[TranscriptionOptions], folder: Path) -> None:
    words = ("--translate", "--language", "de", "--prompt", "w1", "--condition-on-previous-text", "-q")
    assert run(str(folder / "b.wav"), *words) == 0
    assert asked == [TranscriptionOptions("translate", "de", "w1", True)]


@pytest.mark.usefixtures("decoded")
@pytest.mark.parametrize(
    ("form", "begins"), [("srt", "1\n00:00:00,000 --> 00:00:01,200\nw1 w2\n"), ("vtt", "WEBVTT\n"), ("text", "w1 w2\n")]
)
def test_a_folder_at_once(
    asked: list[TranscriptionOptions], folder: Path, form: str, begins: str, capsys: pytest.CaptureFixture[str]
) -> None:
    target = folder / "made" / "here"
    assert run(str(folder), "--format", form, "-o", str(target), "-q") == 0
    ends = "txt" if form == "text" else form
    assert sorted(each.name for each in target.iterdir()) == [f"a.{ends}", f"b.{ends}", f"c.{ends}"]
    assert all(each.read_text(encoding="utf-8").startswith(begins) for each in target.iterdir())
    assert capsys.readouterr() == ("", "")


def test_files_of_a_folder_are_in_order() -> None:
    with pytest.raises(ValueError, match="holds no audio files"):
        find_files([str(Path(__file__).parent)])
    assert find_files(["x.wav", "y.bin", "x.wav"]) == [Path("x.wav"), Path("y.bin")]


@pytest.mark.usefixtures("decoded")
def test_json_has_a_line_for_each(
    asked: list[TranscriptionOptions], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(str(folder), "--format", "json", "-q") == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [Path(each["file"]).name for each in lines] == ["a.WAV", "b.wav", "c.wav"]
    assert {each["text"] for each in lines} == {"w1 w2"} and lines[0]["language"] == "english"
    assert lines[0]["segments"][0]["end"] == 1.2 and lines[0]["duration"] == 1.5


@pytest.mark.usefixtures("decoded")
def test_json_has_the_words_that_were_asked_for(
    asked: list[TranscriptionOptions], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(str(folder / "b.wav"), "--format", "json", "-q", "--word-timestamps") == 0
    assert asked == [TranscriptionOptions(word_timestamps=True)]
    words = json.loads(capsys.readouterr().out)["words"]
    assert [each["word"] for each in words] == ["w1", "w2"] and 0 <= words[0]["end"] == words[1]["start"] < 1.5
    assert run(str(folder / "b.wav"), "--format", "json", "-q") == 0
    assert "words" not in json.loads(capsys.readouterr().out)


def test_a_bad_file_does_not_stop_the_others(
    asked: list[TranscriptionOptions], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "aa.wav").write_bytes(b"rubbish")
    (folder / "z.wav").write_bytes(wav(silence(1), 16_000))
    assert run(str(folder), str(folder / "gone.wav")) == 1
    out, err = capsys.readouterr()
    assert [line.rpartition(": ")[2] for line in out.splitlines()] == ["w1 w2", "w1 w2", "w1 w2", ""]
    assert f"{folder / 'aa.wav'}: the audio cannot be read" in err and "gone.wav: there is no such file" in err
    assert err.splitlines()[-1].endswith("2 failed")


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--format", "srt"], "give a folder with --output"),
        (["--word-timestamps"], "needs --format json"),
        (["--language", "klingon"], "none of Whisper's"),
        (["-o", "FOLDER/b.wav"], "is a file; --output names a folder"),
        (["-o", "FOLDER/out", "FOLDER/twice/b.wav"], "two files are called b.wav"),
    ],
)
def test_what_cannot_be_is_refused_before_the_model_is_loaded(
    folder: Path, words: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "twice").mkdir()
    assert (
        run(str(folder / "b.wav"), str(folder / "a.WAV"), *(each.replace("FOLDER", str(folder)) for each in words)) == 1
    )
    assert reason in capsys.readouterr().err


@pytest.mark.usefixtures("decoded")
def test_files_of_one_stem_keep_their_endings(asked: list[TranscriptionOptions], folder: Path) -> None:
    (folder / "b.flac").write_bytes(SPEECH)
    assert run(str(folder / "b.wav"), str(folder / "b.flac"), "-o", str(folder / "out"), "-q") == 0
    assert sorted(each.name for each in (folder / "out").iterdir()) == ["b.flac.txt", "b.wav.txt"]
