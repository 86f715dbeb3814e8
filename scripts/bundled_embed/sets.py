"""What the model is measured on: subjects that training never saw. A query, and the one document that answers it."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from .texts import Subject, drawn

ASKED, BEHIND = 200, 400  # queries of a set, and documents that answer none of them
TOP = 10
UNSHIPPED = "title to description"  # the texts are under the licences of their packages

ALIKE = [  # (a text, one of the same meaning in other words, one that shares words and means something else)
    ("A kitten is asleep on the couch.", "The cat naps on the sofa.", "The couch is on sale."),
    ("How do I make a copy of a file?", "duplicating documents on disk", "How do I make a cup of coffee?"),
    ("The doctor wrote a prescription.", "A physician ordered medicine for the patient.", "The author wrote a novel."),
    ("He was very angry.", "The man was furious.", "He was very tall."),
    ("The stock market fell sharply.", "Share prices dropped a lot.", "The boy fell off his bicycle."),
    ("It is raining heavily outside.", "There is a storm with a downpour.", "It is expensive to eat outside."),
    ("A cat.", "Kittens.", "Tax law."),
]


@dataclass(frozen=True)
class Retrieval:
    """Query i is answered by document i."""

    name: str
    queries: Sequence[str]
    documents: Sequence[str]


def _pairs(name: str, subjects: Sequence[Subject], pair: Callable[[Subject], tuple[str, str]]) -> Retrieval:
    queries, documents = [], []
    for each in subjects:
        query, document = pair(each)
        if document not in documents and query not in queries:
            queries.append(query)
            documents.append(document)
    return Retrieval(name, queries[:ASKED], documents[: ASKED + BEHIND])


def held_out(found: Mapping[str, Sequence[Subject]]) -> list[Retrieval]:
    most = 2 * (ASKED + BEHIND)
    kept = {kind: drawn((each for each in subjects if each.held_out), most) for kind, subjects in found.items()}
    python = [each for each in kept["python"] if len(each.told.split()) > 5]
    return [
        _pairs("definition to example", kept["used"], lambda each: (each.told, each.used)),
        _pairs("definition to word", kept["used"], lambda each: (each.told, each.name)),
        _pairs("summary to details", python, lambda each: (each.name, each.told)),
        _pairs(UNSHIPPED, kept["packages"], lambda each: (each.name, each.told)),
    ]


def write(found: Mapping[str, Sequence[Subject]], file: Path) -> None:
    content = [
        {"name": each.name, "queries": each.queries, "documents": each.documents}
        for each in held_out(found)
        if each.name != UNSHIPPED
    ]
    file.write_text(json.dumps(content, ensure_ascii=False, indent=0) + "\n", encoding="utf-8")


def read(file: Path) -> list[Retrieval]:
    return [Retrieval(**each) for each in json.loads(file.read_text(encoding="utf-8"))]


def measured(scores: Sequence[Sequence[float]]) -> tuple[float, float]:
    """(nDCG@10, recall@10) of scores[query][document], where one document is right. Those that score as well as it
    stand before it."""
    ranks = [sum(score >= each[at] for score in each) for at, each in enumerate(scores)]
    gains = [1 / math.log2(rank + 1) if rank <= TOP else 0.0 for rank in ranks]
    return sum(gains) / len(ranks), sum(rank <= TOP for rank in ranks) / len(ranks)
