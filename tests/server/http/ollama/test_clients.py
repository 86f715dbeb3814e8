"""Ollama's own Python client, sync and async, against servers of the bundled models."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.helpers.servers.serving import PATIENCE, Server
from tests.helpers.tools import CITY, WEATHER

ollama = pytest.importorskip("ollama")

ASK = [{"role": "user", "content": "What is the capital of France?"}]
COLD = {"temperature": 0}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    size = ("--max-model-len", "512", "--num-pages", "200")
    with Server("bundled", "--device", "cpu", *size) as made:
        yield made


@pytest.fixture
def client(server: Server) -> Any:
    return ollama.Client(host=server.url, timeout=PATIENCE)


def test_models_are_listed_shown_and_pulled(client: Any) -> None:
    [model] = client.list().models
    assert model.model == "bundled:latest" and model.size > 2**20
    assert client.show(model.model).capabilities == ["completion", "tools", "thinking"]
    assert client.ps().models[0].context_length == 512
    assert client.pull("bundled").status == "success"
    assert [progress.status for progress in client.pull("bundled", stream=True)][-1] == "success"
    with pytest.raises(ollama.ResponseError, match="'llama3.2' is not here") as missing:
        client.pull("llama3.2")
    assert missing.value.status_code == 404


def test_a_chat_is_the_same_whole_and_streamed(client: Any) -> None:
    answer = client.chat("bundled", ASK, options=COLD)
    assert "Paris" in answer.message.content and answer.done_reason == "stop"
    assert answer.eval_duration > 0 and answer.prompt_eval_duration > 0
    assert answer.total_duration >= answer.eval_duration + answer.prompt_eval_duration
    *parts, end = client.chat("bundled:latest", ASK, options=COLD, stream=True)
    assert "".join(part.message.content for part in parts) == answer.message.content
    assert len(parts) > 1 and end.done and end.eval_count == answer.eval_count


def test_a_tool_is_called_and_its_result_read(client: Any) -> None:
    def get_weather(city: str) -> str:
        """Weather of a city.

        Args:
            city: its name
        """
        return f"sunny in {city}"

    messages: list[Any] = [{"role": "user", "content": "What is the weather in Oslo?"}]
    answer = client.chat("bundled", messages, tools=[WEATHER], options=COLD)
    [call] = answer.message.tool_calls
    assert (call.function.name, call.function.arguments) == ("get_weather", {"city": "Oslo"})
    streamed = client.chat("bundled", messages, tools=[WEATHER], options=COLD, stream=True)
    assert [each.function for part in streamed for each in part.message.tool_calls or ()] == [call.function]
    assert client.chat("bundled", messages, tools=[get_weather], options=COLD).message.role == "assistant"
    result = {"role": "tool", "tool_name": "get_weather", "content": get_weather("Oslo")}
    assert client.chat("bundled", [*messages, answer.message, result], options=COLD).message.content


def test_a_thought_is_in_its_field(client: Any) -> None:
    sum_of = [{"role": "user", "content": "What is 12 + 30?"}]
    thinking = client.chat("bundled", sum_of, think=True, options=COLD).message
    assert thinking.thinking and "think>" not in thinking.content
    assert not client.chat("bundled", sum_of, think=False, options=COLD).message.thinking


def test_a_format_holds(client: Any) -> None:
    pytest.importorskip("llguidance", reason="structured_outputs are an extra")
    answer = client.chat("bundled", ASK, format=CITY, options={**COLD, "num_predict": 60})
    assert answer.message.content.lstrip().startswith("{")


def test_a_prompt_is_answered_or_continued(client: Any) -> None:
    assert "Paris" in client.generate("bundled", ASK[0]["content"], options=COLD).response
    raw = client.generate("bundled", "Once upon a time", raw=True, options={**COLD, "num_predict": 8})
    assert raw.response and raw.eval_count == 8 and raw.done_reason == "length"
    parts = client.generate("bundled", "Once upon a time", raw=True, options={**COLD, "num_predict": 8}, stream=True)
    assert "".join(part.response for part in parts) == raw.response
    assert client.generate("bundled").done_reason == "load"
    with pytest.raises(ollama.ResponseError, match="no tokens to fill in with"):
        client.generate("bundled", "def f(", suffix="return x")


async def test_the_async_client_streams(server: Server) -> None:
    client = ollama.AsyncClient(host=server.url, timeout=PATIENCE)
    parts = [part async for part in await client.chat("bundled", ASK, options=COLD, stream=True)]
    assert "Paris" in "".join(part.message.content for part in parts)


def test_models_cannot_be_changed(client: Any) -> None:
    for change in (lambda: client.delete("bundled"), lambda: client.copy("bundled", "b")):
        with pytest.raises(ollama.ResponseError, match="models are chosen when the server starts"):
            change()
    with pytest.raises(ollama.ResponseError, match="this model takes text alone"):
        client.chat("bundled", [{"role": "user", "content": "x", "images": ["aGk="]}])


@pytest.mark.slow
def test_texts_are_embedded() -> None:
    with Server("bundled-embed", "--device", "cpu") as server:
        client = ollama.Client(host=server.url, timeout=PATIENCE)
        answer = client.embed("bundled-embed", ["Oslo is cold.", "Norway has winters.", "I like jazz."])
        first, second, third = answer.embeddings
        product = [sum(a * b for a, b in zip(first, other, strict=True)) for other in (first, second, third)]
        assert product[0] == pytest.approx(1, abs=1e-4) and product[1] > product[2]
        assert len(client.embeddings("bundled-embed", "Oslo is cold.").embedding) == len(first)
        assert client.show("bundled-embed").capabilities == ["embedding"]
