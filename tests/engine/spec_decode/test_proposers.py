"""Proposers that do everything wrong, or everything right: outputs equal those without speculation, bit for bit."""

import functools
import random
from collections.abc import Callable, Sequence
from importlib.metadata import EntryPoint
from typing import Any, ClassVar

import pytest

from quintet import LLM, SamplingParams
from quintet.chat.prompts import Prompt
from quintet.config import SpeculativeConfig
from quintet.engine.observability.stats import total
from quintet.engine.request import Request
from quintet.engine.spec_decode import custom_class
from quintet.engine.spec_decode.custom_class import load_proposer
from quintet.engine.spec_decode.drafting import MAX_FAILURES
from quintet.engine.spec_decode.proposer import Proposer
from quintet.outputs import CompletionOutput, RequestOutput
from quintet.sampling_params import StructuredOutputsParams
from tests.helpers.platforms.null_engine import drain, greedy, null_client

Propose = Callable[[Request, int], Any]
STORY = "Once upon a time there was a dog named Max. He liked to play in the park. "
PROMPTS = [STORY, "Tell me a story about a girl named Lily and her old dog.", STORY + "One day"]
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "seeded": {"temperature": 0.9, "seed": 1, "top_p": 0.9},
    "unseeded": {"temperature": 0.9},
    "penalties": {"temperature": 0.5, "seed": 2, "frequency_penalty": 0.4, "presence_penalty": 0.2, "min_tokens": 9},
    "grammar": {"temperature": 0.8, "seed": 3, "structured_outputs": {"regex": "[a-z]{3,9}( [a-z]{2,7}){6,9}[.]"}},
    "logprobs": {"temperature": 0.7, "seed": 4, "logprobs": 3, "prompt_logprobs": 1},
    "stop strings": {"temperature": 0, "stop": [" the", "."], "min_tokens": 3, "ignore_eos": True},
    "stop tokens": {"temperature": 0.9, "seed": 5, "stop_token_ids": list(range(20, 400)), "min_tokens": 11},
    "several": {"temperature": 0.9, "seed": 6, "n": 3},
}
ENGINES: dict[str, dict[str, Any]] = {
    "plenty": {"num_pages": 400},
    "few pages, chunks": {"num_pages": 22, "max_num_batched_tokens": 24, "max_num_seqs": 6},
}


def no_drafts(request: Request, most: int) -> list[int]:
    return []


class Adversary(Proposer):
    """Proposes what `current` returns, and records the tokens of requests that end."""

    current: ClassVar[Propose] = no_drafts
    outputs: ClassVar[dict[Any, list[int]]] = {}
    vocab_size: ClassVar[int] = 0
    steps: ClassVar[int] = 0

    def __init__(self, config: SpeculativeConfig, vocab_size: int) -> None:
        self.num_drafts, Adversary.vocab_size = config.num_speculative_tokens, vocab_size

    def propose(self, room: Sequence[tuple[Request, int]]) -> None:
        Adversary.steps += 1
        for request, most in room:
            request.draft_tokens = Adversary.current(request, most)

    def finish(self, request: Request) -> None:
        Adversary.outputs[_key(request)] = list(request.token_ids)


def _key(request: Request) -> Any:
    facts, params = request.core_request, request.params
    return tuple(facts.prompt_ids), repr(params), None if params.seed is None else facts.random_key


def right(request: Request, count: int) -> list[int]:
    """Returns the next tokens of an earlier run; [] where it drew others, as unseeded requests do."""
    known = Adversary.outputs.get(_key(request), [])
    size = request.num_known
    return known[size : size + count] if known[:size] == request.token_ids else []


def wrong(request: Request, most: int) -> list[int]:
    return [(token_id + 1) % Adversary.vocab_size for token_id in right(request, most)]


def noise(request: Request, count: int) -> list[int]:
    rng = random.Random(request.num_known)
    return [rng.randrange(Adversary.vocab_size) for _ in range(count)]


def right_then_wrong(request: Request, most: int) -> list[int]:
    return [*right(request, 2), *noise(request, 9)][:most]


def past_the_end(request: Request, most: int) -> list[int]:
    """Too long: past max_tokens, stop tokens, stop strings and the end of a grammar."""
    return right(request, most) + noise(request, 70)


def out_of_range(request: Request, most: int) -> list[int]:
    bad = [-1, Adversary.vocab_size, 2**40][request.num_known % 3]
    return [*right(request, request.num_known % 4), bad, *right(request, 2)]


def raises_at_times(request: Request, most: int) -> list[int]:
    if Adversary.steps % MAX_FAILURES:  # as often as it may
        raise RuntimeError("no luck")
    return right(request, most)


def no_list(request: Request, most: int) -> Any:
    if Adversary.steps % MAX_FAILURES:
        return [None, ("a",), "text", [None], 7][request.num_known % 5]
    return right(request, most)


@functools.cache
def engine(how: str, speculates: bool) -> LLM:
    config: dict[str, Any] = {"method": "custom_class", "model": f"{__name__}:Adversary", "num_speculative_tokens": 5}
    config["adapt_num_tokens"] = False  # drafts in every step
    sizes = {"max_model_len": 160, "page_size": 8, "max_num_seqs": 8, "max_num_batched_tokens": 96}
    return LLM(**{**sizes, **ENGINES[how]}, device="cpu", speculative_config=config if speculates else None, seed=7)


