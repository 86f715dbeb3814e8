"""OpenAI's batch file format: lines of requests in, lines of answers out, in the same order."""

import asyncio
import dataclasses
import email.utils
import hashlib
import json
import time
import uuid
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import IO, Any

from quintet.clients import errors
from quintet.clients.http_client import HttpClient, HttpResponse
from quintet.clients.http_connection import ConnectionLost, HttpProtocolError
from quintet.common.suggestions import refuse_unknown, unknown_name_error

PATHS = (
    "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings", "/v1/score", "/v1/rerank", "/score",
    "/rerank", "/v2/rerank", "/v1/audio/transcriptions", "/v1/audio/translations",
)  # fmt: skip
_RETRY_STATUSES = (429, 503)  # too much at once, or not quite there: the server asks to come again
_IGNORED = "x-quintet-ignored-fields"
_MAX_REPORTED = 3
_LINES_AHEAD = 4  # times the concurrency: how far the file is read ahead of the oldest request without an answer


class BadLine(ValueError):
    """A line that is no request; `custom_id` where it has one."""

    def __init__(self, message: str, custom_id: str | None = None) -> None:
        super().__init__(message)
        self.custom_id = custom_id
        self.id = _random_id()


def _random_id() -> str:
    return f"batch_req_{uuid.uuid4().hex}"


@dataclass(frozen=True)
class BatchRequest:
    """One line."""

    custom_id: str
    url: str  # of PATHS
    body: bytes
    id: str = field(default_factory=_random_id)  # of the answer


@dataclass(frozen=True)
class KeptAnswer:
    """The answer of an earlier run, in the place of its request."""

    answer: dict[str, Any]


@dataclass(frozen=True)
class BatchOptions:
    """Concurrency and retries of a batch."""

    concurrency: int = 64
    max_retries: int = 5
    max_wait: float = 60.0  # seconds before a retry, whatever the server says


def read_raw_lines(file: IO[bytes], max_line_bytes: int) -> Iterator[tuple[int, bytes | None, str]]:
    """Number, text and id of each line that is not empty; one that is too long has no text.

    The id is made of the line and its place, so that an answer shows which request it belongs to.
    """
    number = place = 0
    while line := file.readline(max_line_bytes + 1):
        number += 1
        too_long = len(line) > max_line_bytes
        digest = hashlib.sha256(b"%d\n" % place + line.strip())
        while too_long and not line.endswith(b"\n"):  # the rest of it is read away
            line = file.readline(2**20) or b"\n"
            digest.update(line.rstrip(b"\n"))
        if too_long or line.strip():
            place += 1
            yield number, None if too_long else line, f"batch_req_{digest.hexdigest()[:32]}"


def read(file: IO[bytes], max_line_bytes: int) -> Iterator[BatchRequest | BadLine]:
    """Each line that is not empty, in order. What is wrong with a line is yielded in its place."""
    seen: set[str] = set()
    for number, line, name in read_raw_lines(file, max_line_bytes):
        try:
            if line is None:
                raise BadLine(f"line {number} is longer than {max_line_bytes} bytes; --max-line-bytes allows more")
            yield dataclasses.replace(_request(line, number, seen), id=name)
        except BadLine as bad:
            bad.id = name
            yield bad


