"""A stand-in for the server: the page under its policy, answers that the test composes, figures that move."""

import itertools
import json
import select
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

PAGE = (Path(__file__).parents[3] / "quintet" / "server" / "page").resolve()
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript",
    ".css": "text/css",
    ".svg": "image/svg+xml",
}
POLICY = "default-src 'self'; img-src 'self' data:; base-uri 'none'; form-action 'none'"
MODEL = "tiny-chat"


def event(data: Any) -> bytes:
    """One server-sent event."""
    return f"data: {data if isinstance(data, str) else json.dumps(data)}\n\n".encode()


def chunk(
    text: str = "", finish: str | None = None, logprobs: list[dict[str, Any]] | None = None, **delta: Any
) -> bytes:
    """One chunk of a streamed chat completion; `delta` has what comes beside the text."""
    choice = {"index": 0, "delta": {"content": text, **delta}, "finish_reason": finish, "logprobs": None}
    if logprobs is not None:
        choice["logprobs"] = {"content": logprobs}
    return event({"id": "chat-1", "object": "chat.completion.chunk", "model": MODEL, "choices": [choice]})


def ending(tokens: int, finish: str = "stop") -> bytes:
    """What closes an answer: the reason, the usage, [DONE]."""
    usage = {"prompt_tokens": 5, "completion_tokens": tokens, "total_tokens": tokens + 5}
    return chunk(finish=finish) + event({"choices": [], "usage": usage}) + event("[DONE]")


def answer(*pieces: str) -> list[bytes]:
    """A whole answer, a token for each piece."""
    return [*(chunk(piece) for piece in pieces), ending(len(pieces))]


def part(index: int, arguments: str, name: str | None = None) -> bytes:
    """A piece of a call; the first has its name."""
    call: dict[str, Any] = {"index": index, "function": {"arguments": arguments}}
    if name is not None:
        call = {"index": index, "id": f"id{index}", "type": "function", "function": {"name": name, "arguments": ""}}
    return chunk(tool_calls=[call])


def calling(*calls: tuple[str, str], reasoning: str = "") -> list[bytes]:
    """A whole answer that calls: names and arguments."""
    parts = [chunk(reasoning=reasoning)] if reasoning else []
    for index, (name, arguments) in enumerate(calls):
        half = len(arguments) // 2
        parts += [part(index, "", name), part(index, arguments[:half]), part(index, arguments[half:])]
    return [*parts, ending(9, "tool_calls")]


def refusal(message: str, code: str | None = None) -> list[bytes]:
    """The body of an answer that is none, in OpenAI's shape."""
    error = {"message": message, "type": "invalid_request_error", "param": None, "code": code}
    return [json.dumps({"error": error}).encode()]


@dataclass
class Script:
    """What the next request gets: bytes as they leave, `pause` between `parts` and `rest`, or an error instead."""

    parts: list[bytes] = field(default_factory=list)
    rest: list[bytes] = field(default_factory=list)
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)


