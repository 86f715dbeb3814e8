"""Transcribe audio files, or all of a folder, with Whisper or Moonshine in this process."""

import argparse
import asyncio
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quintet.cli.commands import _engine as engine
from quintet.common.value_parsers import one_of, optional, text
from quintet.config import option
from quintet.config.schema import flags
from quintet.media.audio.whisper_vocabulary import code_of

if TYPE_CHECKING:
    from quintet import AsyncLLM
    from quintet.media.audio.decode import AudioDecoder
    from quintet.transcription.transcriber import Transcriber, Transcript, TranscriptionOptions

MODEL = "openai/whisper-base"
FORMATS = ("text", "srt", "vtt", "json")
ENDINGS = (".wav", ".flac", ".mp3", ".ogg", ".oga", ".opus", ".m4a", ".mp4", ".aac", ".webm", ".mkv", ".mka", ".mov")
FILES_AT_ONCE = 2  # one is transcribed while the next is decoded
MAX_SECONDS = 24 * 3600.0  # of one file
NO_FILE = "there is no such file; give the path of one, or of a folder"
_EXTENSIONS = {"text": ".txt", "srt": ".srt", "vtt": ".vtt", "json": ".json"}
_EVERY = 10.0  # seconds between two lines of progress


@dataclass(frozen=True)
class TranscribeOptions:
    """Settings of the transcripts."""

    format: str = option(
        "text", one_of(*FORMATS), "text, subtitles (srt, vtt), or OpenAI's verbose_json with segments (json)",
        group="transcription", choices=FORMATS,
    )  # fmt: skip
    language: str | None = option(
        None, optional(text), "that is spoken, such as en or English; if not given it is detected in each file",
        group="transcription",
    )  # fmt: skip
    prompt: str | None = option(
        None, optional(text), "text as if it came before the audio: names, spelling, style", group="transcription",
        metavar="TEXT",
    )  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("FILE", nargs="+", help="audio file, or a folder, whose audio files are all transcribed")
    group = parser.add_argument_group("transcription")
    flags.add_arguments(parser, TranscribeOptions)
    group.add_argument("--translate", action="store_true", help="translate to English")
    group.add_argument(
        "--condition-on-previous-text", action="store_true",
        help="each piece of audio sees the text before it: more consistent, and slower, as pieces wait for each other",
    )  # fmt: skip
    group.add_argument("--word-timestamps", action="store_true", help="add the time of each word (--format json)")
    group.add_argument("--output", "-o", metavar="FOLDER", help="write a file for each, instead of standard output")
    group.add_argument("--quiet", "-q", action="store_true", help="print no progress to standard error")
    engine.add_arguments(parser, model=MODEL)


def run(arguments: argparse.Namespace) -> int:
    """Writes each transcript as soon as it is there, in the order of the files. 1 if any file failed."""
    wanted = flags.from_arguments(arguments, TranscribeOptions)
    files = find_files(arguments.FILE)
    if not any(each.exists() for each in files):  # before the model is loaded
        raise ValueError(f"{files[0]}: {NO_FILE}")
    if len(files) > 1 and wanted.format in ("srt", "vtt") and arguments.output is None:
        raise ValueError(f"there are {len(files)} files, and {wanted.format} has one; give a folder with --output")
    if arguments.word_timestamps and wanted.format != "json":
        raise ValueError(f"--word-timestamps needs --format json; {wanted.format} has no times of words")
    if wanted.language is not None:
        code_of(wanted.language)
    targets = _targets(files, arguments.output, wanted.format)
    settings = engine.engine_settings(arguments)
    settings.setdefault("model", MODEL)
    checked = engine.config(settings)
    if not arguments.quiet:
        engine.print_stderr(engine.loading_message(checked.model))

    from quintet import AsyncLLM

    llm = AsyncLLM(**settings)
    try:
        return asyncio.run(_transcribe_all(llm, files, targets, wanted, arguments))
    finally:
        llm.shutdown()


def find_files(given: Sequence[str]) -> list[Path]:
    """Returns the files, and those of folders that have an audio file's ending, in order. ValueError if there is
    none."""
    found: dict[Path, None] = {}
    for name in given:
        path = Path(name)
        if path.is_dir():
            inside = (each for each in path.rglob("*") if each.suffix.lower() in ENDINGS and each.is_file())
            found.update(dict.fromkeys(sorted(inside)))
        else:
            found[path] = None
    if not found:
        raise ValueError(f"{', '.join(given)} holds no audio files ({', '.join(ENDINGS)}); name the files themselves")
    return list(found)


