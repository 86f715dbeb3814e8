"""What is served, told in Anthropic's shape where a request names a version of its API."""

from collections.abc import Iterator

import anthropic
import httpx
import openai
import pytest
from anthropic.types import ModelInfo

from tests.server.fakes import FakeBackend
from tests.server.http.serving import Live, client, serving

VERSION = {"anthropic-version": "2023-06-01"}
NAMES = ("one", "two", "org/three")


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    with serving(FakeBackend(), api_key=("key",), served_model_name=NAMES) as made:
        yield made


async def get(path: str, headers: dict[str, str] = VERSION) -> httpx.Response:
    async with client(served_model_name=NAMES) as http:
        return await http.get(path, headers=headers)


def test_the_anthropic_client_lists_and_retrieves(live: Live) -> None:
    with anthropic.Anthropic(base_url=live.url, api_key="key", max_retries=0, _strict_response_validation=True) as ai:
        assert [model.id for model in ai.models.list()] == list(NAMES)
        assert [model.id for model in ai.models.list(limit=1)] == list(NAMES)  # page after page
        page = ai.models.list(limit=2)
        assert (page.first_id, page.last_id, page.has_more) == ("one", "two", True)
        assert [model.id for model in ai.models.list(before_id="org/three", limit=1)] == ["two", "one"]
        assert list(ai.models.list(lifecycle=["retired"])) == []
        model = ai.models.retrieve("org/three")
        assert (model.type, model.display_name, model.lifecycle) == ("model", "org/three", "active")
        assert model.created_at.timestamp() == 1 and model.max_input_tokens == 512
        with pytest.raises(anthropic.NotFoundError, match="other"):
            ai.models.retrieve("other")
    with anthropic.Anthropic(base_url=live.url, api_key="wrong", max_retries=0) as ai:
        with pytest.raises(anthropic.AuthenticationError):
            ai.models.list()


def test_the_openai_client_gets_its_own(live: Live) -> None:
    with openai.OpenAI(base_url=f"{live.url}/v1", api_key="key", max_retries=0) as ai:
        assert [model.id for model in ai.models.list()] == list(NAMES)
        assert ai.models.retrieve("org/three").object == "model"


async def test_the_shape() -> None:
    answer = await get("/v1/models?limit=2")
    assert answer.headers["request-id"] == answer.headers["x-request-id"]
    body = answer.json()
    assert {name: body[name] for name in ("first_id", "last_id", "has_more")} == {
        "first_id": "one", "last_id": "two", "has_more": True,
    }  # fmt: skip
    assert [ModelInfo.model_validate(model).id for model in body["data"]] == ["one", "two"]
    assert body["data"][0]["created_at"] == "1970-01-01T00:00:01Z"
    assert set(body["data"][0]) <= set(ModelInfo.model_fields)
    assert (await get("/v1/models?after_id=org/three")).json() == {
        "data": [], "has_more": False, "first_id": None, "last_id": None,
    }  # fmt: skip
    assert (await get("/v1/models", {})).json()["object"] == "list"


@pytest.mark.parametrize(
    ("query", "named"),
    [
        ("limit=0", "limit"),
        ("limit=1001", "limit"),
        ("limit=x", "limit"),
        ("after_id=other", "after_id"),
        ("before_id=other", "before_id"),
        ("after_id=one&before_id=two", "before_id"),
        ("limits=3", "'limit'"),
        ("lifecycle=old", "lifecycle"),
    ],
)
async def test_what_is_wrong_is_told_in_the_same_shape(query: str, named: str) -> None:
    answer = await get(f"/v1/models?{query}")
    body = answer.json()
    assert answer.status_code == 400 and body["type"] == "error"
    assert body["error"]["type"] == "invalid_request_error" and named in body["error"]["message"]


async def test_a_model_that_is_not_there() -> None:
    answer = await get("/v1/models/other")
    assert answer.status_code == 404 and answer.json()["error"]["type"] == "not_found_error"
    assert "type" not in (await get("/v1/models/other", {})).json()
