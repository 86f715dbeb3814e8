"""Schemathesis over our own description: what it makes up is answered as the description says, and never by a 500."""

from typing import Any

import pytest
import schemathesis
from fastapi import FastAPI
from hypothesis import HealthCheck, settings
from schemathesis.checks import not_a_server_error
from schemathesis.config import SchemathesisConfig
from schemathesis.pytest.lazy import get_all_tests
from schemathesis.schemas import BaseSchema
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from quintet.server.config import ServerConfig
from quintet.server.http.app import make_app
from quintet.server.http.app_state import AppState
from tests.server.fakes import FakeBackend
from tests.server.http.serving import HOST

CHECKS = (
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
)


FEW = settings(max_examples=12, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
ON_REQUEST: dict[str, Any] = {
    "enable_sleep_mode": True, "enable_server_load_tracking": True, "enable_tokenizer_info_endpoint": True,
}  # fmt: skip


def app() -> FastAPI:
    config = ServerConfig(trust_request_chat_template=True, **ON_REQUEST)
    return make_app(AppState(FakeBackend(max_model_len=64), config, profiles=True))


def described(app: FastAPI, *, coverage: bool = False) -> BaseSchema:
    """An app's description; coverage: with a case for each keyword of each field, some thousands, made up at once."""
    config = SchemathesisConfig.from_dict({"phases": {"coverage": {"enabled": coverage}}})
    return schemathesis.openapi.from_asgi("/openapi.json", app, config=config, headers={"host": "127.0.0.1"})


def operations(schema: BaseSchema) -> list[str]:
    return [result.ok().label for result in schema.get_all_operations()]


def answered(schema: BaseSchema) -> int:
    """Checks the answers to each operation's cases; returns how many operations there were."""

    def check(case: schemathesis.Case) -> None:
        case.call_and_validate(base_url=HOST, checks=CHECKS)

    tests = [result.ok()[1] for result in get_all_tests(schema=schema, test_func=check, settings=FEW, given_kwargs={})]
    for test in tests:
        test()
    return len(tests)


schema = described(app())


@schema.parametrize()
@FEW
def test_the_api_does_what_it_says(case: schemathesis.Case) -> None:
    case.call_and_validate(base_url=HOST, checks=CHECKS)


@pytest.mark.slow
@pytest.mark.parametrize("operation", operations(schema))
def test_every_keyword_of_every_field(operation: str) -> None:
    assert answered(described(app(), coverage=True).include(name=operation)) == 1


@pytest.mark.parametrize(
    "path",
    [
        "/v1/completions",
        "/v1/chat/completions",
        "/tokenize",
        "/detokenize",
        "/health",
        "/sleep",
        "/load",
        "/tokenizer_info",
    ],
)
def test_the_description_names_it(path: str) -> None:
    assert path in schema
