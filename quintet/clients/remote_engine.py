"""Client of any OpenAI-compatible server, with our engine's calls: stream and stream_chat, over HTTP."""

import contextlib
import http.client
import json
import socket
import ssl
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

from quintet.clients import errors, token_speed
from quintet.clients.chat_deltas import ChatDeltaParser
from quintet.clients.http_client import MAX_BODY, EventStreamParser
from quintet.clients.http_connection import CONNECT_SECONDS, HttpProtocolError
from quintet.clients.server_address import ServerTarget
from quintet.outputs import CompletionOutput, RequestMetrics, RequestOutput
from quintet.parsers import Content

_IDLE_SECONDS = 600.0  # seconds without a byte: a long prompt on a slow machine may take minutes


class RemoteEngine:
    """A server and one of its models. Sampling parameters are sent as they are given: the rest is the server's choice.

    Connects itself, through no proxy. Every failure is a ServerError.
    """

    def __init__(self, target: ServerTarget, model: str | None = None) -> None:
        self._target = target
        self._wanted = model

    @cached_property
    def model(self) -> str:
        """The one that was asked for, or the first that the server lists."""
        return self._wanted or self.models()[0]

    def models(self) -> list[str]:
        """Returns the models that GET /v1/models lists; never empty."""
        with self._answer("GET", "/v1/models") as response:
            body = _read_body(response)
        try:
            names = [entry["id"] for entry in json.loads(body)["data"]]
        except (ValueError, RecursionError, TypeError, KeyError):
            raise errors.incompatible_server(self._target.display_name, "/v1/models lists no models") from None
        if not names or not all(isinstance(name, str) for name in names):
            raise errors.incompatible_server(self._target.display_name, "/v1/models lists no models")
        return names

    def count_tokens(self, text: str) -> int:
        """Returns the number of a text's tokens, from POST /tokenize (quintet and vLLM have it)."""
        answer = self.ask("POST", "/tokenize", {"model": self.model, "prompt": text, "add_special_tokens": False})
        if not isinstance(answer.get("count"), int):
            raise errors.incompatible_server(self._target.display_name, "/tokenize counts no tokens")
        return int(answer["count"])

    def ask(self, method: str, path: str, fields: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Returns the JSON object that the server answers with."""
        with self._answer(method, path, None if fields is None else json.dumps(fields).encode()) as response:
            body = _read_body(response)
        try:
            found = json.loads(body)
        except (ValueError, RecursionError):
            found = None
        if not isinstance(found, dict):
            raise errors.incompatible_server(self._target.display_name, f"{path} answers with no JSON object")
        return found

    def stream_chat(
        self, messages: Sequence[Mapping[str, Any]], params: Mapping[str, Any], **template: Any
    ) -> Iterator[RequestOutput]:
        """Answers a conversation, as it comes; `template` is sent along: tools, chat_template_kwargs."""
        return self._stream("/v1/chat/completions", {"messages": messages, **params, **template})

    def stream(self, prompt: str, params: Mapping[str, Any]) -> Iterator[RequestOutput]:
        """Continues a prompt, as it comes."""
        return self._stream("/v1/completions", {"prompt": prompt, **params})

    def _stream(self, path: str, fields: Mapping[str, Any]) -> Iterator[RequestOutput]:
        """Deltas of text. Tokens are counted in the metrics, as the server counts them; until it does, in events."""
        body = {"model": self.model, **fields, "stream": True, "stream_options": {"include_usage": True}}
        metrics, ended, deltas = RequestMetrics(time.monotonic()), False, ChatDeltaParser()
        with self._answer("POST", path, json.dumps(body).encode()) as response:
            if "text/event-stream" not in response.headers.get("content-type", ""):
                raise errors.incompatible_server(self._target.display_name, f"{path} answers with no event stream")
            for data in _events(response):
                if data == b"[DONE]":
                    break
                output = self._output(data, metrics, deltas)
                ended = ended or output.finished
                yield output
            else:
                if not ended:
                    raise errors.connection_broken(self._target.display_name, ConnectionError("the stream ended early"))

    def _output(self, data: bytes, metrics: RequestMetrics, deltas: ChatDeltaParser) -> RequestOutput:
        try:
            event = json.loads(data)
            if event.get("error"):
                raise errors.stream_error(self._target.display_name, event)
            choice = (event.get("choices") or [{}])[0]
            reason = choice.get("finish_reason")
            events = deltas.events(choice.get("delta") or {}, reason is not None)
            text = choice.get("text") or "".join(each.text for each in events if isinstance(each, Content))
            usage = event.get("usage") or {}
            metrics.num_generation_tokens = usage.get(
                "completion_tokens", metrics.num_generation_tokens + bool(text or events)
            )
            metrics.num_prompt_tokens = usage.get("prompt_tokens", metrics.num_prompt_tokens)
            completion = CompletionOutput(0, str(text), (), finish_reason=reason, events=events)
        except errors.ServerError:
            raise
        except (ValueError, RecursionError, TypeError, AttributeError, LookupError):
            raise errors.incompatible_server(
                self._target.display_name, "an event of its stream is no chunk of an answer"
            ) from None
        return RequestOutput("", None, [], None, [completion], finished=reason is not None, metrics=metrics)

    @contextlib.contextmanager
    def _answer(self, method: str, path: str, body: bytes | None = None) -> Iterator[http.client.HTTPResponse]:
        """One exchange on a connection of its own; leaving early ends the connection, and with it the server's work."""
        address, where = self._target.address, self._target.display_name
        connection = connect(self._target)
        try:
            headers = {**self._target.headers(), "content-type": "application/json", "user-agent": "quintet"}
            connection.request(method, address.prefix + path, body, headers)
            response = connection.getresponse()
            if response.status != 200:
                raise self._refusal(path, response.status, _read_body(response), body)
            yield response
        except (http.client.HTTPException, HttpProtocolError) as error:
            short = isinstance(error, http.client.IncompleteRead | http.client.RemoteDisconnected)
            cause = (
                ConnectionError("it was closed")
                if short
                else HttpProtocolError(f"{type(error).__name__}: {error}"[:200])
            )
            raise errors.connection_broken(where, cause) from None
        except OSError as error:
            raise errors.connection_broken(where, error) from None
        finally:
            connection.close()

    def _refusal(self, path: str, status: int, answer: bytes, body: bytes | None) -> errors.ServerError:
        """Returns a refusal as an error; if the model's name is wrong, the message has the right ones."""
        error = errors.status_error(self._target.display_name, path, status, answer)
        if status == 404 and body and self._wanted:
            with contextlib.suppress(errors.ServerError):
                served = self.models()
                if self._wanted not in served:
                    return errors.unknown_model(self._target.display_name, self._wanted, served)
        return error


def connect(target: ServerTarget, seconds: float = _IDLE_SECONDS) -> http.client.HTTPConnection:
    """An open connection; a ServerError says what to do where there is none. `seconds` of silence end it later."""
    address = target.address
    if address.uds:
        connection: http.client.HTTPConnection = _UnixHTTPConnection(address.uds)
    elif address.tls:
        context = ssl.create_default_context()
        connection = http.client.HTTPSConnection(address.host, address.port, timeout=CONNECT_SECONDS, context=context)
    else:
        connection = http.client.HTTPConnection(address.host, address.port, timeout=CONNECT_SECONDS)
    try:
        connection.connect()
    except OSError as error:
        raise errors.unreachable(target.display_name, error) from None
    connection.sock.settimeout(seconds)
    return connection


class _UnixHTTPConnection(http.client.HTTPConnection):
    """HTTP on a Unix socket."""

    def __init__(self, path: str) -> None:
        super().__init__("localhost")
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.connect(self._path)


def _read_body(response: http.client.HTTPResponse) -> bytes:
    body = response.read(MAX_BODY + 1)
    if len(body) > MAX_BODY:
        raise HttpProtocolError(f"its answer is longer than {MAX_BODY} bytes")
    return body


def _events(response: http.client.HTTPResponse) -> Iterator[bytes]:
    found: list[bytes] = []
    events = EventStreamParser(found.append)
    while piece := response.read1(65536):
        events.feed(piece)
        yield from found
        found.clear()
    events.finish()
    yield from found


class ServerSpeed(token_speed.TokenSpeed):
    """Speed of a server's answer, in the tokens that it counts itself."""

    def _count(self, output: RequestOutput, new: bool) -> None:
        self.last = time.perf_counter()
        self.num_prompt, self.num_output = output.metrics.num_prompt_tokens, output.metrics.num_generation_tokens
        if self.first is None and self.num_output:
            self.first, self.num_first = self.last, 1  # a server that gives several at once says so only at the end
