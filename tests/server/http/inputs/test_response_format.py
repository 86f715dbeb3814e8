"""Answers with a shape over HTTP: the bundled model, a server as users start it, and the clients that they have."""

import json
import re
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Any

import anthropic
import httpx
import openai
import pytest
from pydantic import BaseModel, Field

from tests.helpers.servers.serving import PATIENCE, Server

pytest.importorskip("llguidance", reason="structured_outputs are an extra: pip install 'quintet-llm[structured]'")
jsonschema = pytest.importorskip("jsonschema")

ASK: list[Any] = [{"role": "user", "content": "Tell me of a pet, as JSON."}]
PET = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "legs": {"type": "integer", "minimum": 0, "maximum": 8},
    },
    "required": ["name", "legs"],
    "additionalProperties": False,
}
FOREVER = {"allOf": [{"type": "string", "pattern": f"(.*a){{{count}}}"} for count in range(2, 30)]}
LONG = ["x" * 99 + str(number) for number in range(20_000)]


class Pet(BaseModel):
    name: Annotated[str, Field(max_length=12)]
    legs: int


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server("--device", "cpu", "--max-model-len", "512", "--num-pages", "200") as made:
        yield made
        made.stop(signal.SIGTERM)
        assert made.leftovers() == []  # nor those that try grammars


@pytest.fixture
def ai(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE) as made:
        yield made


@pytest.fixture
def claude(server: Server) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=PATIENCE) as made:
        yield made


def chat(server: Server, **fields: Any) -> httpx.Response:
    body = {"messages": ASK, "max_tokens": 200, "temperature": 1.5, **fields}
    return httpx.post(server.url + "/v1/chat/completions", json=body, timeout=PATIENCE)


def said(answer: httpx.Response) -> str:
    assert answer.status_code == 200, answer.text
    text = answer.json()["choices"][0]["message"]["content"]
    assert isinstance(text, str)
    return text


def refused(answer: httpx.Response) -> tuple[str, str]:
    """(field, message) of a 400."""
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    return error["param"], error["message"]


def test_the_clients_own_parse_gives_an_object(ai: openai.OpenAI) -> None:
    done = ai.chat.completions.parse(
        model=ai.models.list().data[0].id, messages=ASK, response_format=Pet, temperature=0
    )
    assert isinstance(done.choices[0].message.parsed, Pet)


@pytest.mark.parametrize("seed", range(3))
def test_a_chat_follows_its_schema_streamed_or_not(server: Server, seed: int) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "pet", "schema": PET, "strict": True}}
    whole = said(chat(server, response_format=form, seed=seed))
    jsonschema.validate(json.loads(whole), PET)
    streamed = chat(server, response_format=form, seed=seed, stream=True).text
    chunks = [json.loads(line[6:]) for line in streamed.splitlines() if line.startswith("data: {")]
    assert "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks) == whole


def test_any_object(server: Server) -> None:
    answer = chat(server, response_format={"type": "json_object"}, temperature=0, max_tokens=400)
    if answer.json()["choices"][0]["finish_reason"] == "stop":
        assert isinstance(json.loads(said(answer)), dict)
    else:
        assert said(answer).lstrip().startswith("{")


@pytest.mark.parametrize(
    ("wanted", "pattern"),
    [
        ({"regex": "[0-9]{3}-[a-f]{2}"}, "[0-9]{3}-[a-f]{2}"),
        ({"choice": ["yes", "no"]}, "yes|no"),
        ({"grammar": 'start: "a" NUMBER\nNUMBER: /[0-9]{2}/'}, "a[0-9]{2}"),
        ({"grammar": 'root ::= "b" [0-9] [0-9]'}, "b[0-9]{2}"),
    ],
)
def test_vllms_field_is_taken_on_both_routes(server: Server, wanted: dict[str, Any], pattern: str) -> None:
    assert re.fullmatch(pattern, said(chat(server, structured_outputs=wanted)))
    plain = server.complete(structured_outputs=wanted, max_tokens=50, n=3, temperature=1)
    assert [bool(re.fullmatch(pattern, each["text"])) for each in plain.json()["choices"]] == [True] * 3


def test_a_structural_tag(server: Server) -> None:
    content = {"type": "json_schema", "json_schema": PET}
    tag = {"type": "structural_tag", "format": {"type": "tag", "begin": "<pet>", "content": content, "end": "</pet>"}}
    found = re.fullmatch("<pet>(.*)</pet>", said(chat(server, response_format=tag)), re.DOTALL)
    assert found is not None
    jsonschema.validate(json.loads(found[1]), PET)


