"""State that an earlier run of a batch left: answers that are kept, and where the next run goes on."""

import contextlib
import fcntl
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from quintet.clients.batch_files import BadLine, BatchCounts, BatchRequest, KeptAnswer, read, read_raw_lines


@dataclass(frozen=True)
class BatchRun:
    """One run over an input: what it keeps, and what is open. Files are read line by line, never whole."""

    source: IO[bytes]
    output: Path
    part: Path
    max_line_bytes: int
    total: int | None  # lines of the input; None: it can be read but once
    num_open: int | None  # of them, those without an answer that stands
    num_done: int = 0  # answers in the part: they stay where they are
    size: int = 0  # bytes of those
    counts: BatchCounts = field(default_factory=BatchCounts)  # of what is kept

    def requests(self) -> Iterator[BatchRequest | BadLine | KeptAnswer]:
        """In the order of the input, from the first that the part has no answer to."""
        with contextlib.closing(_PreviousAnswers(self.output if self.counts.num_kept else None)) as older:
            for at, request in enumerate(read(self.source, self.max_line_bytes)):
                answer = older.answer_to(request)
                if at >= self.num_done:
                    yield KeptAnswer(answer) if answer and _is_final(answer) else request

    @contextlib.contextmanager
    def open_part(self) -> Iterator[IO[bytes]]:
        """The part, behind what is kept of it. ValueError: another run writes there."""
        with self.part.open("ab") as sink:
            try:
                fcntl.flock(sink, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ValueError(f"another run writes {self.part}; wait for its end, or end it") from None
            sink.seek(sink.truncate(self.size))
            yield sink


def start_batch(source: IO[bytes], output: Path, part: Path, max_line_bytes: int) -> BatchRun:
    """Returns a run over all of the input, whatever is there already."""
    total = None
    if source.seekable():
        total = sum(1 for _ in read_raw_lines(source, max_line_bytes))
        source.seek(0)
    return BatchRun(source, output, part, max_line_bytes, total, total)


def resume_batch(source: IO[bytes], output: Path, part: Path, max_line_bytes: int) -> BatchRun:
    """Keeps the whole lines of the part, and the rest's answers (200) of an output that was finished with failures.

    ValueError if one of them belongs to another input.
    """
    if not source.seekable():
        raise ValueError("--resume reads the input twice, and this one can be read but once; give a file")
    total = still_open = begun = size = 0
    tally = BatchCounts()
    with contextlib.closing(_PreviousAnswers(part)) as newer, contextlib.closing(_PreviousAnswers(output)) as older:
        for request in read(source, max_line_bytes):
            total += 1
            answer, old = newer.answer_to(request), older.answer_to(request)
            if answer:
                begun, size = newer.number, newer.end
            answer = answer or (old if old and _is_final(old) else None)
            if answer:
                tally.count_kept(answer)
            else:
                still_open += 1
        newer.check_end()
        older.check_end()
    source.seek(0)
    return BatchRun(source, output, part, max_line_bytes, total, still_open, begun, size, tally)


def _is_final(answer: dict[str, Any]) -> bool:
    """True if the answer is kept. A request that failed is sent again: a server that was away may be back."""
    response = answer.get("response")
    return isinstance(response, dict) and response.get("status_code") == 200


class _PreviousAnswers:
    """The lines of an earlier run, in step with the input. A last line that is not whole is none."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._file = path.open("rb") if path is not None and path.exists() else None
        self.number = self.end = 0  # lines so far, and their bytes

    def answer_to(self, request: BatchRequest | BadLine) -> dict[str, Any] | None:
        """The next line, if there is one. ValueError if it answers another request."""
        line = self._file.readline() if self._file else b""
        if not line.endswith(b"\n"):
            return None
        self.number += 1
        self.end += len(line)
        try:
            answer = json.loads(line)
        except (ValueError, RecursionError):
            answer = None
        if not isinstance(answer, dict) or "custom_id" not in answer:
            raise self._foreign("is no answer of a batch")
        if answer.get("id") != request.id:
            named, here = answer["custom_id"], request.custom_id
            what = (
                f"and the input has {here!r} there" if named != here else "which asks for something else in the input"
            )
            raise self._foreign(f"answers {named!r}, {what}")
        return answer

    def check_end(self) -> None:
        """ValueError if the input has ended, and this has not."""
        if self._file and self._file.readline().endswith(b"\n"):
            raise self._foreign(f"is there, and the input has {self.number} requests", self.number + 1)

    def close(self) -> None:
        if self._file:
            self._file.close()

    def _foreign(self, why: str, line: int = 0) -> ValueError:
        return ValueError(
            f"{self._path} belongs to another input: line {line or self.number} {why}; give another --output-file, or "
            "leave --resume out to write it anew"
        )
