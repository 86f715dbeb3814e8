"""What the model learns from: WordNet, descriptions of Debian's packages, and what Python's own library says of itself.

Texts come as groups of things said of one subject, such as a word, its definition and an example. A subject is held out
or trained on as a whole.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import pydoc_data.topics
import random
import re
import sysconfig
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

MOST_WORDS = 40  # of a text; longer ones end there
HELD_OUT = 6  # percent of the subjects
SEED = 20
# How many subjects of each kind are learned from: what two cores can have the teacher read in a quarter of an hour
SHARES = {"used": 14000, "defined": 6000, "packages": 6500, "python": 4500, "questions": 6000}
TAUGHT = 32000  # texts of them that the teacher reads; the others are learned by what belongs together
QUESTIONS = (
    "what is {}?", "What does {} mean?", "definition of {}", "tell me about {}", "how do you explain {}?",
    "Who or what is {}?", "I am looking for {}.", "example of {}", "Is there anything about {}?", "{}, please",
    "I like {}.", "why {}?",
    "How much is {}?", "Where can I find {}?", "This has to do with {}.", "That is not {}.",
)  # fmt: skip
_SENTENCE = re.compile(r"(?<=[.!?])\s+(?=[A-Z])")


@dataclass(frozen=True)
class Subject:
    """`name`: what it is called or asked by; `told`: what is said of it; `used`: an example, or nothing."""

    source: str
    name: str
    told: str
    used: str = ""

    @property
    def texts(self) -> tuple[str, ...]:
        return tuple(text for text in (self.name, self.told, self.used) if text)

    @property
    def draw(self) -> int:
        """A number that its texts alone decide."""
        return int.from_bytes(hashlib.sha256("\n".join(self.texts).encode()).digest()[:8], "little")

    @property
    def held_out(self) -> bool:
        return self.draw % 100 < HELD_OUT


def tidy(text: str) -> str:
    return " ".join(text.split()[:MOST_WORDS])


def wordnet(folder: Path) -> Iterator[Subject]:
    """The synonyms of each sense, its definition, and the first sentence that shows it in use."""
    for kind in ("noun", "verb", "adj", "adv"):
        for line in (folder / f"data.{kind}").read_text(encoding="utf-8").splitlines():
            if line.startswith(" "):  # the licence
                continue
            facts, gloss = line.split(" | ", 1)
            fields = facts.split()
            words = [
                re.sub(r"\(.*\)", "", word).replace("_", " ") for word in fields[4 : 4 + 2 * int(fields[3], 16) : 2]
            ]
            examples = re.findall(r'"([^"]{12,})"', gloss)
            told = re.sub(r'"[^"]*"?(?: -.*)?', "", gloss).strip(" ;")
            told = re.sub(r"\s*;[\s;]*", "; ", told)
            if len(told.split()) > 2:
                yield Subject("wordnet", ", ".join(words), tidy(told), tidy(examples[0]) if examples else "")


def packages(folder: Path) -> Iterator[Subject]:
    """A package's description in one line, and the paragraph that follows. Those that begin alike count once."""
    seen = set()
    for file in sorted(folder.glob("*_Translation-en")):
        for entry in file.read_text(encoding="utf-8").split("\n\n"):
            found = re.search(r"^Description-en: (.*)\n((?: .*\n?)*)", entry, re.MULTILINE)
            if not found:
                continue
            name = re.sub(r"\s*[(-]+ ?(development|documentation|debug|shared|runtime|common|data).*", "", found[1])
            told = tidy(found[2].split("\n .\n")[0])
            if len(told.split()) > 8 and told[:40] not in seen and len(name.split()) > 1:
                seen.add(told[:40])
                yield Subject("packages", name, told)


def python() -> Iterator[Subject]:
    """What functions and classes of the standard library say they do: the first sentence, and what follows."""
    seen = set()
    library = Path(sysconfig.get_path("stdlib"))
    for file in sorted(library.rglob("*.py")):
        if {"site-packages", "test", "tests", "idle_test", "lib2to3"} & set(file.parts):
            continue
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8", errors="ignore"))):
            if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                continue
            said = _SENTENCE.split(inspect.cleandoc(ast.get_docstring(node) or ""), maxsplit=1)
            name, told = tidy(said[0]), tidy(said[1]) if len(said) > 1 else ""
            if len(name.split()) > 2 and name not in seen:
                seen.add(name)
                yield Subject("python", name, told if len(told.split()) > 5 else f"{node.name.replace('_', ' ')}")


def topics() -> Iterator[Subject]:
    """Paragraphs of Python's help, each with the sentence that opens it."""
    for text in pydoc_data.topics.topics.values():
        for paragraph in text.split("\n\n"):
            said = _SENTENCE.split(tidy(re.sub(r"[*`]", "", paragraph)), maxsplit=1)
            if len(said) == 2 and len(said[0].split()) > 4 and len(said[1].split()) > 4:
                yield Subject("python", said[0], said[1])


def drawn(subjects: Iterable[Subject], most: int) -> list[Subject]:
    """Always the same ones of a source, in an order that their texts decide."""
    return sorted(set(subjects), key=lambda each: each.draw // 100)[:most]


def questions(subjects: Sequence[Subject], most: int) -> list[Subject]:
    """Asks for the first of a subject's synonyms, in two ways."""
    rng = random.Random(SEED)
    asked = [each.name.split(", ")[0] for each in rng.sample(subjects, most)]
    ways = [rng.sample(QUESTIONS, 2) for _ in asked]
    return [
        Subject("questions", one.format(word), other.format(word))
        for word, (one, other) in zip(asked, ways, strict=True)
    ]


def everything(wordnet_folder: Path, lists: Path) -> dict[str, list[Subject]]:
    """All subjects of each kind, held out or not."""
    senses = list(wordnet(wordnet_folder))
    return {
        "used": [each for each in senses if each.used],
        "defined": [each for each in senses if not each.used],
        "packages": list(packages(lists)),
        "python": [*python(), *topics()],
    }


def learned(found: Mapping[str, Sequence[Subject]]) -> list[Subject]:
    """What training reads. A text that is also said of something held out counts as held out."""
    kept_back = {text.lower() for each in found.values() for one in each if one.held_out for text in one.texts}
    groups = {
        kind: drawn((one for one in each if not kept_back & {text.lower() for text in one.texts}), SHARES[kind])
        for kind, each in found.items()
    }
    asked = questions([*groups["used"], *groups["defined"]], SHARES["questions"] // 2)
    mixed = [each for group in (*groups.values(), asked) for each in group]
    random.Random(SEED).shuffle(mixed)
    return mixed


def plain(found: Mapping[str, Sequence[Subject]]) -> Iterator[str]:
    """All that is not held out, for the tokenizer."""
    return (text for each in found.values() for one in each if not one.held_out for text in one.texts)
