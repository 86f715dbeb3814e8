"""Servers of several makes, as their answers look: how outputs and prompts are scored, and what is refused."""

from collections.abc import Mapping
from typing import Any

import pytest

from quintet.clients.errors import ServerError
from quintet.verification.scores import SequenceScores
from quintet.verification.server_scores import NotComparable, ServerScores
from tests.server.fakes import bundled_tokenizer

OUTPUT = tuple(bundled_tokenizer().encode(" the dog", add_special_tokens=False))[:2]  # tokens of each fake server
LOGPROBS = (-0.25, -0.75)


class FakeServer:
    """A server of one make: `takes` are the fields that it knows beside the usual ones."""

    model = "m"

    def __init__(self, make: str, takes: tuple[str, ...] = ()) -> None:
        self.make, self.takes = make, takes
        self.asked: list[Mapping[str, Any]] = []

    def ask(self, method: str, path: str, fields: Mapping[str, Any]) -> dict[str, Any]:
        assert (method, path, fields["model"]) == ("POST", "/v1/completions", "m")
        self.asked.append(fields)
        usual = {"model", "prompt", "max_tokens", "temperature", "n", "logprobs"}
        if unknown := fields.keys() - usual - set(self.takes):
            raise ServerError("HTTP 400", f"unknown field {min(unknown)}", 400)
        if fields["max_tokens"] == 0 and "no zero" in self.takes:
            raise ServerError("HTTP 400", "max_tokens is at least 1", 400)
        return {"choices": [getattr(self, self.make)(fields)]}

    def openai(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        prompt = list(fields["prompt"])
        tokens, values = list(OUTPUT), list[float | None](LOGPROBS)
        if fields.get("echo"):
            tokens = prompt + tokens * bool(fields["max_tokens"])
            values = [None, *(-each / 10 for each in prompt[1:])] + values * bool(fields["max_tokens"])
        text = bundled_tokenizer().decode(tokens)
        names = [f"token_id:{each}" for each in tokens] if fields.get("return_tokens_as_token_ids") else [text]
        choice: dict[str, Any] = {"text": text, "logprobs": {"tokens": names, "token_logprobs": values}}
        if fields.get("return_token_ids"):
            choice["token_ids"] = tokens
        if "prompt_logprobs" in fields:
            scored = [None, *({str(each): {"logprob": -each / 10}, "0": {"logprob": -9}} for each in prompt[1:])]
            choice["prompt_logprobs"] = scored
        return choice

    def llama_cpp(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        content = [{"id": each, "logprob": value} for each, value in zip(OUTPUT, LOGPROBS, strict=True)]
        return {"text": "x", "logprobs": {"content": content}}

    def silent(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        return {"text": "x", "logprobs": None}


def scores(make: str, *takes: str) -> tuple[ServerScores, FakeServer]:
    server = FakeServer(make, takes)
    return ServerScores(server, bundled_tokenizer(), 2), server  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("make", "takes"),
    [
        ("openai", ("return_token_ids", "ignore_eos")),
        ("openai", ("return_tokens_as_token_ids", "ignore_eos")),
        ("openai", ()),
        ("llama_cpp", ()),
    ],
)
def test_outputs_have_token_ids_however_the_server_names_them(make: str, takes: tuple[str, ...]) -> None:
    made, server = scores(make, *takes)
    for found in (made.alone([[1, 2], [3]]), made.batched([[1, 2], [3]])):
        assert [list(each.ids) for each in found] == [[1, 2, *OUTPUT], [3, *OUTPUT]]
        assert [list(each.logprobs) for each in found] == [[None, None, *LOGPROBS], [None, *LOGPROBS]]
    settled = [set(each) for each in server.asked[-3:]]
    assert settled[0] == settled[1] == settled[2], "the way that the server took is asked again"


@pytest.mark.parametrize("takes", [("prompt_logprobs",), ("echo",), ("echo", "no zero")])
def test_prompts_are_scored_by_prompt_logprobs_or_by_echo(takes: tuple[str, ...]) -> None:
    made, _ = scores("openai", *takes)
    found = made.given([SequenceScores([1, 2, 3], 1, []), SequenceScores([4, 5], 1, [])])
    assert [list(each.logprobs) for each in found] == [[None, -0.2, -0.3], [None, -0.5]]


def test_a_server_without_logprobs_is_named_as_such() -> None:
    made, _ = scores("silent")
    with pytest.raises(NotComparable, match="gives no log-probabilities of these tokens: .*unknown field"):
        made.alone([[1]])
    made, _ = scores("openai")
    with pytest.raises(NotComparable, match="gives no log-probabilities"):
        made.given([SequenceScores([1, 2], 1, [])])


def test_what_is_no_refusal_is_raised() -> None:
    made, server = scores("openai")

    def broken(*_: Any) -> dict[str, Any]:
        raise ServerError("HTTP 401", "wants another API key", 401)

    server.ask = broken  # type: ignore[method-assign]
    with pytest.raises(ServerError, match="API key"):
        made.alone([[1]])