def test_a_response_follows_its_schema_and_says_which(ai: openai.OpenAI) -> None:
    model = ai.models.list().data[0].id
    parsed = ai.responses.parse(model=model, input="A pet.", text_format=Pet, temperature=0, max_output_tokens=200)
    assert isinstance(parsed.output_parsed, Pet)
    assert parsed.text is not None and parsed.text.format is not None and parsed.text.format.type == "json_schema"


def test_a_message_follows_its_schema(claude: anthropic.Anthropic) -> None:
    asked: Any = {"format": {"type": "json_schema", "schema": PET}}
    answer = claude.messages.create(model="bundled", messages=ASK, max_tokens=200, output_config=asked)
    assert answer.content[0].type == "text"
    jsonschema.validate(json.loads(answer.content[0].text), PET)


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"response_format": {"type": "xml"}}, "response_format.type", "xml"),
    ({"response_format": {"type": "json_schema"}}, "response_format.schema", "must be a JSON schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": 3}}},
     "response_format.json_schema.schema", "not a number"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"properties": {"a": {"not": {}}}}}}},
     "response_format", "#/properties/a, keyword 'not'"),
    ({"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
     "response_format", "leave one"),
    ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs", "exactly one"),
    ({"structured_outputs": {"regx": "a"}}, "structured_outputs", "regex"),
    ({"structured_outputs": {"regex": "("}}, "structured_outputs", "unclosed group"),
    ({"structured_outputs": {"json": FOREVER}}, "structured_outputs", "compile"),
    ({"structured_outputs": {"json": {"enum": LONG}}}, "structured_outputs", "characters"),
    ({"guided_json": {}}, "guided_json", "json in structured_outputs"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "blamed", "why"), REFUSED)
def test_what_cannot_be_served_is_refused_by_name(
    server: Server, fields: dict[str, Any], blamed: str, why: str
) -> None:
    param, message = refused(chat(server, **fields))
    assert param == blamed and why in message and "\n" not in message
    assert said(chat(server, structured_outputs={"regex": "[ab]{3}"})) in {
        a + b + c for a in "ab" for b in "ab" for c in "ab"
    }


HOSTILE: list[dict[str, Any]] = [
    *({"json": {**FOREVER, "title": str(number)}} for number in range(6)),
    {"regex": "(a?){500}a{500}"},
    {"regex": "((((a{1,100}){1,100}){1,100}){1,100})"},
    {"regex": "(.*a){20}.{200}"},
    {"json": {"enum": list(range(100_000))}},
    {"json": {"$ref": "#"}},
    {"json": {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}},
    {"json": {"type": "object", "properties": {f"p{each}": {"type": "integer"} for each in range(5000)}}},
    {"json": {"type": "array", "items": False, "minItems": 1}},
    {"grammar": "start: start"},
    {"grammar": 'start: s\ns: s s s | s s | "a" | ""'},
    {"json": {"type": "string", "minLength": 10**9}},
    {"choice": [str(each) for each in range(60_000)]},
]


@pytest.mark.slow
def test_hostile_shapes_beside_streams_change_none_of_them(server: Server) -> None:
    """Each ends in time: refused, failed by itself, or with max_tokens. Streams beside say what they say alone."""
    plain = {"max_tokens": 120, "temperature": 1.0, "seed": 5, "ignore_eos": True}
    alone = server.complete(**plain).json()["choices"][0]["text"]
    with ThreadPoolExecutor(len(HOSTILE) + 4) as threads:
        hostile = [threads.submit(chat, server, structured_outputs=each, max_tokens=20) for each in HOSTILE]
        beside = []
        while not all(each.done() for each in hostile):
            wave = [threads.submit(server.complete, **plain) for _ in range(4)]
            beside += [each.result().json()["choices"][0]["text"] for each in wave]
            assert httpx.get(server.url + "/health", timeout=PATIENCE).status_code == 200
    assert {each.result().status_code for each in hostile} <= {200, 400, 500}
    for each in hostile:
        if each.result().status_code == 500:
            assert "structured_outputs" in each.result().json()["error"]["message"]
    assert set(beside) == {alone}
    assert said(chat(server, structured_outputs={"regex": "[ab]{3}"}))
