"""Schemathesis over the routes of numbers, with a model that gives some: answers are what the description says."""

from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, settings

from quintet.server.config import ServerConfig
from quintet.server.http.app import make_app
from quintet.server.http.app_state import AppState
from tests.server.http.pooling.test_embeddings import backend
from tests.server.http.serving import HOST, client
from tests.server.http.test_schema import CHECKS, answered, described, operations

PATHS = ["/v1/embeddings", "/v2/embed", "/pooling", "/classify", "/score", "/rerank"]
MODEL: dict[str, Any] = {
    "tasks": ("embed", "classify", "token_embed"), "matryoshka_dims": True, "labels": ("no", "yes"),
    "prompts": {"query": "q: "},
}  # fmt: skip
app = make_app(AppState(backend(**MODEL), ServerConfig(trust_request_chat_template=True)))
schema = described(app).include(path=PATHS)


@schema.parametrize()
@settings(max_examples=20, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
def test_the_api_does_what_it_says(case: schemathesis.Case) -> None:
    case.call_and_validate(base_url=HOST, checks=CHECKS)


@pytest.mark.slow
@pytest.mark.parametrize("operation", operations(schema))
def test_every_keyword_of_every_field(operation: str) -> None:
    assert answered(described(app, coverage=True).include(name=operation)) == 1


@pytest.mark.parametrize("path", PATHS)
async def test_every_route_is_described(path: str) -> None:
    async with client(backend(**MODEL)) as http:
        described = (await http.get("/openapi.json")).json()["paths"]
    assert described[path]["post"]["requestBody"] and "200" in described[path]["post"]["responses"]
