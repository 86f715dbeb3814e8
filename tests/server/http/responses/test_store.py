"""The store of responses: what it keeps, how long, and what it says of what it does not have."""

from typing import Any

import httpx
import pytest

from quintet.server.http.errors import ApiError
from quintet.server.http.responses.store import ResponseStore, StoredResponse
from tests.server.http.responses.responses_requests import PATH, backend, create, fail
from tests.server.http.serving import client

OWNER = "a"


def fill(store: ResponseStore, num: int, size: int = 10) -> list[str]:
    records = [StoredResponse(store.new_id(), OWNER, b"x" * size) for _ in range(num)]
    for record in records:
        store.put(record)
    return [record.id for record in records]


def kept(store: ResponseStore, ids: list[str]) -> list[bool]:
    found = []
    for each in ids:
        try:
            store.get(each, OWNER)
            found.append(True)
        except ApiError as error:
            assert error.status == 404
            found.append(False)
    return found


def test_the_oldest_makes_room_by_number_and_by_bytes() -> None:
    store = ResponseStore("w0", max_responses=3)
    assert kept(store, fill(store, 5)) == [False, False, True, True, True]
    store = ResponseStore("w0", max_bytes=100)
    assert kept(store, fill(store, 5, 30)) == [False, False, True, True, True] and store.size == 90
    fill(store, 1, 1000)  # more than all of it
    assert len(store) == 0 and store.size == 0


def test_age_ends_it() -> None:
    now = [0.0]
    store = ResponseStore("w0", max_age=10, clock=lambda: now[0])
    [first] = fill(store, 1)
    now[0] = 6.0
    [second] = fill(store, 1)
    assert kept(store, [first, second]) == [True, True]
    now[0] = 11.0
    assert kept(store, [first, second]) == [False, True] and len(store) == 1


def test_deleting_gives_the_bytes_back() -> None:
    store = ResponseStore("w0")
    first, second = fill(store, 2)
    store.delete(first, OWNER)
    assert kept(store, [first, second]) == [False, True] and store.size == 10
    with pytest.raises(ApiError, match="not here"):
        store.delete(first, OWNER)


def test_an_id_cannot_be_guessed_and_names_its_process() -> None:
    first, second = ResponseStore("w3").new_id(), ResponseStore("w3").new_id()
    assert first != second and first.startswith("resp_w3_") and len(first) == 40
    with pytest.raises(ApiError, match="was made by the API process w3, and this one is w0") as caught:
        ResponseStore("w0").get(first, OWNER)
    assert caught.value.status == 404 and "--api-workers 1" in caught.value.message


async def test_a_stored_response_can_be_fetched_listed_and_deleted() -> None:
    async with client(backend()) as http:
        given = [{"role": "user", "content": f"{number}?"} for number in range(5)]
        first = await create(http, input=given)
        path = f"{PATH}/{first['id']}"
        assert (await http.get(path)).json() == first
        assert (await http.get(path, params={"include[]": "message.output_text.logprobs"})).json() == first
        second = await create(http, input="6?", previous_response_id=first["id"])
        texts = await list_texts(http, second["id"], order="asc")
        assert texts == ["0?", "1?", "2?", "3?", "4?", first["output"][0]["content"][0]["text"], "6?"]
        assert await list_texts(http, second["id"], limit=3) == texts[::-1]  # the newest first
        assert (await http.delete(path)).json() == {"id": first["id"], "object": "response", "deleted": True}
        assert "deleted" in (await fail(http, "GET", path, 404))["message"]
        assert await list_texts(http, second["id"], order="asc") == texts


async def list_texts(http: httpx.AsyncClient, response_id: str, **query: Any) -> list[str]:
    """All pages."""
    texts: list[str] = []
    while True:
        page = (await http.get(f"{PATH}/{response_id}/input_items", params=query)).json()
        assert page["object"] == "list" and page["data"][0]["id"] == page["first_id"]
        texts += [item["content"][0]["text"] for item in page["data"]]
        if not page["has_more"]:
            return texts
        query["after"] = page["last_id"]


async def test_what_is_not_to_be_stored_is_not() -> None:
    async with client(backend()) as http:
        for stream in (False, True):
            made = await create(http, store=False, stream=stream)
            answer = made[-1]["response"] if stream else made
            error = await fail(http, "GET", f"{PATH}/{answer['id']}", 404)
            assert "store=false" in error["message"] and error["code"] == "response_not_found"


async def test_a_query_is_checked() -> None:
    async with client(backend()) as http:
        path = f"{PATH}/{(await create(http))['id']}"
        for query, word in (
            ({"streem": "1"}, "'stream'"),
            ({"stream": "true"}, "background"),
            ({"stream": "perhaps"}, "stream"),
            ({"starting_after": "3"}, "stream"),
            ({"stream": "true", "starting_after": "-3"}, "starting_after"),
        ):
            assert word in (await fail(http, "GET", path, params=query))["message"]
        for query in ({"limit": "0"}, {"limit": "101"}, {"limit": "9" * 5000}, {"order": "up"}, {"after": "msg_1"}):
            [name] = query
            error = await fail(http, "GET", path + "/input_items", params=query)
            assert error["param"] == name
        for method, tail in (("GET", ""), ("DELETE", ""), ("POST", "/cancel"), ("GET", "/input_items")):
            await fail(http, method, f"{PATH}/resp_none{tail}", 404)


async def test_a_conversation_has_no_end_but_a_limit() -> None:
    async with client(backend(max_model_len=2048), max_body_bytes=2000) as http:
        answer = await create(http, input="a" * 600)
        answer = await create(http, input="a" * 600, previous_response_id=answer["id"])
        body = {"input": "a" * 600, "previous_response_id": answer["id"]}
        error = await fail(http, "POST", PATH, json=body)
        assert "begin a new one" in error["message"] and error["param"] == "previous_response_id"
