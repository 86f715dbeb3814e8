"""What the bundled model does right every time, greedy; and that its text is what transformers makes of it."""

import functools
import json
from pathlib import Path
from typing import Any

import pytest

from quintet import LLM, BeamSearchParams, SamplingParams
from quintet.config import BUNDLED
from quintet.hub.resolve import resolve_model

CASES: list[dict[str, Any]] = json.loads((Path(__file__).parent / "bundled_cases.json").read_text())
GREEDY = SamplingParams(temperature=0, max_tokens=256)


@functools.cache
def bundled(dtype: str) -> LLM:
    return LLM(BUNDLED, device="cpu", dtype=dtype, use_tqdm=False, kv_cache_memory_bytes="64M")


@pytest.fixture(params=["bfloat16", "float32"])
def llm(request: pytest.FixtureRequest) -> LLM:
    return bundled(request.param)


@functools.cache
def reference() -> tuple[Any, Any]:
    """transformers' tokenizer and model, in float32: in bfloat16 two implementations round to different tokens."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = resolve_model(bundled("float32").config)
    return AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder).float()


def as_expected(text: str, expect: dict[str, Any]) -> bool:
    text = text.strip()
    if "equals" in expect:
        return bool(text == expect["equals"])
    if "contains" in expect:
        wanted = expect["contains"]
        return all(each in text for each in ([wanted] if isinstance(wanted, str) else wanted))
    try:
        return bool(json.loads(text) == expect["json"])
    except json.JSONDecodeError:
        return False


def test_every_behaviour(llm: LLM) -> None:
    wrong = []
    for options, cases in alike(CASES):
        outputs = llm.chat([case["messages"] for case in cases], GREEDY, use_tqdm=False, **options)
        for case, output in zip(cases, outputs, strict=True):
            text = output.outputs[0].text
            if not as_expected(text, case["expect"]):
                wrong.append(f"{case['name']}: {text!r}, not {case['expect']}")
    assert not wrong, f"{len(wrong)} of {len(CASES)}:\n" + "\n".join(wrong)


def alike(cases: list[dict[str, Any]]) -> list[tuple[dict[str, Any], list[dict[str, Any]]]]:
    """Cases that bring the same tools and template arguments go in one batch."""
    groups: dict[str, tuple[dict[str, Any], list[dict[str, Any]]]] = {}
    for case in cases:
        options = {"tools": case.get("tools"), "chat_template_kwargs": case.get("template_kwargs")}
        groups.setdefault(json.dumps(options), (options, []))[1].append(case)
    return list(groups.values())


def test_there_are_cases_of_every_kind() -> None:
    assert len(CASES) >= 60
    assert {"fact", "add", "copy", "count", "json", "tool", "think"} <= {case["kind"] for case in CASES}


def test_batched_equals_one_by_one(llm: LLM) -> None:
    messages = [case["messages"] for case in CASES if not case.get("tools") and not case.get("template_kwargs")][:24]
    together = [output.outputs[0].text for output in llm.chat(messages, GREEDY, use_tqdm=False)]
    assert together == [llm.chat(each, GREEDY, use_tqdm=False)[0].outputs[0].text for each in messages]


@pytest.mark.parametrize("prompt", ["Once upon a time", "The Zen of", "naïve 🦜 日本"])
def test_text_equals_transformers(prompt: str) -> None:
    llm, (tokenizer, model) = bundled("float32"), reference()
    ids = tokenizer(prompt, return_tensors="pt").input_ids
    wanted = model.generate(ids, max_new_tokens=40, do_sample=False)[0, ids.shape[1] :].tolist()
    (output,) = llm.generate(prompt, SamplingParams(temperature=0, max_tokens=40), use_tqdm=False)
    assert output.prompt_token_ids == ids[0].tolist()
    assert list(output.outputs[0].token_ids) == wanted


def test_beam_search_equals_transformers() -> None:
    llm, (tokenizer, model) = bundled("float32"), reference()
    ids = tokenizer("One day, a", return_tensors="pt").input_ids
    wanted = model.generate(ids, num_beams=3, max_new_tokens=8, do_sample=False, eos_token_id=None)
    best = llm.beam_search("One day, a", BeamSearchParams(beam_width=3, max_tokens=8, ignore_eos=True))[0].sequences
    assert len(best) == 3 and best[0].tokens == wanted[0].tolist()
    assert [beam.cum_logprob for beam in best] == sorted((beam.cum_logprob for beam in best), reverse=True)


def test_beam_search_among_some_tokens_equals_transformers() -> None:
    llm, (tokenizer, model) = bundled("float32"), reference()
    ids = tokenizer("One day, a", return_tensors="pt").input_ids
    free = llm.beam_search("One day, a", BeamSearchParams(beam_width=3, max_tokens=8, ignore_eos=True))[0].sequences
    allowed = sorted({*range(300, 420)} - set(free[0].tokens))
    wanted = model.generate(
        ids, num_beams=3, max_new_tokens=8, do_sample=False, eos_token_id=None,
        prefix_allowed_tokens_fn=lambda batch, given: allowed,
    )  # fmt: skip
    params = BeamSearchParams(beam_width=3, max_tokens=8, ignore_eos=True, allowed_token_ids=allowed)
    best = llm.beam_search("One day, a", params)[0].sequences
    assert best[0].tokens == wanted[0].tolist() and set(best[0].tokens[ids.shape[1] :]) <= set(allowed)


def test_special_tokens_show_in_beams_if_they_are_wanted() -> None:
    llm, (tokenizer, _) = bundled("float32"), reference()
    special = tokenizer.convert_tokens_to_ids(tokenizer.all_special_tokens)[-1]
    for skip in (True, False):
        params = BeamSearchParams(
            beam_width=1, max_tokens=2, ignore_eos=True, allowed_token_ids=[special], skip_special_tokens=skip
        )
        text = llm.beam_search("One day, a", params)[0].sequences[0].text
        assert (tokenizer.convert_ids_to_tokens(special) in (text or "")) != skip
