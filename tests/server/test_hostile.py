"""Ten thousand bad requests beside a steady stream: they get clear errors, the stream comes out bit for bit."""

import asyncio
import json
import random
from collections import Counter
from collections.abc import Callable, Iterator

import httpx
import pytest

from tests.helpers.servers.serving import NULL, PATIENCE, Server

COUNT = 10_000
CLIENTS = 8
STEADY = {"prompt": "Once upon a time", "max_tokens": 900, "temperature": 0.9, "seed": 7, "ignore_eos": True}
NAN = float("nan")


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server(*NULL, "--max-model-len", "1024", "--no-access-log", "--strict-requests", "--api-key", "key") as made:
        yield made


def body(**fields: object) -> bytes:
    return json.dumps({"prompt": "a", "max_tokens": 2, **fields}).encode()


def deep(depth: int) -> bytes:
    return b'{"prompt":' + b"[" * depth + b"]" * depth + b"}"


# Each makes one body for /v1/completions that cannot be served.
BAD: list[Callable[[random.Random], bytes]] = [
    lambda r: b"{" * r.randrange(1, 40),
    lambda r: r.randbytes(r.randrange(1, 200)),
    lambda r: b"",
    lambda r: b"null",
    lambda r: b"[]",
    lambda r: b'"text"',
    lambda r: deep(r.choice([3, 100, 5_000, 100_000])),
    lambda r: b'{"prompt": "\xff\xfe broken"}',
    lambda r: b'{"prompt": "\\ud800"}',
    lambda r: body(temperature=r.choice([NAN, float("inf"), -1, "hot", [], 1e300])),
    lambda r: body(top_p=r.choice([NAN, 0, -0.1, 1.1, "x", None, {}]) or "none"),
    lambda r: body(top_k=r.choice([-2, 2**31, 1.5, "x", True, 10**400])),
    lambda r: body(max_tokens=r.choice([-1, 1.5, "x", 2**40, [], 10**400])),
    lambda r: body(n=r.choice([0, -1, 17, 10**9, "x", 1.5])),
    lambda r: body(seed=r.choice(["x", 1.5, 2**64, -(2**63) - 1, []])),
    lambda r: body(stop=r.choice([["x"] * 65, "x" * 1025, [""], 5, [5], {"a": 1}])),
    lambda r: body(logprobs=r.choice([-2, 21, 10**6, "x", 1.5])),
    lambda r: body(logit_bias=r.choice([{"a": 1}, {"-1": 1}, {"5": NAN}, {"5": 101}, {"2048": 1}, [], "x"])),
    lambda r: body(prompt=r.choice([[], [-1], [2048], [2**40], [1.5], [True], [[]], [[1], 5], {}, None, 5])),
    lambda r: body(prompt=[1] * r.choice([1024, 5000, 60_000])),
    lambda r: body(prompt="x " * r.choice([3_000, 100_000])),
    lambda r: body(prompt=["a"] * r.choice([257, 5000])),
    lambda r: body(stop_token_ids=r.choice([[-1], [2048], ["x"], [1.5], 5, [0] * 1025])),
    lambda r: body(allowed_token_ids=r.choice([[], [-1], [2048], "x"])),
    lambda r: body(bad_words=r.choice([[""], ["x" * 2000], ["x"] * 65, 5])),
    lambda r: body(min_tokens=r.choice([-1, 5, 2**40, "x"])),
    lambda r: body(priority=r.choice(["x", 1.5, 2**70, []])),
    lambda r: body(cache_salt=r.choice(["", 5, [], "\ud800"])),
    lambda r: body(stream=r.choice(["maybe", 5, []])),
    lambda r: body(stream_options=r.choice([{"include_usage": "x"}, 5, {"unknown": 1}]), stream=True),
    lambda r: body(model=r.choice(["other", 5, "", "x" * 100_000, "../../etc/passwd"])),
    lambda r: body(**{r.choice(["temprature", "max_token", "__class__", "x" * 10_000]): 1}),
    lambda r: body(suffix="end"),
    lambda r: body(best_of=3),
    lambda r: body(response_format={"type": "yaml"}),
    lambda r: body(echo=r.choice(["x", 5])),
    lambda r: body(presence_penalty=r.choice([3, -3, NAN, "x"])),
    lambda r: body(repetition_penalty=r.choice([0, -1, 1e9, "x"])),
]


