"""Layers that keep one state per request: what a request says is its own, however it is computed, with ==.

A state is carried from step to step, kept where a prompt's pages end, taken back with a refused draft, and computed
again after a preemption.
"""

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import pytest

from quintet import SamplingParams
from quintet.chat.prompts import Prompt
from quintet.config import SpeculativeConfig
from quintet.engine.client import EngineClient
from quintet.engine.request import Request
from quintet.engine.spec_decode.proposer import Proposer
from quintet.interface.platform import ASIDE
from quintet.platforms.cpu.platform import CPU
from quintet_tools.checkpoints.tiny import VOCAB
from tests.e2e.engine.test_oracle import Ask, Result, client, mix, run

MODELS = {
    "lfm2": ("lfm2", "plain", "float32", {}),
    "mamba2, which has no pages": ("mamba2", "plain", "bfloat16", {}),
    "qwen3_next": ("qwen3_next", "plain", "bfloat16", {}),
}
# of layers that these have: two of the ways
KIN = {
    "lfm2_moe": ("lfm2_moe", "plain", "bfloat16", {}),
    "glm5_next": ("glm5_next_text", "plain", "bfloat16", {}),
    "kimi_linear": ("kimi_linear", "plain", "bfloat16", {}),
    "minimax": ("minimax", "plain", "bfloat16", {}),
    "nemotron_h": ("nemotron_h", "plain", "bfloat16", {}),
    "olmo_hybrid": ("olmo_hybrid", "plain", "bfloat16", {}),
    "plamo2": ("plamo2", "plain", "bfloat16", {}),
    "rwkv7, which has no pages": ("rwkv7", "plain", "bfloat16", {}),
    "zamba2, whose blocks have a cache for each use": ("zamba2", "plain", "bfloat16", {}),
}
PLAIN = {"max_model_len": 160, "num_pages": 200}
WAYS: dict[str, dict[str, Any]] = {
    "batched": PLAIN,
    "chunked": {**PLAIN, "max_num_batched_tokens": 7},
    "preempted, cached": {**PLAIN, "num_pages": 23, "page_size": 8, "max_num_batched_tokens": 19},
    "two at once": {**PLAIN, "max_num_seqs": 2},
    "whole prompts": {**PLAIN, "enable_chunked_prefill": False},
}
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}


