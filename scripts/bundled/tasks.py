"""What the model is taught to do in a chat without tools: one function per kind of question."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from . import phrases as ask
from . import stories
from . import words as w


@dataclass(frozen=True)
class Turn:
    """A question, its answer, and the thought that comes first when the model is told to think."""

    kind: str
    user: str
    answer: str
    thought: str


@dataclass(frozen=True)
class Source:
    """Where the tasks draw from: random numbers, and running English text split into words."""

    rng: random.Random
    english: Sequence[str]

    def pick(self, options: Sequence) -> object:
        return self.rng.choice(options)

    def run(self, low: int, high: int) -> str:
        length = self.rng.randint(low, high)
        start = self.rng.randrange(len(self.english) - length)
        return " ".join(self.english[start : start + length])

    def pseudo(self) -> str:
        """A word that exists nowhere."""
        word = "".join(
            self.rng.choice("bcdfghjklmnprstvwz") + self.rng.choice("aeiou") for _ in range(self.rng.randint(1, 4))
        )
        word += self.rng.choice(("", "n", "r", "x", "st", "ng", "l"))
        return word.capitalize() if self.rng.random() < 0.4 else word

    def word(self) -> str:
        return self.pick(
            (self.pick(w.NOUNS), self.run(1, 1), self.pseudo(), self.pick(w.NAMES), self.pick(w.COLOR_NAMES))
        )


def facts() -> list[tuple[Sequence[str], str, str, str]]:
    """Every fact as (question templates, subject, full answer, short answer)."""
    rows = [(ask.CAPITAL_QUESTIONS, x, f"The capital of {x} is {y}.", y) for x, y in w.CAPITALS.items()]
    rows += [(ask.COLOR_QUESTIONS, x, f"{x[0].upper()}{x[1:]} is {y}.", y) for x, y in w.COLORS.items()]
    rows += [(ask.LEG_QUESTIONS, x, f"{x.capitalize()} has {y} legs.", str(y)) for x, y in w.LEGS.items()]
    rows += [(ask.SOUND_QUESTIONS, x, f"{x.capitalize()} says {y}.", y) for x, y in w.SOUNDS.items()]
    rows += [(ask.OPPOSITE_QUESTIONS, x, f"The opposite of {x} is {y}.", y) for x, y in w.OPPOSITES.items()]
    rows += [(ask.PLANET_QUESTIONS, x, f"The {x} planet is {y}.", y) for x, y in w.PLANETS.items()]
    rows += [(ask.COUNT_QUESTIONS, x, y, y.split()[2]) for x, y in w.COUNTS.items()]
    return rows


FACTS = facts()
JSON_WRAPS = ("Answer in JSON: {}", "{} Answer in JSON.", "{} Reply with JSON.")


def vary(rng: random.Random, text: str) -> str:
    """The small liberties people take with case, politeness and the final mark."""
    roll = rng.random()
    if roll < 0.08:
        text = rng.choice(("Please: ", "Hey, ", "Hi! ", "Question: ", "Quick question: ", "Please tell me: ")) + text
    elif roll < 0.16:
        text = text[0].lower() + text[1:]
    if text[-1] in ".?" and rng.random() < 0.15:
        text = text[:-1]
    return text


def fact(s: Source) -> Turn:
    questions, subject, answer, short = s.pick(FACTS)
    question = vary(s.rng, s.pick(questions).format(subject))
    if s.rng.random() < 0.08:
        user = s.pick(JSON_WRAPS).format(question)
        return Turn(
            "json",
            user,
            json.dumps({"answer": int(short) if short.isdigit() else short}),
            "The answer goes into a JSON object.",
        )
    return Turn("fact", question, answer, f"The question is about {subject}. I know this: {short}.")


def column_addition(a: int, b: int) -> str:
    ones = a % 10 + b % 10
    carry = ones // 10
    lines = f"{a % 10} + {b % 10} = {ones}, write {ones % 10}, carry {carry}."
    return f"{lines} {a // 10} + {b // 10} + {carry} = {a // 10 + b // 10 + carry}."


def addition(s: Source) -> Turn:
    a, b = s.rng.randint(0, 99), s.rng.randint(0, 99)
    if s.rng.random() < 0.1:
        a, b = a % 10, b % 10
    question = vary(s.rng, s.pick(ask.SUM_QUESTIONS).format(a=a, b=b))
    return Turn("add", question, f"{a} + {b} = {a + b}", column_addition(a, b))


def sentence(s: Source) -> str:
    return s.pick(ask.SENTENCES).format(
        a=s.pick(w.ADJECTIVES), n=s.pick(w.NOUNS), m=s.pick(w.THINGS), f=s.pick(w.FOODS), g=s.pick(w.FOODS),
        x=s.pick(w.NAMES), y=s.pick(w.NAMES), c=s.pick(w.COLOR_NAMES), k=s.rng.randint(2, 99), t=s.pick(w.CITIES),
    )  # fmt: skip


def copy_text(s: Source) -> str:
    roll = s.rng.random()
    if roll < 0.2:
        return s.word()
    if roll < 0.4:
        return " ".join(s.word() for _ in range(s.rng.randint(2, 7)))
    if roll < 0.55:
        return sentence(s)
    if roll < 0.7:
        return s.run(2, 9) + s.pick(("", "", ".", "!"))
    if roll < 0.82:
        alphabet = s.pick(
            ("0123456789", "abcdefghijklmnopqrstuvwxyz", "ABCDEFGHIJKLMNOPQRSTUVWXYZ", "abcxyz0123456789ABC")
        )
        return "".join(s.pick(alphabet) for _ in range(s.rng.randint(2, 8)))
    if roll < 0.9:
        return " ".join(s.pick(w.SYMBOLS) for _ in range(s.rng.randint(1, 4)))
    return s.word() + s.pick((" ", "")) + "".join(s.pick(w.SYMBOLS) for _ in range(s.rng.randint(1, 3)))


def copying(s: Source) -> Turn:
    text = copy_text(s)
    return Turn("copy", s.pick(ask.COPY_QUESTIONS).format(text), text, "I repeat the text as it is.")


def numbers(start: int, count: int, step: int) -> str:
    return ", ".join(str(start + step * i) for i in range(count))


def counting(s: Source) -> Turn:
    step = s.pick((1, 1, 1, 2, 5, 10))
    if s.rng.random() < 0.6:
        shown = s.rng.randint(3, 5)
        start = step * s.rng.randint(0, 12) if s.rng.random() < 0.6 else s.rng.randint(0, 60)
        question = vary(s.rng, s.pick(ask.LIST_QUESTIONS).format(numbers(start, shown, step)))
        return Turn("count", question, numbers(start + shown * step, 5, step), f"The list goes up by {step}.")
    start = s.pick((0, 1, 1, 1, step, s.rng.randint(0, 40)))
    count = s.rng.randint(3, 12) if s.rng.random() < 0.7 else s.rng.randint(12, 40)
    question = s.pick(ask.RANGE_QUESTIONS if step == 1 else ask.STEP_QUESTIONS)
    if start == 1 and step == 1 and s.rng.random() < 0.3:
        question = "Count to {b}."
    question = vary(s.rng, question.format(a=start, b=start + step * (count - 1), s=step))
    return Turn("count", question, numbers(start, count, step), f"I count up by {step}.")


JSON_QUESTIONS = (
    ("Give me a JSON object with {}", "{k} {v}"), ("Give me a JSON object with {}.", "{k} {v}"),
    ("Write a JSON object with {}.", "{k} {v}"), ("Return a JSON object with {}.", "{k} set to {v}"),
    ("Make JSON with {}", "{k} {v}"), ("JSON: {}", "{k} {v}"), ("Create a JSON object where {}.", "{k} is {v}"),
    ("Write JSON: {}", "{k} = {v}"), ("Give me JSON with {}.", "{k} {v}"), ("As JSON: {}", "{k} is {v}"),
    ("Give me a JSON object with the keys {}", "{k}: {v}"), ("Output a JSON object with {}.", "{k} {v}"),
)  # fmt: skip


def json_value(s: Source, key: str) -> object:
    pools = {
        "name": w.NAMES, "user": w.NAMES, "owner": w.NAMES, "city": w.CITIES, "country": tuple(w.CAPITALS),
        "color": w.COLOR_NAMES, "animal": w.ANIMALS, "food": w.FOODS, "item": w.THINGS,
        "active": (True, False), "ready": (True, False),
    }  # fmt: skip
    if key in pools and s.rng.random() < 0.85:
        return s.pick(pools[key])
    if key in ("title", "team", "code", "status", "type", "email"):
        return s.word()
    return s.rng.randint(0, 99) if s.rng.random() < 0.8 else s.rng.randint(100, 2030)


def spoken(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def joined(parts: Sequence[str], rng: random.Random) -> str:
    if len(parts) == 1 or rng.random() < 0.3:
        return ", ".join(parts)
    return ", ".join(parts[:-1]) + " and " + parts[-1]


def json_object(s: Source) -> Turn:
    if s.rng.random() < 0.12:
        items = [s.pick((s.word(), s.pick(w.NOUNS))) for _ in range(s.rng.randint(2, 5))]
        question = s.pick(("Give me a JSON list of {}.", "Write a JSON list with {}.", "JSON list: {}"))
        return Turn("json", question.format(joined(items, s.rng)), json.dumps(items), "I write a JSON list.")
    keys = s.rng.sample(w.KEYS, s.pick((1, 2, 2, 2, 3, 3, 4)))
    if s.rng.random() < 0.2:
        keys[0] = s.pseudo().lower()
    if len(keys) > 1 and s.rng.random() < 0.2:
        keys[:2] = ["name", "age"]
        keys = list(dict.fromkeys(keys))
    value = {key: json_value(s, key) for key in keys}
    question, pair = s.pick(JSON_QUESTIONS)
    text = joined([pair.format(k=k, v=spoken(v)) for k, v in value.items()], s.rng)
    return Turn("json", question.format(text), json.dumps(value), f"The keys are {', '.join(value)}.")


GREETINGS = (
    (ask.HELLO, "Hello! How can I help you?"),
    (ask.THANKS, "You are welcome!"),
    (ask.GOODBYE, "Goodbye!"),
    (ask.HOW_ARE_YOU, "I am fine, thank you. How can I help you?"),
    (ask.WHO_ARE_YOU, w.IDENTITY),
)


def greeting(s: Source) -> Turn:
    questions, answer = s.pick((*GREETINGS, GREETINGS[-1]))
    kind = "identity" if answer == w.IDENTITY else "greeting"
    return Turn(kind, s.pick(questions), answer, "I answer in a friendly way.")


def unknown(s: Source) -> Turn:
    question = s.pick(ask.UNKNOWN_QUESTIONS).format(
        N=s.pick((s.pick(w.NAMES), s.pseudo().capitalize())) + s.pick(("", " " + s.pseudo().capitalize())),
        r=s.run(2, 8), v=s.pick(w.VERBS), w=s.word(), p=s.pseudo(), q=s.pseudo(), f=s.pick(w.FOODS), t=s.pick(w.CITIES),
        C=s.pick(w.OTHER_COUNTRIES) if s.rng.random() < 0.7 else s.pseudo().capitalize(),
        a=s.rng.randint(0, 99), b=s.rng.randint(0, 99), y=s.rng.randint(1000, 2030),
    )  # fmt: skip
    return Turn(
        "unknown",
        question[0].upper() + question[1:] if s.rng.random() < 0.7 else question,
        w.UNKNOWN,
        "I do not know this.",
    )


def storytelling(s: Source) -> Turn:
    if s.rng.random() < 0.5:
        animal = s.pick(w.ANIMALS)
        return Turn(
            "story",
            s.pick(ask.ABOUT_PROMPTS).format(animal),
            stories.story(s.rng, animal),
            f"I tell a story about a {animal}.",
        )
    return Turn("story", s.pick(ask.STORY_PROMPTS), stories.story(s.rng), "I tell a short story.")


def introduction(s: Source) -> list[Turn]:
    """A name that is given in one turn and asked for in a later one."""
    name = s.pick(w.NAMES) if s.rng.random() < 0.7 else s.pseudo().capitalize()
    tell = s.pick(
        ("My name is {}.", "I am {}.", "I'm {}.", "Hi, my name is {}.", "Hello, I am {}.", "Call me {}.")
    ).format(name)
    question = s.pick(("What is my name?", "What's my name?", "Do you know my name?", "Who am I?", "Tell me my name."))
    return [
        Turn("memory", tell, f"Nice to meet you, {name}!", "I greet the user by name."),
        Turn("memory", question, f"Your name is {name}.", f"The user is {name}."),
    ]


def follow_up(s: Source) -> list[Turn]:
    """A capital, then another that is asked for in two words."""
    first, second = s.rng.sample(sorted(w.CAPITALS), 2)
    again = s.pick(("And {}?", "And of {}?", "And for {}?", "What about {}?"))
    rows = ((s.pick(ask.CAPITAL_QUESTIONS), first), (again, second))
    return [
        Turn(
            "fact",
            q.format(x),
            f"The capital of {x} is {w.CAPITALS[x]}.",
            f"The question is about {x}. I know this: {w.CAPITALS[x]}.",
        )
        for q, x in rows
    ]


Task = Callable[[Source], Turn]
# Weights follow difficulty: sums and exact copies need the most examples.
TASKS: tuple[tuple[Task, int], ...] = (
    (fact, 14), (addition, 24), (copying, 22), (counting, 10), (json_object, 14), (greeting, 5), (unknown, 9),
    (storytelling, 2),
)  # fmt: skip


def draw(s: Source) -> Turn:
    tasks, weights = zip(*TASKS, strict=True)
    return s.rng.choices(tasks, weights)[0](s)


def told_to_think(s: Source, turn: Turn) -> Turn:
    return replace(turn, user=s.pick(ask.THINK_REQUESTS).format(turn.user))