class FakeServer(ThreadingHTTPServer):
    """Serves at a prefix, as behind a proxy. The test fills `scripts` and reads `requests`."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.scripts: list[Script] = []
        self.requests: list[dict[str, Any]] = []
        self.models: list[dict[str, Any]] = [{"id": MODEL}, {"id": "other"}]
        self.tokenized: list[dict[str, Any]] = []  # bodies of /tokenize
        self.has_tokenize = True
        self.pdf_texts: dict[str, str] = {}  # PDF files that it reads, and their texts
        self.key: str | None = None
        self.go_on = threading.Event()  # lets a script pass from its parts to its rest
        self.hung_up = threading.Event()  # the page closed the connection of an answer
        self.written = 0  # tokens
        self._scrapes = itertools.count(1)
        self._thread = threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/behind/a/proxy/"

    def __enter__(self) -> "FakeServer":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.go_on.set()
        self.shutdown()
        self._thread.join()
        self.server_close()

    def metrics(self) -> str:
        """Figures that grow by known steps from scrape to scrape, for two models."""
        at = next(self._scrapes)
        first = {
            "vllm:num_requests_running": 3,
            "vllm:num_requests_waiting": 1,
            "vllm:kv_cache_usage_perc": 0.25,
            "vllm:prefix_cache_queries_total": 100 * at,
            "vllm:prefix_cache_hits_total": 60 * at,
            "vllm:prompt_tokens_total": 100 * at,
            "vllm:generation_tokens_total": 50 * at + self.written,
            "vllm:num_preemptions_total": 2,
            "vllm:time_to_first_token_seconds_sum": 0.25 * at,
            "vllm:time_to_first_token_seconds_count": at,
            "quintet:kv_pages_used": 200,
            "quintet:kv_pages_total": 400,
            "quintet:step_tokens": 7,
        }
        second = {"vllm:num_requests_running": 1, "quintet:kv_pages_used": 100, "quintet:kv_pages_total": 400}
        samples = [
            f'{name}{{model_name="{model}"}} {value}'
            for model, values in ((MODEL, first), ('od"d}', second))
            for name, value in values.items()
        ]
        bucket = 'vllm:time_to_first_token_seconds_bucket{le="+Inf",model_name="tiny-chat"} 9'
        lines = ["# HELP vllm:num_requests_running Requests.", *samples, bucket, "other_metric NaN", ""]
        return "\n".join(line.replace('od"d}', r"od\"d}") for line in lines)


class Handler(BaseHTTPRequestHandler):
    server: FakeServer

    def do_GET(self) -> None:
        path = self.path.removeprefix("/behind/a/proxy/")
        if path in ("v1/models", "metrics") and not self._allowed():
            return self._refuse()
        if path == "v1/models":
            return self._send(json.dumps({"data": self.server.models}).encode(), "application/json")
        if path == "metrics":
            return self._send(self.server.metrics().encode(), "text/plain; version=0.0.4")
        file = (PAGE / (path.removeprefix("page/") or "index.html")).resolve()
        if file.is_relative_to(PAGE) and file.is_file():
            return self._send(file.read_bytes(), TYPES[file.suffix])
        return self.send_error(404)

    def do_POST(self) -> None:
        raw = self.rfile.read(int(self.headers["Content-Length"]))
        if not self._allowed():
            return self._refuse()
        if self.path.endswith("/page/pdf_text"):
            return self._extract(raw.decode())
        body = json.loads(raw)
        if self.path.endswith("/tokenize"):
            return self._tokenize(body)
        self.server.requests.append(body)
        script = self.server.scripts.pop(0)
        self._head("text/event-stream" if script.status == 200 else "application/json", script.status, script.headers)
        try:
            for data in self._paced(script):
                self.wfile.write(data)
                self.wfile.flush()
                self.server.written += data.count(b'"content": "')
        except OSError:
            self.server.hung_up.set()

    def _tokenize(self, body: dict[str, Any]) -> None:
        """Counts each word as a token."""
        if not self.server.has_tokenize:
            return self.send_error(404)
        self.server.tokenized.append(body)
        count = sum(len((message["content"] or "").split()) for message in body["messages"])
        self._send(json.dumps({"count": count, "tokens": []}).encode(), "application/json")

    def _extract(self, pdf: str) -> None:
        text = self.server.pdf_texts.get(pdf)
        known = json.dumps({"text": text, "pages": 1}).encode()
        body = known if text is not None else b"".join(refusal("the PDF cannot be read", "invalid_pdf"))
        self._send(body, "application/json", 200 if text is not None else 400)

    def _paced(self, script: Script) -> Iterator[bytes]:
        yield from script.parts
        if not script.rest:
            return
        # The page says nothing more on this connection: when there is something to read, it is the end.
        while not self.server.go_on.wait(0.01):
            if select.select([self.connection], [], [], 0)[0]:
                raise ConnectionResetError
        yield from script.rest

    def _allowed(self) -> bool:
        return self.server.key is None or self.headers.get("Authorization") == f"Bearer {self.server.key}"

    def _refuse(self) -> None:
        error = {"message": "This key is not known.", "type": "authentication_error", "param": None, "code": None}
        self._send(json.dumps({"error": error}).encode(), "application/json", 401)

    def _send(self, body: bytes, kind: str, status: int = 200) -> None:
        self._head(kind, status, {"Content-Length": str(len(body))})
        self.wfile.write(body)

    def _head(self, kind: str, status: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {"Content-Type": kind, "Content-Security-Policy": POLICY, **headers}.items():
            self.send_header(name, value)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """The test's own report is enough."""