@pytest.fixture(scope="module", params=MODELS)
def name(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    return found


def asks() -> list[Ask]:
    """Beside the oracle's, two that repeat themselves, so that drafts are right now and then."""
    biased = [{5: 50.0}, dict.fromkeys((5, 6, 7), 5.0)]
    more = [SamplingParams(temperature=0, logit_bias=each, max_tokens=30, detokenize=False) for each in biased]
    return mix(0) + [Ask(f"biased {at}", [9, 5, 6, 7], each, 0, at) for at, each in enumerate(more)]


@pytest.fixture(scope="module")
def alone(name: str) -> Result:
    engine = client(MODELS[name], **PLAIN, enable_prefix_caching=False)
    return {
        key: said for ask in asks() for key, said in run(engine, [Ask(ask.name, ask.prompt, ask.params, 0, 0)]).items()
    }


def answered(engine: EngineClient) -> Result:
    said = run(engine, asks())
    assert engine.engine.scheduler.kv_cache_manager.state_slots is not None
    assert engine.engine.scheduler.kv_cache_manager.state_slots.num_used == 0
    return said


@pytest.mark.parametrize("way", WAYS)
def test_any_way_equals_alone(name: str, way: str, alone: Result) -> None:
    engine = client(MODELS[name], **WAYS[way])
    assert answered(engine) == alone
    stats = engine.engine.stats()
    if way == "preempted, cached" and "no pages" not in name:  # without attention, no page is ever short
        assert stats.scheduler.num_preemptions > 0
    if way == "chunked":
        assert stats.steps.num_steps > 40


def test_a_second_run_goes_on_from_states_that_are_kept(name: str, alone: Result) -> None:
    engine = client(MODELS[name], **PLAIN)
    assert answered(engine) == alone
    before = engine.engine.stats().scheduler
    assert answered(engine) == alone
    after = engine.engine.stats().scheduler
    assert after.prefix_hits - before.prefix_hits > (after.prefix_queries - before.prefix_queries) // 4
    engine.engine.reset_prefix_cache()
    assert answered(engine) == alone
    assert engine.engine.stats().scheduler.prefix_hits - after.prefix_hits < after.prefix_hits - before.prefix_hits


@pytest.mark.parametrize("kin", KIN)
def test_kin_preempted_and_cached_equal_alone(kin: str) -> None:
    """Twice: the second run goes on from states that are kept."""
    whole = client(KIN[kin], **PLAIN, enable_prefix_caching=False)
    alone = {
        key: said for ask in mix(0) for key, said in run(whole, [Ask(ask.name, ask.prompt, ask.params, 0, 0)]).items()
    }
    engine = client(KIN[kin], **WAYS["preempted, cached"])
    assert run(engine, mix(0)) == alone
    assert engine.engine.stats().scheduler.num_preemptions > 0 or "no pages" in kin
    assert run(engine, mix(0)) == alone
    assert engine.engine.stats().scheduler.prefix_hits > 0


@pytest.mark.parametrize("apart", [True, False], ids=["drafts apart", "drafts in the state"])
@pytest.mark.parametrize("way", ["batched", "preempted, cached"])
def test_refused_drafts_take_the_state_back(
    name: str, way: str, apart: bool, alone: Result, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not apart:
        monkeypatch.setattr(CPU, "optional_spec_fields", CPU.optional_spec_fields - {"max_drafts"})
    engine = client(MODELS[name], **WAYS[way], speculative_config=NGRAM)
    assert answered(engine) == alone
    stats = engine.engine.stats()
    assert 0 < stats.spec_decode.num_accepted_tokens < stats.spec_decode.num_draft_tokens
    assert answered(engine) == alone, "from states that are kept"


class Guesses(Proposer):
    """Proposes the tokens that were drawn without drafts, as far as `right` says, and wrong ones after them."""

    right: ClassVar[Callable[[int], int]]
    drawn: ClassVar[dict[tuple[int, ...], list[int]]] = {}

    def __init__(self, config: SpeculativeConfig, vocab_size: int) -> None:
        self.num_drafts = config.num_speculative_tokens

    def propose(self, room: Sequence[tuple[Request, int]]) -> None:
        for request, most in room:
            next_tokens = self.drawn[tuple(request.core_request.prompt_ids)][request.num_output :][:most]
            right = Guesses.right(request.num_output)
            request.draft_tokens = [t if i < right else (t + 1) % VOCAB for i, t in enumerate(next_tokens)]


GUESSES = {"method": "custom_class", "model": f"{__name__}:Guesses", "num_speculative_tokens": 3}


def test_a_refused_draft_computes_no_token_again(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With drafts that are all wrong there are as many steps as without any, each of a token and its drafts."""
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=24, ignore_eos=True, detokenize=False)
    prompts = {"a": mix(0)[0].prompt[:20], "b": mix(1)[3].prompt}

    def tokens(engine: EngineClient) -> dict[str, list[int]]:
        for key, prompt in prompts.items():
            engine.add(key, Prompt(prompt), params)
        return drained(engine)

    plain = client(MODELS[name], **PLAIN)
    wanted = tokens(plain)
    Guesses.drawn = {tuple(prompts[key]): said for key, said in wanted.items()}
    wrong, right, mixed = (lambda at: 0), (lambda at: 9), (lambda at: at % 3)
    steps = plain.engine.stats().steps
    for guess in (wrong, right, mixed):
        Guesses.right = guess
        engine = client(MODELS[name], **PLAIN, speculative_config={**GUESSES, "adapt_num_tokens": False})
        assert tokens(engine) == wanted
        stats = engine.engine.stats()
        drafts = stats.spec_decode
        refused = drafts.num_draft_tokens - drafts.num_accepted_tokens
        assert stats.steps.num_tokens == steps.num_tokens + refused
        assert (drafts.num_accepted_tokens > 0, refused > 0) == (guess is not wrong, guess is not right)
        assert (stats.steps.num_steps == steps.num_steps) == (guess is wrong)


def test_a_conversation_goes_on_from_the_state_of_its_last_answer(name: str) -> None:
    engine = client(MODELS[name], **PLAIN)
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, detokenize=False)
    prompt = mix(0)[0].prompt[:20]
    engine.add("first", Prompt(prompt), params)
    said = drained(engine)["first"]
    engine.add("second", Prompt([*prompt, *said]), params)
    second = drained(engine)["second"]
    assert engine.engine.stats().scheduler.prefix_hits >= (len(prompt) + len(said) - 1) // 16 * 16 - 16
    fresh = client(MODELS[name], **PLAIN, enable_prefix_caching=False)
    fresh.add("second", Prompt([*prompt, *said]), params)
    assert drained(fresh)["second"] == second


def test_prompts_that_part_find_the_state_where_they_do() -> None:
    """The second sees by its pages where others go on from, and leaves a state there for the third."""
    engine = client(MODELS["lfm2"], **PLAIN)
    stem, params = list(range(3, 51)), SamplingParams(temperature=0, max_tokens=1, detokenize=False)
    hits = []
    for last in (60, 61, 62):
        engine.add("only", Prompt([*stem, *[last] * 30]), params)
        drained(engine)
        hits.append(engine.engine.stats().scheduler.prefix_hits)
    assert hits == [0, 0, 48]


def test_states_are_gone_after_sleep() -> None:
    engine = client(MODELS["lfm2"], **PLAIN)
    before = answered(engine)
    engine.engine.sleep(ASIDE)
    engine.engine.wake_up()
    hits = engine.engine.stats().scheduler.prefix_hits
    engine.add("only", Prompt(asks()[0].prompt), SamplingParams(temperature=0, max_tokens=1, detokenize=False))
    drained(engine)
    assert engine.engine.stats().scheduler.prefix_hits == hits
    assert answered(engine) == before


def test_slots_come_back_after_aborts() -> None:
    engine = client(MODELS["lfm2"], **WAYS["preempted, cached"], speculative_config=NGRAM)
    for ask in mix(0):
        engine.add(ask.name, Prompt(ask.prompt), ask.params)
    for ask in mix(0):
        engine.step()
        engine.abort([ask.name])
        engine.engine.check_integrity()
    assert not engine.busy
    slots = engine.engine.scheduler.kv_cache_manager.state_slots
    assert slots is not None and slots.num_used == 0


def drained(engine: EngineClient) -> dict[str, list[int]]:
    said: dict[str, list[int]] = {}
    while engine.busy:
        for output in engine.step():
            said[output.request_id] = list(output.outputs[0].token_ids)
        engine.engine.check_integrity()
    return said