def _request(line: bytes, number: int, seen: set[str]) -> BatchRequest:
    try:
        entry = json.loads(line.decode("utf-8-sig"), parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise BadLine(f"line {number} is not JSON: {error}") from None
    if not isinstance(entry, dict):
        raise BadLine(f"line {number} must be a JSON object, not {type(entry).__name__}")
    name = entry.get("custom_id")
    if not isinstance(name, str) or not name:
        raise BadLine(f"line {number}: custom_id must be text that is not empty")
    try:
        _check(entry)
        if name in seen:
            raise ValueError("custom_id is the same as that of an earlier line")
    except ValueError as error:
        raise BadLine(f"line {number}: {error}", name) from None
    seen.add(name)
    return BatchRequest(name, entry["url"], json.dumps(entry["body"]).encode())


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no number in JSON")


def _check(entry: dict[str, Any]) -> None:
    refuse_unknown("field", entry, ("custom_id", "method", "url", "body"))
    if entry.get("method") != "POST":
        raise ValueError(f"method must be POST, not {entry.get('method')!r}")
    if entry.get("url") not in PATHS:
        raise ValueError(
            unknown_name_error("url", str(entry.get("url")), PATHS) + f"; a batch takes {', '.join(PATHS)}"
        )
    body = entry.get("body")
    if not isinstance(body, dict):
        raise ValueError("body must be a JSON object")
    if body.get("stream"):
        raise ValueError("body.stream must not be set: an answer is one line")


@dataclass
class BatchCounts:
    """Counts of a batch: answers, failures and tokens."""

    answered: int = 0
    failures: Counter[str] = field(default_factory=Counter)  # kind -> lines
    tokens: int = 0  # of output, where the server counts them
    ignored: int = 0  # lines with fields that the server does not know
    ignored_fields: dict[str, None] = field(default_factory=dict)  # the server's reports of them, a few
    num_kept: int = 0  # of all these, those of an earlier run; their tokens do not count

    @property
    def failed(self) -> int:
        return sum(self.failures.values())

    @property
    def done(self) -> int:
        return self.answered + self.failed

    def count_ignored(self, header: str) -> None:
        """Counts a line with fields that the server ignored; keeps a few of the server's reports."""
        self.ignored += 1
        if len(self.ignored_fields) < _MAX_REPORTED:
            self.ignored_fields[header] = None

    def count_kept(self, answer: dict[str, Any]) -> None:
        """Counts a line of an earlier run that is kept."""
        self.num_kept += 1
        response, error = answer.get("response") or {}, answer.get("error") or {}
        if response.get("status_code") == 200:
            self.answered += 1
        else:
            self.failures[error.get("code") or f"HTTP_{response.get('status_code')}"] += 1


class BatchSender:
    """Sends the lines of a file to a server, a bounded number at once."""

    def __init__(
        self,
        connections: HttpClient,
        where: str,
        manner: BatchOptions,
        tally: BatchCounts | None = None,
        done: Callable[[BatchCounts], object] = lambda tally: None,
    ) -> None:
        """`tally` goes on from there; `done` is called with it whenever a line has its answer."""
        self.counts = tally or BatchCounts()
        self._done = done
        self._connections = connections
        self._where = where
        self._manner = manner
        self._gate = asyncio.Semaphore(manner.concurrency)

    async def answers(
        self, requests: Iterator[BatchRequest | BadLine | KeptAnswer]
    ) -> AsyncGenerator[dict[str, Any], None]:
        """Output lines in the order of the input. What was begun ends with the caller's interest."""
        waiting: asyncio.Queue[asyncio.Task[dict[str, Any]] | None] = asyncio.Queue(
            _LINES_AHEAD * self._manner.concurrency
        )

        async def begin() -> None:
            try:
                for each in requests:
                    task = asyncio.create_task(self._one(each))
                    try:
                        await waiting.put(task)
                    except asyncio.CancelledError:  # while there was no room: the queue does not hold it
                        task.cancel()
                        raise
            except OSError:
                await waiting.put(None)
                raise
            await waiting.put(None)

        beginning = asyncio.create_task(begin())
        try:
            while (task := await waiting.get()) is not None:
                yield await task
            await beginning  # raises what kept the file from being read on
        finally:
            beginning.cancel()
            while not waiting.empty():
                if (task := waiting.get_nowait()) is not None:
                    task.cancel()

    async def write(self, requests: Iterator[BatchRequest | BadLine | KeptAnswer], file: IO[bytes]) -> BatchCounts:
        """Each line is in the file as soon as all before it are."""
        async with aclosing(self.answers(requests)) as lines:
            async for line in lines:
                file.write(json.dumps(line, ensure_ascii=False).encode(errors="backslashreplace") + b"\n")
                file.flush()
        return self.counts

    async def _one(self, request: BatchRequest | BadLine | KeptAnswer) -> dict[str, Any]:
        if isinstance(request, KeptAnswer):
            return request.answer
        line = await self._ask(request)
        self._done(self.counts)
        return line

    async def _ask(self, request: BatchRequest | BadLine) -> dict[str, Any]:
        line: dict[str, Any] = {"id": request.id, "custom_id": request.custom_id}
        if isinstance(request, BadLine):
            return self._failed(line, "bad_line", str(request))
        try:
            async with self._gate:
                answer = await self._send(request)
        except errors.ServerError as error:
            return self._failed(line, error.kind.replace(" ", "_"), str(error))
        try:
            body = json.loads(answer.body)
        except (ValueError, RecursionError):
            message = errors.error_message(answer.body)
            return self._failed(line, "not_json", f"{self._where} answered {answer.status} and no JSON: {message}")
        return self._answered(line, answer, body)

    def _failed(self, line: dict[str, Any], code: str, message: str) -> dict[str, Any]:
        self.counts.failures[code] += 1
        return {**line, "response": None, "error": {"code": code, "message": message}}

    def _answered(self, line: dict[str, Any], answer: HttpResponse, body: Any) -> dict[str, Any]:
        """Returns the output line of an answer. Of a refusal, the body is the server's message."""
        if answer.status == 200:
            self.counts.answered += 1
            usage = body.get("usage") if isinstance(body, dict) else None
            if isinstance(usage, dict):
                count = usage.get("completion_tokens", usage.get("output_tokens"))
                self.counts.tokens += count if isinstance(count, int) else 0
        else:
            self.counts.failures[f"HTTP_{answer.status}"] += 1
        request_id = answer.headers.get("x-request-id", line["id"])
        response = {"status_code": answer.status, "request_id": request_id, "body": body}
        if (ignored := answer.headers.get(_IGNORED)) is not None:
            response["ignored_fields"] = ignored
            self.counts.count_ignored(ignored)
        return {**line, "response": response, "error": None}

    async def _send(self, request: BatchRequest) -> HttpResponse:
        for turn in range(self._manner.max_retries + 1):
            answer = await self._post(request)
            if answer.status not in _RETRY_STATUSES or turn == self._manner.max_retries:
                return answer
            await asyncio.sleep(min(retry_after(answer, 2.0**turn), self._manner.max_wait))
        raise AssertionError("the last turn returns")

    async def _post(self, request: BatchRequest) -> HttpResponse:
        try:
            return await self._connections.request("POST", request.url, request.body)
        except (ConnectionLost, HttpProtocolError, TimeoutError) as error:
            raise errors.connection_broken(self._where, error) from None
        except OSError as error:
            raise errors.unreachable(self._where, error) from None


def retry_after(answer: HttpResponse, default: float) -> float:
    """Seconds that the server asks to wait. Source: RFC 9110, 10.2.3: a number of seconds, or a date."""
    value = answer.headers.get("retry-after", "").strip()
    if value.isascii() and value.isdigit():
        return float(value[:9])
    try:
        return max(0.0, email.utils.parsedate_to_datetime(value).timestamp() - time.time())
    except (TypeError, ValueError, OverflowError):
        return default