class Client:
    """Sends one request after the other over a connection, and makes a new one when that was closed."""

    def __init__(self, url: str) -> None:
        host, port = url.removeprefix("http://").split(":")
        self._where = host, int(port)
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def post(self, path: str, content: bytes) -> tuple[int, bytes]:
        if self._streams is None:
            self._streams = await asyncio.open_connection(*self._where)
        reader, writer = self._streams
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer key\r\nContent-Length: {len(content)}"
        writer.write(f"{head}\r\nContent-Type: application/json\r\nX-Request-Id: same\r\n\r\n".encode() + content)
        await writer.drain()
        lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower().split("\r\n")
        headers = dict(line.split(": ", 1) for line in lines[1:] if line)
        answer = await reader.readexactly(int(headers["content-length"]))
        if headers.get("connection") == "close":
            writer.close()
            self._streams = None
        return int(lines[0].split()[1]), answer

    def close(self) -> None:
        if self._streams is not None:
            self._streams[1].close()


def steady(url: str) -> str:
    """The text of the stream, whole."""
    text = ""
    headers = {"Authorization": "Bearer key"}
    with httpx.stream(
        "POST", url + "/v1/completions", json={**STEADY, "stream": True}, headers=headers, timeout=120
    ) as got:
        for line in got.iter_lines():
            if line.startswith("data: {"):
                chunk = json.loads(line.removeprefix("data: "))
                assert "error" not in chunk, chunk
                text += chunk["choices"][0]["text"]
    return text


async def attack(url: str, seed: int, count: int) -> Counter[int]:
    """Statuses; an answer that is not in OpenAI's shape fails here."""
    statuses: Counter[int] = Counter()
    client, rng = Client(url), random.Random(seed)
    for _ in range(count):
        make = rng.choice(BAD)
        content = make(rng)
        status, answer = await client.post("/v1/completions", content)
        error = json.loads(answer)["error"] if status != 200 else {}
        assert status in (400, 404, 413), (status, content[:200], answer[:300])
        assert set(error) == {"message", "type", "param", "code"} and error["message"], (content[:200], error)
        assert len(answer) < 20_000, (content[:200], answer[:200])
        statuses[status] += 1
    client.close()
    return statuses


async def all_at_once(url: str) -> tuple[list[str], Counter[int]]:
    """The steady stream over and over, as long as the attack lasts."""
    attacks = asyncio.gather(*(attack(url, seed, COUNT // CLIENTS) for seed in range(CLIENTS)))
    texts = []
    while not attacks.done():
        texts.append(await asyncio.to_thread(steady, url))
    return texts, sum(await attacks, Counter())


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_steady_stream_beside_ten_thousand_bad_requests(server: Server) -> None:
    alone = steady(server.url)
    texts, statuses = asyncio.run(all_at_once(server.url))
    assert statuses.total() == COUNT
    assert texts and set(texts) == {alone}
    ready = httpx.get(server.url + "/ready", timeout=PATIENCE)
    assert ready.status_code == 200, ready.text
    log = server.output
    assert "Traceback" not in log, log[log.index("Traceback") - 500 :][:3000]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/messages", "/tokenize", "/detokenize"])
def test_other_routes_refuse_in_the_same_way(server: Server, path: str) -> None:
    async def ask() -> None:
        client, rng = Client(server.url), random.Random(0)
        for make in BAD * 2:
            content = make(rng)
            status, answer = await client.post(path, content)
            assert status in (200, 400, 404, 413), (
                status,
                content[:200],
                answer[:300],
            )  # some of it is text to tokenize
            assert status == 200 or json.loads(answer)["error"]["message"]
        client.close()

    asyncio.run(ask())
