"""Both APIs over a real engine: `quintet serve` with the bundled model, and the clients that people have."""

from collections.abc import Iterator

import anthropic
import openai
import pytest

from tests.helpers.servers.serving import Server

ASKED = "What is the capital of France?"


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server("--no-access-log") as made:
        yield made


def test_responses_remember_and_find_their_beginning_in_the_cache(server: Server) -> None:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
        first = client.responses.create(model="bundled", input=ASKED)
        assert "Paris" in first.output_text and first.usage is not None
        second = client.responses.create(model="bundled", input="And of Italy?", previous_response_id=first.id)
        assert "Rome" in second.output_text and second.usage is not None
        assert second.usage.input_tokens_details.cached_tokens >= first.usage.input_tokens // 16 * 16
        with client.responses.create(model="bundled", input=ASKED, background=True, stream=True) as events:
            [*_, last] = events
        assert last.type == "response.completed" and last.response.output_text == first.output_text


def test_messages_go_on_with_what_was_begun(server: Server) -> None:
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        whole = client.messages.create(model="bundled", max_tokens=50, messages=[{"role": "user", "content": ASKED}])
        [block] = whole.content
        assert block.type == "text" and whole.stop_reason == "end_turn"
        begun = block.text[: block.text.index(" Paris")]
        with client.messages.stream(
            model="bundled",
            max_tokens=50,
            messages=[{"role": "user", "content": ASKED}, {"role": "assistant", "content": begun}],
        ) as stream:
            assert begun + "".join(stream.text_stream) == block.text
