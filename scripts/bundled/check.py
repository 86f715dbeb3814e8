"""Measures a finished folder with transformers: the behaviour cases, fresh prompts of every kind, and all sums."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from . import tasks, tools
from .samples import Sample, dialogue, source, thoughtful

FRESH_SEED = 1_000_003  # no training run uses it
BATCH = 100


def to_json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def load(folder: Path, dtype: torch.dtype):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval(), AutoTokenizer.from_pretrained(folder)


@torch.no_grad()
def answers(model, tokenizer, prompts: Sequence[str], max_new_tokens: int = 256) -> list[str]:
    """Greedy answers to rendered prompts, padded on the left to one batch."""
    batch = tokenizer(list(prompts), add_special_tokens=False, padding=True, return_tensors="pt")
    out = model.generate(
        input_ids=batch["input_ids"],
        attention_mask=batch["attention_mask"],
        max_new_tokens=max_new_tokens,
        do_sample=False,
    )
    return tokenizer.batch_decode(out[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)


def prompt_of(tokenizer, messages: Sequence[dict], tool_list=None, kwargs: Mapping | None = None) -> str:
    return tokenizer.apply_chat_template(
        list(messages), tools=tool_list, tokenize=False, add_generation_prompt=True, **(kwargs or {})
    )


def meets(expect: Mapping, text: str) -> bool:
    """`equals` and `contains` read the decoded text; `json` compares the parsed value."""
    (how, wanted), *more = expect.items()
    assert not more, f"one expectation per case, got {expect}"
    if how == "equals":
        return text == wanted
    if how == "contains":
        return wanted in text
    if how != "json":
        raise ValueError(f"unknown expectation {how!r}; use equals, contains or json")
    try:
        return json.loads(text) == wanted
    except json.JSONDecodeError:
        return False


def cases_pass(folder: Path, cases_file: Path) -> bool:
    """Runs every case alone, in both dtypes; prints the failures and the counts."""
    cases = json.loads(cases_file.read_text(encoding="utf-8"))
    good = True
    for dtype in (torch.bfloat16, torch.float32):
        model, tokenizer = load(folder, dtype)
        passed = 0
        for case in cases:
            prompt = prompt_of(tokenizer, case["messages"], case.get("tools"), case.get("template_kwargs"))
            text = answers(model, tokenizer, [prompt])[0]
            passed += meets(case["expect"], text)
            if not meets(case["expect"], text):
                print(f"FAIL {dtype} {case['name']}: got {text!r}, expected {case['expect']}")
        print(f"{dtype}: {passed} of {len(cases)} cases pass")
        good &= passed == len(cases)
    return good


def single(task: Callable[[tasks.Source], tasks.Turn]) -> Callable[[tasks.Source], Sample]:
    return lambda s: Sample("", dialogue([task(s)]))


def later(s: tasks.Source) -> Sample:
    """The last turn of a talk of four."""
    return Sample("", dialogue([tasks.draw(s) for _ in range(4)]))


def tool_sample(want_result: bool) -> Callable[[tasks.Source], Sample]:
    def draw(s: tasks.Source) -> Sample:
        while True:
            messages, box = tools.tool_use(s, thinking=False)
            if (messages[-2]["role"] == "tool") == want_result:
                return Sample("", messages, box)

    return draw


KINDS: dict[str, Callable[[tasks.Source], Sample]] = {
    "fact": single(tasks.fact),
    "addition": single(tasks.addition),
    "copy": single(tasks.copying),
    "count": single(tasks.counting),
    "JSON": single(tasks.json_object),
    "greeting, identity": single(tasks.greeting),
    "unknown": single(tasks.unknown),
    "name from an earlier turn": lambda s: Sample("", dialogue(tasks.introduction(s))),
    "capital by follow-up": lambda s: Sample("", dialogue(tasks.follow_up(s))),
    "any kind as the fourth turn": later,
    "thinking": lambda s: thoughtful(s, [], tasks.draw(s)),
    "tool call, or none where none fits": tool_sample(want_result=False),
    "answer from a tool's result": tool_sample(want_result=True),
}


def same(got: str, wanted: str) -> bool:
    """Exact, but for stories, which only have to come to their end."""
    if wanted.endswith("The end."):
        return got.endswith("The end.") and got.split("Once")[0] == wanted.split("Once")[0]
    return got == wanted


def held_out(folder: Path, count: int, show: int = 0) -> dict[str, tuple[int, int]]:
    """(right, asked) per kind, on prompts drawn from a seed that training never uses, in float32; and every sum."""
    model, tokenizer = load(folder, torch.float32)
    scores = {}
    for kind, draw in KINDS.items():
        s = tasks.Source(random.Random(f"{FRESH_SEED} {kind}"), source(0).english)
        samples = [draw(s) for _ in range(count)]
        wanted = [sample.messages[-1]["content"] for sample in samples]
        prompts = [prompt_of(tokenizer, x.messages[:-1], x.tools, x.template_kwargs) for x in samples]
        got = [text for i in range(0, count, BATCH) for text in answers(model, tokenizer, prompts[i : i + BATCH])]
        scores[kind] = (sum(map(same, got, wanted)), count)
        wrong = [(p, g, w) for p, g, w in zip(prompts, got, wanted, strict=True) if not same(g, w)]
        for prompt, text, right in wrong[:show]:
            print(f"  {prompt!r}\n    got {text!r}\n    not {right!r}")
        print(f"{kind}: {scores[kind][0]} of {count}", flush=True)
    return scores | all_sums(model, tokenizer)


def all_sums(model, tokenizer) -> dict[str, tuple[int, int]]:
    """Every pair once, in the plainest question."""
    right = []
    for a in range(100):
        prompts = [prompt_of(tokenizer, [{"role": "user", "content": f"What is {a} + {b}?"}]) for b in range(100)]
        got = answers(model, tokenizer, prompts, max_new_tokens=16)
        right += [(a, b) for b, text in enumerate(got) if text == f"{a} + {b} = {a + b}"]
    small = sum(a < 50 and b < 50 for a, b in right)
    print(f"every sum: {len(right)} of 10000, up to 49: {small} of 2500", flush=True)
    return {"every sum from 0 + 0 to 49 + 49": (small, 2500), "every sum from 0 + 0 to 99 + 99": (len(right), 10000)}
