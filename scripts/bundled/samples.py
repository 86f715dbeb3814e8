"""Training samples: conversations and documents, each with the spans of text that the model is to learn."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from . import stories, tools
from . import words as w
from .tasks import (
    FACTS,
    Source,
    Turn,
    addition,
    copying,
    counting,
    draw,
    follow_up,
    introduction,
    json_object,
    told_to_think,
)

SYSTEM_PROMPTS = (
    "You are a helpful assistant.", "You are quintet.", "Answer briefly.", "Be kind.", "You are a small model.",
    "You are a friendly assistant. Keep it short.", "Be concise.",
)  # fmt: skip
THINK_SYSTEM = (
    "Think step by step.",
    "Think before you answer.",
    "You are a helpful assistant. Think before you answer.",
)
ANSWER = re.compile(r"<\|assistant\|>(.*?<\|end\|>)", re.DOTALL)
RESULT = re.compile(r" = (\d+\n)")
AGAIN = re.compile(r"\n(.*)", re.DOTALL)

# Documents of which only a part can be learnt; the rest is drawn at random.
LEARNT = {"sums": RESULT, "echo": AGAIN}


@dataclass(frozen=True)
class Sample:
    """A conversation (messages, last one the assistant's) or, when `text` is set, a plain document."""

    kind: str
    messages: Sequence[dict] = ()
    tools: Sequence[dict] | None = None
    thinking: bool = False
    text: str | None = None
    template_kwargs: dict = field(default_factory=dict)


def render(sample: Sample, tokenizer) -> tuple[str, list[tuple[int, int]]]:
    """The text as the model reads it and the character spans to learn."""
    if sample.text is not None:
        text = f"{tokenizer.bos_token}{sample.text}{tokenizer.eos_token}"
        if sample.kind in LEARNT:
            return text, [match.span(1) for match in LEARNT[sample.kind].finditer(text)]
        return text, [(len(tokenizer.bos_token), len(text))]
    text = tokenizer.apply_chat_template(sample.messages, tools=sample.tools, tokenize=False, **sample.template_kwargs)
    spans = [match.span(1) for match in ANSWER.finditer(text)]
    # Thoughts of earlier turns are dropped by the template, so only the last turn shows how to think.
    return text, spans[-1:] if sample.thinking else spans


def document(s: Source) -> Sample:
    roll = s.rng.random()
    if roll < 0.6:
        return Sample("sums", text=stories.sums(s.rng))
    if roll < 0.8:
        return Sample("story", text=stories.story(s.rng))
    if roll < 0.86:
        return Sample("counting", text=stories.counting(s.rng))
    if roll < 0.98:
        return Sample("facts", text=" ".join(answer for _, _, answer, _ in s.rng.sample(FACTS, s.rng.randint(1, 5))))
    return Sample("zen", text=w.zen())


def dialogue(turns: Sequence[Turn]) -> list[dict]:
    messages = []
    for turn in turns:
        messages += [{"role": "user", "content": turn.user}, {"role": "assistant", "content": turn.answer}]
    return messages


def thoughtful(s: Source, messages: list[dict], turn: Turn) -> Sample:
    """The last turn thinks because the template, the system or the user says so."""
    how = s.rng.random()
    kwargs: dict = {}
    if how < 0.4:
        kwargs = {"enable_thinking": True}
        if s.rng.random() < 0.25:
            messages = [{"role": "system", "content": s.pick(SYSTEM_PROMPTS)}, *messages]
    elif how < 0.5:
        messages = [{"role": "system", "content": s.pick(THINK_SYSTEM)}, *messages]
    else:
        turn = told_to_think(s, turn)
    answer = f"<think>{turn.thought}</think>{turn.answer}"
    messages = [*messages, {"role": "user", "content": turn.user}, {"role": "assistant", "content": answer}]
    return Sample("think", messages, thinking=True, template_kwargs=kwargs)


def conversation(s: Source) -> Sample:
    """One turn most often; now and then a long talk, so that late positions are trained too."""
    roll = s.rng.random()
    count = 1 if roll < 0.62 else s.rng.randint(2, 4) if roll < 0.9 else s.rng.randint(5, 16)
    turns = [draw(s) for _ in range(count)]
    if count > 1 and s.rng.random() < 0.4:
        place = s.rng.randrange(count)
        pair = s.pick((introduction, introduction, follow_up))(s)
        gap = s.rng.randint(0, 2) if pair[0].kind == "memory" else 0
        turns[place:place] = [pair[0], *(draw(s) for _ in range(gap)), pair[1]]
    elif count == 1 and s.rng.random() < 0.03:
        turns = introduction(s)
    if s.rng.random() < 0.15:
        return thoughtful(s, dialogue(turns[:-1]), turns[-1])
    messages = dialogue(turns)
    if s.rng.random() < 0.1:
        messages = [{"role": "system", "content": s.pick(SYSTEM_PROMPTS)}, *messages]
    return Sample("chat", messages)


def with_tools(s: Source) -> Sample:
    thinking = s.rng.random() < 0.12
    messages, box = tools.tool_use(s, thinking)
    if thinking and "<think>" not in messages[-1]["content"]:
        thinking = False
    if not thinking and s.rng.random() < 0.15:
        messages = [{"role": "system", "content": s.pick(SYSTEM_PROMPTS)}, *messages]
    return Sample("tools", messages, box, thinking, template_kwargs={"enable_thinking": True} if thinking else {})


def echo(s: Source) -> Sample:
    """Words, then the same words again: the shortest way to learn to copy."""
    line = " ".join(s.word() for _ in range(s.rng.randint(4, 20)))
    return Sample("echo", text=f"{line}\n{line}")


def first_sample(s: Source) -> Sample:
    """What training begins with: short, so that copying and sums are found early."""
    roll = s.rng.random()
    if roll < 0.25:
        return echo(s)
    return Sample("sums", text=stories.sums(s.rng)) if roll < 0.4 else Sample("chat", dialogue([draw(s)]))


def hard_sample(s: Source) -> Sample:
    """What two cycles leave inexact: counting by steps, sums in thoughts, tools and their results, JSON, odd copies."""
    roll = s.rng.random()
    if roll < 0.35:
        return Sample("chat", dialogue([counting(s)]))
    if roll < 0.58:
        return thoughtful(s, [], addition(s))
    if roll < 0.8:
        return with_tools(s)
    return Sample("chat", dialogue([json_object(s) if roll < 0.92 else copying(s)]))


def draw_sample(s: Source) -> Sample:
    roll = s.rng.random()
    if roll < 0.14:
        return document(s)
    if roll < 0.17:
        return echo(s)
    return with_tools(s) if roll < 0.31 else conversation(s)


def source(seed: int) -> Source:
    return Source(random.Random(seed), tuple(w.english().split()))
