"""Server-sent events come out whole wherever the network cuts them."""

import json

import pytest
from playwright.sync_api import Page

from tests.server.page.fake_server import FakeServer, chunk, ending

pytestmark = pytest.mark.slow

READ = """async (pieces) => {
    const { EventParser } = await import("./page/stream.js");
    const parser = new EventParser();
    return pieces.flatMap((piece, at) => parser.push(piece, at === pieces.length - 1));
}"""


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("data: a\n\ndata: b\n\n", ["a", "b"]),
        ("data: a\r\n\r\ndata: b\r\n\r\n", ["a", "b"]),
        ("data: a\r\rdata:b\r\r", ["a", "b"]),
        ("data: one\ndata: two\n\n", ["one\ntwo"]),
        ("data: one\r\ndata: two\r\n\r\n", ["one\ntwo"]),  # a cut within the line end makes no second one
        (": comment\n\nevent: error\nid: 1\nretry: 5\ndata:  x\n\n", [" x"]),
        ('data\n\ndata: {"a": "b: c"}\n\n', ["", '{"a": "b: c"}']),
        ("data: whole\n\ndata: torn\n", ["whole"]),
    ],
)
def test_any_two_cuts_give_the_same_events(page: Page, server: FakeServer, text: str, expected: list[str]) -> None:
    page.goto(server.url)
    cuts = [(i, j) for i in range(len(text) + 1) for j in range(i, len(text) + 1)]
    pieces = [[text[:i], text[i:j], text[j:]] for i, j in cuts]
    found = page.evaluate(f"async (all) => Promise.all(all.map({READ}))", pieces)
    assert all([event["data"] for event in events] == expected for events in found)


COMPLETE = """async (bytes) => {
    const { complete } = await import("./page/api.js");
    const pieces = bytes.map((byte) => Uint8Array.of(byte));
    const answer = () => new Response(new ReadableStream({
        pull: (stream) => (pieces.length ? stream.enqueue(pieces.shift()) : stream.close()),
    }));
    const others = window.fetch; // the panel asks for figures meanwhile
    window.fetch = async (path, ...rest) => (path === "v1/chat/completions" ? answer() : others(path, ...rest));
    const texts = [];
    for await (const chunk of complete({})) texts.push(chunk.choices[0]?.delta.content);
    return texts;
}"""


def test_an_answer_may_come_byte_by_byte(page: Page, server: FakeServer) -> None:
    words = ["Grüße", " 😀", " é€", " 漢字\r\n"]
    data = b"".join([*(chunk(word) for word in words), ending(4)])
    for word in words[:3]:  # as characters of two, three and four bytes, not as escapes
        data = data.replace(json.dumps(word).encode(), f'"{word}"'.encode())
    assert "😀".encode() in data
    page.goto(server.url)
    assert page.evaluate(COMPLETE, list(data)) == [*words, "", None]