def told(outputs: list[RequestOutput]) -> list[Any]:
    return [(each.prompt_logprobs, [_vars(output) for output in each.outputs]) for each in outputs]


def _vars(output: CompletionOutput) -> tuple[Any, ...]:
    return list(output.token_ids), output.text, output.finish_reason, output.stop_reason, output.logprobs


def run(llm: LLM) -> list[Any]:
    """What all prompts give in all ways, together."""
    asked = [SamplingParams(max_tokens=24, **_params(way)) for way in WAYS.values()]
    prompts = [prompt for _ in asked for prompt in PROMPTS]
    return told(llm.generate(prompts, [params for params in asked for _ in PROMPTS], use_tqdm=False))


def _params(way: dict[str, Any]) -> dict[str, Any]:
    grammar = way.get("structured_outputs")
    return way if grammar is None else {**way, "structured_outputs": StructuredOutputsParams(**grammar)}


def run_both(how: str, current: Propose, monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """Compares the outputs with those without speculation -> what the speculating engine counted meanwhile."""
    ours, theirs = engine(how, True), engine(how, False)
    if not Adversary.outputs:
        assert run(ours) == run(theirs)  # and records the outputs
    before = ours.get_stats()
    monkeypatch.setattr(Adversary, "current", current)
    assert run(ours) == run(theirs)
    after = ours.get_stats()
    return {name: after[name] - before[name] for name in after}


@pytest.mark.parametrize(
    "current", [wrong, right, noise, right_then_wrong, past_the_end, out_of_range, raises_at_times, no_list]
)
@pytest.mark.grid(cases=5)
@pytest.mark.parametrize("how", ENGINES)
def test_outputs_are_those_without_speculation(how: str, current: Propose, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = run_both(how, current, monkeypatch)
    assert counts["num_disabled"] == 0 and counts["num_draft_tokens"] > 50
    accepted = counts["num_accepted_tokens"] / counts["num_draft_tokens"]
    if current is wrong:
        assert accepted == 0
    elif current is right:
        assert accepted > 0.95
    elif current is not noise:
        assert 0 < accepted
    assert "few" not in how or counts["num_preemptions"] > 0


def test_a_proposer_that_fails_repeatedly_is_turned_off(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is logged twice: at the first failure, and when it is turned off."""

    def fails(request: Request, most: int) -> list[int]:
        raise RuntimeError("on fire")

    config = {"method": "custom_class", "model": f"{__name__}:Adversary", "num_speculative_tokens": 4}
    said = []
    client, currents = null_client(), list[Propose]([no_drafts, fails])
    for current in currents:
        monkeypatch.setattr(Adversary, "current", current)
        client = null_client(speculative_config=config)
        for name in "ab":
            client.add(name, Prompt([1, 2, 3]), greedy(max_tokens=9))
        said.append({name: list(each.outputs[0].token_ids) for name, each in drain(client).items()})
    assert said[0] == said[1] and len(said[0]["a"]) == 9
    stats = client.engine.stats()
    assert stats.spec_decode.disabled_reason.endswith("failed in 3 steps in a row: RuntimeError: on fire")
    assert stats.spec_decode.num_disabled == 1 and stats.spec_decode.num_drafts == 0
    assert [record.levelname for record in caplog.records if "speculative" in record.message] == ["WARNING", "ERROR"]
    both = total([stats, null_client().engine.stats()]).spec_decode
    assert both.num_disabled == 1 and both.disabled_reason == stats.spec_decode.disabled_reason


class TooMany(Adversary):
    def __init__(self, config: SpeculativeConfig, vocab_size: int) -> None:
        self.num_drafts = config.num_speculative_tokens + 1


class Incomplete(Proposer):
    num_drafts = 1


class Broken(Adversary):
    def __init__(self, config: SpeculativeConfig, vocab_size: int) -> None:
        raise RuntimeError("on fire")


@pytest.mark.parametrize(
    ("model", "says"),
    [
        ("quintet.nowhere:Class", "cannot be loaded: No module"),
        (f"{__name__}.Nothing", "cannot be loaded: module"),
        (f"{__name__}:LLM", "is no subclass of quintet.engine.spec_decode.proposer.Proposer"),
        (f"{__name__}:Incomplete", "does not define propose"),
        (f"{__name__}:Broken", "cannot be made: RuntimeError: on fire"),
        (f"{__name__}.TooMany", "num_drafts must be 1 to num_speculative_tokens=3, not 4"),
        ("nobodys", "unknown proposer 'nobodys'"),
    ],
)
def test_a_class_that_is_no_proposer_is_refused(model: str, says: str) -> None:
    config = SpeculativeConfig(method="custom_class", num_speculative_tokens=3, model=model)
    with pytest.raises(ValueError, match="speculative_config.model") as error:
        load_proposer(config, 99)
    assert says in str(error.value)


def test_a_proposer_is_found_by_the_name_of_its_entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    point = EntryPoint("mine", f"{__name__}:Adversary", "quintet.proposers")
    monkeypatch.setattr(custom_class, "entry_points", lambda group: [point] if group == point.group else [])
    config = SpeculativeConfig(method="custom_class", num_speculative_tokens=3, model="mine")
    assert isinstance(load_proposer(config, 99), Adversary)
