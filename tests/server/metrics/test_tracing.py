"""Spans as a collector gets them: what they say, whose children they are, and that serving does not wait for them."""

import builtins
import logging
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import pytest

from quintet.chat.prompts import Prompt
from quintet.engine.pooling.input_processor import PoolingBounds
from quintet.sampling_params import SamplingParams
from quintet.server import tracing
from quintet.server.config import ServerConfig
from quintet.server.http.app import make_app
from quintet.server.http.app_state import AppState
from quintet.server.http.engine_call import PromptRequest
from quintet.server.http.errors import ApiError
from tests.server.fakes import FakeBackend
from tests.server.metrics.collector import Collector, plain
from tests.server.metrics.scrapes import TellingBackend

OK, UNSET, ERROR = 1, 0, 2  # status codes of OTLP
SERVER = 2  # span kind
BODY = {"prompt": "a secret", "max_tokens": 5, "temperature": 0.5, "top_p": 0.75}


@pytest.fixture
def collector() -> Iterator[Collector]:
    with Collector() as made:
        yield made


@pytest.fixture
def service(collector: Collector, monkeypatch: pytest.MonkeyPatch) -> Iterator[AppState]:
    """It gives nothing up, and sends nothing twice, because the machine is busy."""
    monkeypatch.setattr(tracing, "_EXPORT", 600)
    monkeypatch.setattr(tracing, "FLUSH_SECONDS", 60)
    made = AppState(TellingBackend(), ServerConfig(otlp_traces_endpoint=collector.url))
    yield made
    collector.answers.set()
    made.close()
    for sender in senders():  # it would find no collector, and tell so in the log of the next test
        sender.join(60)


def senders() -> list[threading.Thread]:
    """Who sends what is left when a server has ended."""
    return [each for each in threading.enumerate() if each.name == "quintet-traces"]


@pytest.fixture
async def client(service: AppState) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(make_app(service), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as made:
        yield made


async def test_a_span_of_embeddings(client: httpx.AsyncClient, service: AppState, collector: Collector) -> None:
    service.backend = FakeBackend(pooling=PoolingBounds(("embed",), 512, 16, "MEAN", True))
    assert (await client.post("/v1/embeddings", json={"input": ["a", "b"], "dimensions": 8})).status_code == 200
    service.close()
    (span,) = collector.wait(1)
    found = plain(span.attributes)
    assert found["gen_ai.operation.name"] == "embeddings" and found["gen_ai.embeddings.dimension.count"] == 8
    assert found["gen_ai.usage.input_tokens"] == 4 and found["gen_ai.usage.output_tokens"] == 0
    assert "gen_ai.request.max_tokens" not in found and "gen_ai.response.finish_reasons" not in found


@pytest.mark.parametrize("stream", [False, True])
async def test_a_span_says_what_was_asked_and_what_it_took(
    client: httpx.AsyncClient, service: AppState, collector: Collector, stream: bool
) -> None:
    backend = service.backend
    assert isinstance(backend, TellingBackend)
    backend.cached = 1
    before = time.time()
    response = await client.post("/v1/completions", json={**BODY, "seed": 7, "n": 2, "stream": stream})
    assert response.status_code == 200
    took = time.time() - before
    service.close()
    (span,) = collector.wait(1)
    found = plain(span.attributes)
    assert found.pop("gen_ai.request.id") == response.headers["x-request-id"]
    first, whole = found.pop("gen_ai.latency.time_to_first_token"), found.pop("gen_ai.latency.e2e")
    assert found == {
        "http.request.method": "POST",
        "http.route": "/v1/completions",
        "http.response.status_code": 200,
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "quintet",
        "gen_ai.request.model": "fake/model",
        "gen_ai.request.max_tokens": 5,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.75,
        "gen_ai.request.seed": 7,
        "gen_ai.request.choice.count": 2,
        "gen_ai.usage.input_tokens": len(backend.submitted[0].prompt.token_ids),
        "gen_ai.usage.output_tokens": 10,
        "gen_ai.usage.cache_read.input_tokens": 1,
        "gen_ai.response.finish_reasons": ["length", "length"],
    }
    assert 0 < first <= whole <= took
    assert (span.name, span.kind, span.status.code) == ("POST /v1/completions", SERVER, UNSET)
    assert whole <= (span.end_time_unix_nano - span.start_time_unix_nano) / 1e9 <= took
    assert collector.resource["service.name"] == "quintet"


async def test_no_text_leaves(client: httpx.AsyncClient, service: AppState, collector: Collector) -> None:
    await client.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "geheim"}], "stop": "zu"})
    await client.post("/v1/completions", json={"prompt": "geheim", "max_tokens": "geheim"})
    service.close()
    spans = collector.wait(2)
    assert [plain(span.attributes).get("gen_ai.operation.name") for span in spans] == ["chat", "text_completion"]
    assert b"geheim" not in collector.bodies


async def test_a_parent_is_taken_over(client: httpx.AsyncClient, service: AppState, collector: Collector) -> None:
    trace, parent = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    headers = {"traceparent": f"00-{trace}-{parent}-01", "tracestate": "rojo=1"}
    await client.post("/v1/completions", json=BODY, headers=headers)
    await client.post("/v1/completions", json=BODY, headers={"traceparent": f"00-{trace}-{parent}-00"})  # not sampled
    await client.post("/v1/completions", json=BODY, headers={"traceparent": "nonsense"})
    service.close()
    child, own = collector.wait(2)
    assert (child.trace_id.hex(), child.parent_span_id.hex(), child.trace_state) == (trace, parent, "rojo=1")
    assert own.trace_id.hex() != trace and own.parent_span_id == b""
    assert len(collector.spans) == 2


