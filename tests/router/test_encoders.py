"""Media of chats that servers of --encode encode ahead; what happens where none does."""

import json

import pytest

from quintet.router import encoders
from quintet.router.encoders import MAX_MEDIA, encode_bodies
from tests.router.fakes import Call, Fake, routed

IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
SOUND = {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}
CHAT = {
    "model": "m", "max_tokens": 9, "temperature": 0.5, "mm_processor_kwargs": {"size": 3},
    "messages": [
        {"role": "system", "content": "Look."},
        {"role": "user", "content": [{"type": "text", "text": "What?"}, IMAGE, SOUND]},
        {"role": "assistant", "content": None},
        {"role": "user", "content": [IMAGE]},
    ],
}  # fmt: skip


def test_a_body_for_each_medium() -> None:
    found = [json.loads(each) for each in encode_bodies(json.dumps(CHAT).encode())]
    assert found == [
        {"model": "m", "mm_processor_kwargs": {"size": 3}, "messages": [{"role": "user", "content": [part]}],
         "max_tokens": 1, "stream": False} for part in (IMAGE, SOUND, IMAGE)
    ]  # fmt: skip


@pytest.mark.parametrize(
    "body", [b"", b"[]", b'{"messages": 3}', b'{"messages": [{"content": [3]}]}', b'{"messages": []}', b"[" * 9999]
)
def test_a_body_that_is_no_chat_is_left_to_servers(body: bytes) -> None:
    assert list(encode_bodies(body)) == []


async def test_media_are_encoded_before_the_chat_is_answered() -> None:
    order: list[str] = []

    def noting(name: str) -> Fake:
        async def note(call: Call) -> None:
            order.append(name)
            await call.say({"by": name})

        return Fake(name, behave=note)

    encoder, answering = noting("e"), noting("a")
    async with routed(encoder, answering, backend=[answering], encode=[encoder]) as router:
        assert (await router.post(json=CHAT)).json() == {"by": "a"}
        assert order == ["e", "e", "e", "a"] and answering.calls[0].json == CHAT
        assert (await router.post(json={"model": "m", "messages": [{"role": "user", "content": "Hi"}]})).json()
        assert (await router.post("/v1/completions", json={"model": "m", "prompt": "Hi"})).json() == {"by": "a"}
        assert order == ["e", "e", "e", "a", "a", "a"]


def test_a_chat_of_very_many_media_is_left_to_servers() -> None:
    def chat(count: int) -> bytes:
        return json.dumps({"messages": [{"role": "user", "content": [IMAGE] * count}]}).encode()

    assert len(list(encode_bodies(chat(MAX_MEDIA)))) == MAX_MEDIA and not list(encode_bodies(chat(MAX_MEDIA + 1)))


async def test_encoders_that_never_answer_are_not_waited_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoders, "_PATIENCE", 0.1)

    async def silent(call: Call) -> None:
        await call.gone.wait()

    encoder, answering = Fake("e", behave=silent), Fake("a")
    async with routed(encoder, answering, backend=[answering], encode=[encoder]) as router:
        assert (await router.post(json=CHAT)).json() == {"by": "a"}


@pytest.mark.parametrize("status", [400, 429, 503])
async def test_the_chat_is_answered_where_no_medium_is_encoded(status: int) -> None:
    async def refuses(call: Call) -> None:
        await call.say({"error": {"message": "no"}}, status)

    encoder, answering = Fake("e", behave=refuses), Fake("a")
    async with routed(encoder, answering, backend=[answering], encode=[encoder]) as router:
        assert (await router.post(json=CHAT)).json() == {"by": "a"}
        assert len(encoder.calls) == 3


async def test_another_encoder_takes_over_and_a_lost_one_costs_nothing() -> None:
    async def cut(call: Call) -> None:
        call.cut()

    first, second, answering = Fake("e", behave=cut), Fake("f", behave=cut), Fake("a")
    async with routed(first, second, answering, backend=[answering], encode=[first, second]) as router:
        assert (await router.post(json=CHAT)).json() == {"by": "a"}
        assert len(first.calls) + len(second.calls) > 3