def _targets(files: Sequence[Path], folder: str | None, form: str) -> list[Path | None]:
    """Returns the file that each transcript goes to; None: standard output. Files of one name keep their endings."""
    if folder is None:
        return [None] * len(files)
    target = Path(folder)
    if target.exists() and not target.is_dir():
        raise ValueError(f"{target} is a file; --output names a folder")
    target.mkdir(parents=True, exist_ok=True)
    stems, names = Counter(each.stem for each in files), Counter(each.name for each in files)
    if twice := next((name for name, count in names.items() if count > 1), None):
        raise ValueError(f"two files are called {twice}, and --output is one folder; transcribe one after the other")
    ends = _EXTENSIONS[form]
    return [target / ((each.stem if stems[each.stem] == 1 else each.name) + ends) for each in files]


async def _transcribe_all(
    llm: "AsyncLLM", files: Sequence[Path], targets: Sequence[Path | None], wanted: TranscribeOptions,
    arguments: argparse.Namespace,
) -> int:  # fmt: skip
    from quintet.api.speech import make_transcriber
    from quintet.media.audio.decode import AudioDecoder
    from quintet.transcription.transcriber import TranscriptionOptions

    task = "translate" if arguments.translate else "transcribe"
    options = TranscriptionOptions(
        task, wanted.language, wanted.prompt or "", arguments.condition_on_previous_text, arguments.word_timestamps,
    )  # fmt: skip
    transcriber, places = make_transcriber(llm, options), asyncio.Semaphore(FILES_AT_ONCE)
    decoder, progress = AudioDecoder(MAX_SECONDS), _Progress(len(files), arguments.quiet)

    async def one(file: Path) -> "Transcript":
        async with places:
            return await _transcribe(file, decoder, transcriber, progress)

    tasks = [asyncio.create_task(one(file)) for file in files]
    failed = 0
    try:
        for file, target, each in zip(files, targets, tasks, strict=True):
            try:
                named = len(files) > 1 and target is None
                content = _content(await each, file, wanted.format, options, named)
                progress.clear()
                _write(content, target)
            except (ValueError, OSError) as error:  # of this file; the others go on
                failed += 1
                progress.clear()
                engine.print_stderr(f"{file}: {error}")
            progress.end_file()
    finally:
        for each in tasks:
            each.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    progress.close(failed)
    return 1 if failed else 0


async def _transcribe(
    file: Path, decoder: "AudioDecoder", transcriber: "Transcriber", progress: "_Progress"
) -> "Transcript":
    if not file.exists():
        raise ValueError(NO_FILE)
    with file.open("rb") as source:
        audio = await decoder.decode(source)
    done = 0.0

    def show(until: float) -> None:
        nonlocal done
        progress.add(until - done)
        done = until

    transcript = await transcriber.transcript(audio.samples, show)
    show(audio.seconds)
    return transcript


def _content(
    transcript: "Transcript", file: Path, form: str, options: "TranscriptionOptions", named: bool
) -> str:  # fmt: skip
    from quintet.transcription.formats import to_srt, to_text, to_verbose_json, to_vtt

    if form in ("srt", "vtt"):
        return (to_srt if form == "srt" else to_vtt)(transcript.segments)
    if form == "json":
        facts = to_verbose_json(
            transcript.segments, options.task, transcript.language or "unknown", transcript.seconds,
            options.word_timestamps,
        )  # fmt: skip
        record: dict[str, Any] = {"file": str(file), **facts}
        return json.dumps(record, ensure_ascii=False) + "\n"
    return f"{file}: {to_text(transcript.segments)}\n" if named else to_text(transcript.segments) + "\n"


def _write(content: str, target: Path | None) -> None:
    if target is None:
        sys.stdout.write(content)
        sys.stdout.flush()
        return
    part = target.with_name(target.name + ".part")
    try:
        part.write_text(content, encoding="utf-8")
        os.replace(part, target)
    finally:
        part.unlink(missing_ok=True)


class _Progress:
    """Seconds of audio that are transcribed: on one line of a terminal, else a line every ten seconds."""

    def __init__(self, files: int, quiet: bool) -> None:
        self._files, self._quiet, self._done_files, self._seconds = files, quiet, 0, 0.0
        self._begun = self._shown = time.monotonic()
        self._line = sys.stderr.isatty() and not quiet

    def add(self, seconds: float) -> None:
        self._seconds += seconds
        now = time.monotonic()
        if self._line:
            print(f"\r{self._figures(now)}\x1b[K", end="", file=sys.stderr, flush=True)
        elif not self._quiet and now - self._shown >= _EVERY:
            self._shown = now
            engine.print_stderr(self._figures(now))

    def clear(self) -> None:
        """Clears the terminal's line for other output."""
        if self._line:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)

    def end_file(self) -> None:
        self._done_files += 1

    def close(self, failed: int) -> None:
        self.clear()
        if not self._quiet:
            engine.print_stderr(self._figures(time.monotonic()) + (f", {failed} failed" if failed else ""))

    def _figures(self, now: float) -> str:
        taken = max(now - self._begun, 1e-9)
        return (
            f"{self._done_files} of {self._files} files, {self._seconds:.0f} s of audio in {taken:.1f} s "
            f"({self._seconds / taken:.1f} times as fast)"
        )
