"""Items that a request names instead of giving them: those of responses that are stored, and of the same key alone."""

import asyncio
from typing import Any

import openai
import pytest

from tests.server.fakes import MODEL
from tests.server.http.responses.responses_requests import PATH, SAY, backend, create, fail
from tests.server.http.serving import client, serving


def ref(item_id: str) -> dict[str, Any]:
    return {"type": "item_reference", "id": item_id}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


async def items_of(http: Any, response_id: str) -> list[dict[str, Any]]:
    answer = await http.get(f"{PATH}/{response_id}/input_items", params={"order": "asc"})
    return list(answer.json()["data"])


async def test_a_referenced_conversation_is_the_conversation() -> None:
    fake = backend()
    async with client(fake) as http:
        first = await create(http, input="One?")
        [asked] = await items_of(http, first["id"])
        said = first["output"][0]
        second = await create(http, input=[ref(asked["id"]), {"id": said["id"]}, user("Two?")])
        given = await create(http, input=[user("One?"), {"role": "assistant", "content": SAY}, user("Two?")])
        prompts = [each.prompt.token_ids for each in fake.submitted]
        assert prompts[1] == prompts[2] and second["output"][0]["content"] == given["output"][0]["content"]
        listed = await items_of(http, second["id"])
        assert [item["id"] for item in listed[:2]] == [asked["id"], said["id"]]
        assert listed[1]["content"][0]["text"] == SAY
        third = await create(http, input=[ref(listed[2]["id"]), ref(asked["id"])], previous_response_id=first["id"])
        assert [item["id"] for item in await items_of(http, third["id"])] == [
            asked["id"], said["id"], listed[2]["id"], asked["id"],
        ]  # fmt: skip


@pytest.mark.parametrize(
    ("item", "param", "said"),
    [
        (ref("msg_none"), "input[1]", "not here"),
        ({"type": "item_reference"}, "input[1]", "id"),
        ({"type": "item_reference", "id": 5}, "input[1].id", "text"),
        ({"type": "item_reference", "id": "a", "role": "user"}, "input[1]", "'role'"),
        ({"type": None, "id": "msg_none"}, "input[1]", "not here"),
    ],
)
async def test_what_is_no_item(item: dict[str, Any], param: str, said: str) -> None:
    async with client(backend(), strict_requests=True) as http:
        status = 404 if said == "not here" else 400
        error = await fail(http, "POST", PATH, status, json={"input": [user("Hi"), item]})
    assert error["param"] == param and said in error["message"]
    assert status == 400 or error["code"] == "item_not_found"


async def test_an_item_goes_with_its_response() -> None:
    async with client(backend()) as http:
        first = await create(http, input="One?")
        kept = await create(http, input="Two?", previous_response_id=first["id"])
        unkept = await create(http, input="Three?", store=False)
        said = [each["output"][0]["id"] for each in (first, kept, unkept)]
        assert (await http.delete(f"{PATH}/{first['id']}")).status_code == 200
        for gone in (said[0], said[2]):
            error = await fail(http, "POST", PATH, 404, json={"input": [ref(gone)]})
            assert gone in error["message"]
        await create(http, input=[ref(said[1]), user("And?")])


async def test_no_other_key_finds_it() -> None:
    async with client(backend(), api_key=("one", "two")) as http:
        mine, other = ({"Authorization": f"Bearer {key}"} for key in ("one", "two"))
        first = (await http.post(PATH, json={"input": "Hi"}, headers=mine)).json()
        body = {"input": [ref(first["output"][0]["id"]), user("And?")]}
        assert (await http.post(PATH, json=body, headers=mine)).status_code == 200
        refused = await http.post(PATH, json=body, headers=other)
        assert refused.status_code == 404 and refused.json()["error"]["code"] == "item_not_found"


async def test_an_answer_that_is_still_made_is_none_yet() -> None:
    fake = backend(hang=2)
    async with client(fake) as http:
        begun = await create(http, input="Hi", background=True)
        [asked] = await items_of(http, begun["id"])
        error = await fail(http, "POST", PATH, 404, json={"input": [ref(asked["id"])]})
        assert "in progress" in error["message"]
        while not fake.hanging:
            await asyncio.sleep(0)
        said = (await http.get(f"{PATH}/{begun['id']}")).json()["output"][0]["id"]
        error = await fail(http, "POST", PATH, 404, json={"input": [ref(said)]})
        assert "in progress" in error["message"]
        await http.post(f"{PATH}/{begun['id']}/cancel")


async def test_references_cannot_grow_past_a_body() -> None:
    """One name of 40 bytes stands for a long item, again and again."""
    async with client(backend(max_model_len=4096), max_body_bytes=20_000) as http:
        first = await create(http, input="word " * 2000, max_output_tokens=1)
        [asked] = await items_of(http, first["id"])
        error = await fail(http, "POST", PATH, 400, json={"input": [ref(asked["id"])] * 100})
        assert error["param"] == "input[1]" and "20000" in error["message"]


def test_the_openai_client_names_items() -> None:
    with serving(backend()) as live:
        with openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0) as ai:
            first = ai.responses.create(model=MODEL, input="Hi")
            again = ai.responses.create(
                model=MODEL,
                input=[{"type": "item_reference", "id": first.output[0].id or ""}, {"role": "user", "content": "And?"}],
            )
            assert again.output_text == SAY
            with pytest.raises(openai.NotFoundError, match="msg_x"):
                ai.responses.create(model=MODEL, input=[{"type": "item_reference", "id": "msg_x"}])
