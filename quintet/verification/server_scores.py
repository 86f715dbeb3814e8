"""Scores of an OpenAI-compatible server, by POST /v1/completions: its outputs, and how likely given tokens are."""

import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from quintet.clients.errors import ServerError
from quintet.clients.remote_engine import RemoteEngine
from quintet.tokenizers.tokenizer import Tokenizer
from quintet.verification.scores import SequenceScores

PATH = "/v1/completions"
AT_ONCE = 16  # requests of a batch
REFUSALS = (400, 404, 405, 422, 500, 501)  # of a field, or of a way to ask
BY_ID = "token_id:"  # vLLM's return_tokens_as_token_ids writes tokens so


class NotComparable(Exception):
    """The reason why a server's answers cannot be compared."""


class ServerScores:
    """Scores of a server. ServerError: it cannot be reached; NotComparable: it lacks what is asked for."""

    def __init__(self, server: RemoteEngine, tokenizer: Tokenizer, max_tokens: int) -> None:
        """`tokenizer`: this engine's; the server's has to be the same. `max_tokens`: length of each output."""
        self._server, self._tokenizer, self._max_tokens = server, tokenizer, max_tokens
        self._extra: Mapping[str, Any] | None = None  # fields by which this server names token ids
        self._way: Mapping[str, Any] | None = None  # fields by which it scores prompts

    def alone(self, prompts: Sequence[Sequence[int]]) -> list[SequenceScores]:
        """Has the server continue each prompt greedily, one after the other."""
        return [self._generate(prompt) for prompt in prompts]

    def batched(self, prompts: Sequence[Sequence[int]]) -> list[SequenceScores]:
        """The same, with all prompts at once."""
        with ThreadPoolExecutor(AT_ONCE) as pool:
            return list(pool.map(self._generate, prompts))

    def given(self, sequences: Sequence[SequenceScores]) -> list[SequenceScores]:
        """Has the server score the tokens of sequences, by prompt_logprobs or by echo."""
        return [self._score(each) for each in sequences]

    def _ask(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        answer = self._server.ask("POST", PATH, {"model": self._server.model, "temperature": 0, "n": 1, **fields})
        found = answer.get("choices")
        if not isinstance(found, list) or not found or not isinstance(found[0], dict):
            raise NotComparable(f"{PATH} answers without choices")
        return found[0]

    def _generate(self, prompt: Sequence[int]) -> SequenceScores:
        fields = {"prompt": list(prompt), "max_tokens": self._max_tokens, "logprobs": 1, "ignore_eos": True}
        plain = {"prompt": list(prompt), "max_tokens": self._max_tokens, "logprobs": 1}
        ways = [{**fields, "return_token_ids": True}, {**fields, "return_tokens_as_token_ids": True}, fields, plain]
        if self._extra is not None:
            choice = self._ask({**plain, **self._extra})
        else:
            way, choice = self._first(ways, _has_logprobs)
            self._extra = {name: value for name, value in way.items() if name not in plain}
        ids, logprobs = self._output(choice)
        return SequenceScores([*prompt, *ids], len(prompt), [*[None] * len(prompt), *logprobs])

    def _first(
        self, ways: Sequence[Mapping[str, Any]], fits: Callable[[dict[str, Any]], bool]
    ) -> tuple[Mapping[str, Any], dict[str, Any]]:
        """Returns the first way to ask that the server takes, and its answer."""
        refusals = []
        for way in ways:
            try:
                choice = self._ask(way)
            except ServerError as error:
                if error.status not in REFUSALS:
                    raise
                refusals.append(str(error))
                continue
            if fits(choice):
                return way, choice
            refusals.append("an answer without log-probabilities")
        raise NotComparable(f"the server gives no log-probabilities of these tokens: {refusals[0]}")

    def _output(self, choice: Mapping[str, Any]) -> tuple[list[int], list[float]]:
        """Returns token ids of an output and their log-probabilities."""
        logprobs = choice.get("logprobs")
        if not isinstance(logprobs, Mapping):
            raise NotComparable("the server's answers have no logprobs")
        if isinstance(logprobs.get("content"), list):  # llama.cpp's
            entries = logprobs["content"]
            ids: Any = [_get(each, "id") for each in entries]
            values: Any = [_get(each, "logprob") for each in entries]
        else:
            values = logprobs.get("token_logprobs")
            ids = choice.get("token_ids") or self._ids(logprobs.get("tokens"), choice.get("text"))
        if not isinstance(values, list) or not isinstance(ids, list) or len(values) != len(ids):
            raise NotComparable("the server's answers have no token ids, and their text makes other tokens here")
        if not all(isinstance(each, int) for each in ids) or not all(map(_is_number, values)):
            raise NotComparable("the server's logprobs have no numbers, or no token ids")
        return ids, [float(value) for value in values]

    def _ids(self, tokens: Any, text: Any) -> list[int] | None:
        """Returns token ids of an answer without any: of their names, or of the text."""
        if isinstance(tokens, list) and all(isinstance(each, str) and each.startswith(BY_ID) for each in tokens):
            try:
                return [int(each.removeprefix(BY_ID)) for each in tokens]
            except ValueError:
                return None
        return self._tokenizer.encode(text, add_special_tokens=False) if isinstance(text, str) else None

    def _score(self, given: SequenceScores) -> SequenceScores:
        prompt = {"prompt": list(given.ids)}
        ways: list[dict[str, Any]] = [
            {"max_tokens": 1, "prompt_logprobs": 0},
            {"max_tokens": 0, "echo": True, "logprobs": 1},
            {"max_tokens": 1, "echo": True, "logprobs": 1},
        ]
        if self._way is not None:
            choice = self._ask({**prompt, **self._way})
        else:
            way, choice = self._first([{**prompt, **way} for way in ways], lambda found: bool(_of_prompt(found, given)))
            self._way = {name: value for name, value in way.items() if name != "prompt"}
        logprobs = _of_prompt(choice, given)
        if logprobs is None:
            raise NotComparable("the server's log-probabilities of a prompt are of other tokens")
        return SequenceScores(given.ids, given.num_prompt, logprobs, (), given.drawn)


def _get(entry: Any, name: str) -> Any:
    return entry.get(name) if isinstance(entry, Mapping) else None


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and not math.isnan(value)


def _has_logprobs(choice: Mapping[str, Any]) -> bool:
    return isinstance(choice.get("logprobs"), Mapping)


def _of_prompt(choice: Mapping[str, Any], given: SequenceScores) -> list[float | None] | None:
    """Returns the log-probabilities of a prompt's tokens, from vLLM's prompt_logprobs or an echo; None without."""
    count = len(given.ids)
    at_each = choice.get("prompt_logprobs")
    if isinstance(at_each, list) and len(at_each) == count:
        values = [_get(_get(at, str(token)), "logprob") for token, at in zip(given.ids, at_each, strict=True)]
    else:
        values = _get(choice.get("logprobs"), "token_logprobs")
        values = values[:count] if isinstance(values, list) else []
    if len(values) != count or not all(map(_is_number, values[1:])):
        return None
    return [None, *(float(value) for value in values[1:])]
