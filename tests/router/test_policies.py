"""Who gets a request, by policy; beginnings are found by the text as it is sent."""

import json
from collections import Counter
from typing import Any

import pytest

from quintet.clients.http_client import HttpClient
from quintet.router.backends import MAX_KNOWN_CHUNKS, Pool, RouterBackend, address_of
from quintet.router.policies import make_policy
from quintet.router.request_info import CHUNK, ENDS, RequestInfo, read_body
from quintet.router.routes import POSTS
from quintet.server.http.errors import ApiError


def servers(count: int = 3) -> list[RouterBackend]:
    urls = [f"http://10.0.0.{number}:8000" for number in range(1, count + 1)]
    return [RouterBackend(url, Pool.ALL, HttpClient(address_of(url)), up=True) for url in urls]


def ask(session: str = "", **fields: Any) -> RequestInfo:
    body = json.dumps({"model": "m", **fields}).encode()
    made = RequestInfo(b"POST", b"/", [], body, POSTS["/v1/chat/completions"], "id", read_body(body))
    made.session = session
    return made


def talk(*texts: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": each} for each in texts]


def test_turns_are_taken() -> None:
    there, policy = servers(), make_policy("round_robin", 4)
    assert [policy(there, ask()) for _ in range(6)] == there * 2


def test_the_least_loaded_and_of_two_the_one_with_less() -> None:
    there = servers()
    for number, each in enumerate(there):
        each.in_flight = number
    assert make_policy("least_loaded", 4)(there, ask()) is there[0]
    chosen = Counter(make_policy("power_of_two", 4)(there, ask()).url for _ in range(200))
    assert there[2].url not in chosen and chosen[there[0].url] > chosen[there[1].url]


def test_anyone_may_get_it() -> None:
    there = servers()
    assert {make_policy("random", 4)(there, ask()).url for _ in range(200)} == {each.url for each in there}


@pytest.mark.parametrize("fields", [
    lambda *texts: {"messages": talk(*texts)}, lambda *texts: {"prompt": "\n".join(texts)},
    lambda *texts: {"input": "\n".join(texts)}, lambda *texts: {"system": texts[0], "messages": talk(*texts[1:])},
])  # fmt: skip
def test_a_beginning_that_is_known_goes_where_it_is_known(fields: Any) -> None:
    there, policy = servers(), make_policy("prefix", 4)
    long = {name: name * CHUNK * 3 for name in "abc"}
    first = {name: policy(there, ask(**fields(text, "x"))) for name, text in long.items()}
    for name, text in long.items():
        first[name].in_flight += 1
        for question in ("x", "y" * 999):
            assert policy(there, ask(**fields(text, question))) is first[name]


def test_what_is_before_a_text_counts() -> None:
    """The same question behind other tools, or for another model, is another beginning."""
    messages = talk("a" * 4 * CHUNK)
    plain = ask(messages=messages).prefix_hashes()
    assert len(plain) == 4 and ask(messages=messages).prefix_hashes() == plain
    assert not set(plain) & set(ask(messages=messages, tools=[{"type": "function"}]).prefix_hashes())
    assert not set(plain) & set(ask(messages=messages, model="n").prefix_hashes())
    assert len(ask(prompt="a" * (ENDS[-1] + 999)).prefix_hashes()) == len(ENDS)
    assert ask(prompt="short").prefix_hashes() == []
    instructed = ask(instructions="a" * CHUNK, prompt="b" * 3 * CHUNK).prefix_hashes()
    assert len(instructed) == 4 and instructed[0] == ask(instructions="a" * CHUNK).prefix_hashes()[0]


def test_chunks_have_256_bytes_up_to_4_kib_and_1_kib_up_to_128_kib() -> None:
    sizes = [end - start for start, end in zip((0, *ENDS), ENDS, strict=False)]
    assert sizes == [CHUNK] * 16 + [1024] * 124


def test_a_known_beginning_does_not_outweigh_everything() -> None:
    there, policy = servers(2), make_policy("prefix", 4)
    text = {"prompt": "a" * 9 * CHUNK}
    first = policy(there, ask(**text))
    other = next(each for each in there if each is not first)
    first.in_flight = 4
    assert policy(there, ask(**text)) is first
    first.in_flight = 5
    assert policy(there, ask(**text)) is other
    there, policy = servers(2), make_policy("prefix", 4)
    there[0].prefixes.add(ask(**text).prefix_hashes())
    there[0].in_flight, there[1].in_flight = 50, 40
    assert policy(there, ask(**text)) is there[0], "a quarter more counts as little at such a load"


def test_memory_is_bounded() -> None:
    there, policy = servers(1), make_policy("prefix", 4)
    for number in range(MAX_KNOWN_CHUNKS // len(ENDS) + 9):
        policy(there, ask(prompt=f"{number:09}" + "a" * ENDS[-1]))
    assert len(there[0].prefixes) == MAX_KNOWN_CHUNKS


def test_a_session_stays_and_others_do_not_move_when_servers_come_and_go() -> None:
    there, policy = servers(5), make_policy("session", 4)
    names = [f"user-{number}" for number in range(400)]
    before = {name: policy(there, ask(name)) for name in names}
    assert all(policy(there, ask(name)) is where for name, where in before.items())
    assert min(Counter(each.url for each in before.values()).values()) > 40
    left = there[1:]
    after = {name: policy(left, ask(name)) for name in names}
    assert all(after[name] is where for name, where in before.items() if where is not there[0])
    there[0].in_flight = 9
    gone = [name for name, where in before.items() if where is there[0]]
    assert all(policy(there, ask(name)) is after[name] for name in gone), "a full one is passed by"
    assert policy(there, ask("")) in left


def test_bodies_that_are_none_are_refused() -> None:
    for body in (b"", b"{", b"[]", b'{"model": 1}', b'{"a": \xff}', b"[" * 10**5, b'{"x":' + b"[" * 10**5):
        with pytest.raises(ApiError) as refused:
            read_body(body)
        assert refused.value.status == 400