async def test_errors_are_in_the_status(client: httpx.AsyncClient, service: AppState, collector: Collector) -> None:
    backend = service.backend
    assert isinstance(backend, TellingBackend)
    await client.post("/v1/completions", json={**BODY, "max_tokens": -1})
    backend.fail_at = 1
    await client.post("/v1/completions", json={**BODY, "stream": True})  # 200, and breaks off
    backend.fail_at, backend.hang = None, 2
    await client.post("/v1/completions", json=BODY, headers={"x-request-timeout": "0.01"})
    backend.hang, backend.dead = None, "gone"
    await client.post("/v1/completions", json=BODY)
    service.close()
    refused, failed, late, dead = collector.wait(4)
    assert [span.status.code for span in (refused, failed, late, dead)] == [UNSET, ERROR, ERROR, ERROR]
    kinds = [plain(span.attributes)["error.type"] for span in (refused, failed, late, dead)]
    assert kinds == ["400", "request_failed", "timeout", "503"]
    assert plain(failed.attributes)["http.response.status_code"] == 200
    assert plain(late.attributes)["gen_ai.response.finish_reasons"] == []


async def test_a_call_that_nobody_waits_for_has_a_span_of_its_own(service: AppState, collector: Collector) -> None:
    async with service.call(None, [PromptRequest(Prompt([5, 6]), SamplingParams(max_tokens=3))]) as call:
        await call.outputs()
    with pytest.raises(ApiError):
        service.capacity.held = service.capacity.limits
        await service.call(None, [PromptRequest(Prompt([5]), SamplingParams())]).__aenter__()  # not let in: no span
    service.close()
    (span,) = collector.wait(1)
    assert span.name == "background"
    assert plain(span.attributes)["gen_ai.usage.output_tokens"] == 3


async def test_a_call_that_ends_before_it_asks_has_a_span(service: AppState, collector: Collector) -> None:
    """It holds its room, and asks nothing, while a tool runs."""
    ask = PromptRequest(Prompt([5, 6]), SamplingParams(max_tokens=3))
    async with service.call(None, [ask], waits=True) as call:
        assert service.capacity.held.completions == 1
        assert [each async for each in call] == []
    assert service.capacity.held.completions == 0
    service.close()
    (span,) = collector.wait(1)
    assert plain(span.attributes)["gen_ai.usage.input_tokens"] == 0


async def test_a_collector_that_hangs_disturbs_nobody(
    client: httpx.AsyncClient, service: AppState, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracing, "FLUSH_SECONDS", 0.2)
    collector.answers.clear()
    for _ in range(600):  # more than a batch: the sender is at work by now
        assert (await client.post("/v1/completions", json={**BODY, "max_tokens": -1})).status_code == 400
    service.close()
    assert senders()  # it was not waited for


def test_a_collector_that_is_not_there_is_told_of_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracing, "_EXPORT", 0.3)  # too short for a second try
    monkeypatch.setattr(tracing, "FLUSH_SECONDS", 60)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # nobody listens
        endpoint = f"http://127.0.0.1:{taken.getsockname()[1]}"
        tracer = tracing.make_tracer(endpoint, lambda: "m")
        assert tracer is not None
        with caplog.at_level(logging.INFO):
            for _ in range(600):  # more than a batch
                tracer.start_span({"type": "http", "method": "POST", "headers": []}).end(200, "/")
            tracer.close()
    told = [record for record in caplog.records if "takes no traces" in record.message]
    assert len(told) == 1 and endpoint in told[0].message
    assert not [record for record in caplog.records if record.name.startswith("opentelemetry")]


@pytest.mark.parametrize("endpoint", ["collector:4317", "grpc://collector:4317", "http://", "/v1/traces"])
def test_an_address_that_is_none_is_refused(endpoint: str) -> None:
    with pytest.raises(ValueError, match="otlp_traces_endpoint must be an http or https URL"):
        tracing.make_tracer(endpoint, lambda: "m")


def test_without_opentelemetry_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    found = builtins.__import__

    def refuse(name: str, *arguments: Any) -> Any:
        if name.startswith("opentelemetry"):
            raise ModuleNotFoundError(f"No module named {name!r}")
        return found(name, *arguments)

    monkeypatch.setattr(builtins, "__import__", refuse)
    assert tracing.make_tracer(None, lambda: "m") is None
    with pytest.raises(ValueError, match=r"pip install '.*\[tracing\]'"):
        tracing.make_tracer("http://localhost:4318", lambda: "m")


@pytest.mark.slow
def test_a_server_that_is_not_traced_imports_neither_sdk_nor_exporter() -> None:
    code = (
        "import sys, quintet.server.processes.api_process\n"
        "print([name for name in sys.modules if name.startswith(sys.argv[1])])"
    )
    for name in ("opentelemetry.sdk", "opentelemetry.exporter", "prometheus_client"):
        done = subprocess.run([sys.executable, "-c", code, name], capture_output=True, text=True, check=True)
        assert done.stdout.strip() == "[]"
