"""A chat template that gives nothing is refused in a sentence on every route (attack A12)."""

from collections.abc import Iterator
from typing import Any

import pytest

from quintet import LLM
from tests.server.http.serving import chat, client

NOTHING = "{# nothing #}"
MESSAGES = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    made = LLM("bundled", device="null", load_format="dummy")
    yield made
    made.close()


@pytest.mark.parametrize("more", [{}, {"tools": []}])
@pytest.mark.parametrize("template", [NOTHING, "{{ '' }}"])
def test_chat_refuses_an_empty_prompt(llm: LLM, template: str, more: dict[str, Any]) -> None:
    for messages in (MESSAGES, [MESSAGES, MESSAGES]):
        with pytest.raises(ValueError, match="empty"):
            llm.chat(messages, chat_template=template, use_tqdm=False, **more)
    with pytest.raises(ValueError, match="empty"):
        list(llm.stream_chat(MESSAGES, chat_template=template, **more))
    with pytest.raises(ValueError, match="empty"):
        llm.generate([{"prompt_token_ids": []}], use_tqdm=False)


async def test_the_server_refuses_it_with_400() -> None:
    async with client(trust_request_chat_template=True) as http:
        answer = await http.post("/v1/chat/completions", json=chat(chat_template=NOTHING))
        assert answer.status_code == 400 and "empty" in answer.json()["error"]["message"]
