"""Scores of two texts: which go together, the prompt of a pair, and how two embeddings are compared.

Texts, token ids and arrays alone: no engine is needed, and no torch. NumPy is imported where it is used: an API process
of a model that generates text starts without it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from quintet.chat.lazy_template import render_template
from quintet.engine.pooling.input_processor import PoolingBounds
from quintet.tokenizers.tokenizer import Tokenizer, refuse_surrogates

if TYPE_CHECKING:
    import numpy as np

    Numbers = np.ndarray[Any, np.dtype[np.float32]]

T = TypeVar("T")

LENGTHS = "Input lengths must be either 1:1, 1:N or N:N"
_EPSILON = 1e-8  # of a length that is divided by; torch's


def pairs(data_1: Sequence[T], data_2: Sequence[T]) -> list[tuple[T, T]]:
    """(query, document) for each score: the only query with each document, or each with the document in its place.

    ValueError, in vLLM's words, for other counts.
    """
    if not data_1:
        raise ValueError("At least one text element must be given, and data_1 has none")
    if not data_2:
        raise ValueError("At least one text_pair element must be given, and data_2 has none")
    if len(data_1) not in (1, len(data_2)):
        raise ValueError(f"{LENGTHS}, not {len(data_1)}:{len(data_2)}")
    queries = list(data_1) * len(data_2) if len(data_1) == 1 else data_1
    return list(zip(queries, data_2, strict=True))


def cosine(a: "Numbers", b: "Numbers") -> float:
    """Cosine of two embeddings [n]: 1 for one direction, -1 for opposite ones, 0 where one has no length."""
    import numpy as np

    wide_a, wide_b = a.astype(np.float64), b.astype(np.float64)
    lengths = max(float(np.sqrt(wide_a @ wide_a)), _EPSILON) * max(float(np.sqrt(wide_b @ wide_b)), _EPSILON)
    return min(max(float(wide_a @ wide_b) / lengths, -1.0), 1.0)  # rounding goes past either end


def max_sim(a: "Numbers", b: "Numbers") -> float:
    """Late interaction: for each of the query's tokens [n, h] the best product with one of the document's [m, h], added
    up. Source: Khattab and Zaharia, ColBERT, 2020."""
    if not len(a) or not len(b):
        return 0.0
    return float((a @ b.T).max(1).sum(dtype="float64"))


def compare(bounds: PoolingBounds, task: str, a: "Numbers", b: "Numbers", document_ids: Sequence[int]) -> float:
    """Score of the vectors of a query and a document, by the similarity that the model's files name; cosine or MaxSim
    if they name none. `document_ids`: the document's tokens, which are in the skiplist or not."""
    import numpy as np

    if task == "token_embed":
        if bounds.skiplist_ids and len(document_ids) == len(b):
            b = b[~np.isin(document_ids, bounds.skiplist_ids)]
        return max_sim(a, b) / (len(a) if bounds.similarity == "meanmaxsim" and len(a) else 1)
    wide_a, wide_b = a.astype(np.float64), b.astype(np.float64)
    match bounds.similarity:
        case "dot":
            return float(wide_a @ wide_b)
        case "euclidean":
            return -float(np.sqrt(np.square(wide_a - wide_b).sum()))
        case "manhattan":
            return -float(np.abs(wide_a - wide_b).sum())
    return cosine(a, b)


class PairPrompt(NamedTuple):
    """The prompt of a query and a document."""

    token_ids: list[int]
    types: bytes  # int32, the segment of each id; none: all are of segment 0


@dataclass(frozen=True)
class PairTemplate:
    """Template that joins the two texts of a cross-encoder: a Jinja template of the roles query and document, the
    tokenizer's own template of pairs, or one text behind the other."""

    tokenizer: Tokenizer
    template: str | None = None  # Jinja; None: the tokenizer's own, "rerank", if it has one
    truncates_left: bool = False  # a longer text loses its beginning
    has_separator: bool = True  # by the tokenizer's template of pairs; decoders that rerank have the texts side by side

    def prompt(self, query: str, document: str, cuts: "PairLimits | None" = None) -> PairPrompt:
        """ValueError where a text has lone surrogates, the template fails, or nothing comes of both."""
        cuts = cuts or PairLimits()
        for text, name in ((query, "the query"), (document, "the document")):
            refuse_surrogates(text, name)
        first, second = self.truncate(query, cuts.query), self.truncate(document, cuts.document)
        template = self.own_template if self.template is None else self.template
        pair = self._joined(first, second, template) if template is not None or not self.has_separator else None
        pair = pair or self._separated(first, second, cuts.pair)
        if not pair.token_ids:
            raise ValueError("the pair is empty: it has no tokens; give texts")
        return pair

    @property
    def own_template(self) -> str | None:
        """The tokenizer's Jinja template of a query and a document; None if it has none."""
        named = self.tokenizer.chat_template
        return named.get("rerank") if isinstance(named, dict) else None

    def _joined(self, query: str, document: str, template: str | None) -> PairPrompt:
        """One text of both. It is cut as every other prompt is."""
        text = query + document
        if template is not None:
            messages = [{"role": "query", "content": query}, {"role": "document", "content": document}]
            given = {**self.tokenizer.special_tokens, "messages": messages, "tools": None, "documents": None,
                     "add_generation_prompt": False}  # fmt: skip
            text = render_template(template, given)
        return PairPrompt(self.tokenizer.encode(text), b"")

    def _separated(self, query: str, document: str, most: int | None) -> PairPrompt:
        """As transformers makes a pair: of what is too long, the longer text is cut first."""
        import numpy as np

        backend = self.tokenizer.backend
        first, second = (backend.encode(each, add_special_tokens=False) for each in (query, document))
        if most is not None:
            room = max(most - backend.num_special_tokens_to_add(True), 0)
            keep = _truncated_lengths(len(first.ids), len(second.ids), room)
            direction = "left" if self.truncates_left else "right"
            first.truncate(keep[0], direction=direction)
            second.truncate(keep[1], direction=direction)
        whole = backend.post_process(first, second, True)
        types = np.asarray(whole.type_ids, np.int32)
        return PairPrompt(list(whole.ids), types.tobytes() if types.any() else b"")

    def truncate(self, text: str, most: int | None) -> str:
        """The text of its first tokens, where it has more."""
        if most is None:
            return text
        whole = self.tokenizer.backend.encode(text, add_special_tokens=False)
        if len(whole.ids) <= most:
            return text
        end = whole.offsets[most - 1][1]  # characters: what the tokens stand for, as it was written
        return text[:end]


class PairLimits(NamedTuple):
    """Tokens that are kept at most; None: all."""

    query: int | None = None
    document: int | None = None
    pair: int | None = None  # special ones included


def _truncated_lengths(first: int, second: int, most: int) -> tuple[int, int]:
    """Tokens that are kept of two texts, `most` together."""
    if first + second <= most:
        return first, second
    if 2 * min(first, second) > most:
        half = most // 2
        return (most - half, half) if first > second else (half, most - half)
    return (first, most - first) if first <= second else (most - second, second)
