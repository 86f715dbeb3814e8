"""Counts the reasoning tokens of an output, found by the tokens that mark their begin and end."""

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from quintet.config import ReasoningConfig
from quintet.parsers import FROM_CHECKPOINT, REASONING_PARSERS, ReasoningParser, detect

if TYPE_CHECKING:
    from quintet.tokenizers.tokenizer import Tokenizer

Ids = tuple[int, ...]
UNMARKED = "the reasoning markers of this model are unknown; name a reasoning parser (--reasoning-parser)"
WRITTEN = "the model writes the markers of its thoughts, {}, as text and not as tokens of their own; leave it out"
DEFAULTS = ReasoningConfig()
NOT_REASONING = -1  # of thought_of(): the prompt has begun no thought


@dataclass(frozen=True)
class ReasoningMarkerIds:
    """Tokens that begin and end a model's reasoning. Encodes with msgspec.

    `forced` is output when reasoning exceeds its budget; it ends with an end marker.
    """

    opens: tuple[Ids, ...]
    closes: tuple[Ids, ...]
    forced: Ids


class ReasoningMarkers(NamedTuple):
    """Reasoning markers of one model, with its tokenizer and parser."""

    tokenizer: "Tokenizer"
    parser: ReasoningParser
    marks: ReasoningMarkerIds

    def open_tokens(self, prompt: Sequence[int]) -> int:
        """See thought_of()."""
        return open_reasoning_tokens(self.tokenizer, self.parser, self.marks, prompt)


def response_template(name: str, tokenizer: "Tokenizer | None") -> Mapping[str, Any] | None:
    """Returns the checkpoint's response_template, for a parser that reads it; None for others, and if it has none."""
    if tokenizer is None or name not in FROM_CHECKPOINT:
        return None
    hf = tokenizer.hf
    found = getattr(hf, "response_template", None) or getattr(hf, "init_kwargs", {}).get("response_template")
    return found if isinstance(found, Mapping) else None


def find_parser(name: str | None, template: str, family: str, tokenizer: "Tokenizer | None") -> ReasoningParser | None:
    """The one of that name ("none": none), or else the one that fits."""
    added: Container[str] = () if tokenizer is None else tokenizer.added
    name = name or detect(template, family)[1] or ("think" if "<think>" in added and "</think>" in added else "none")
    return None if name == "none" else REASONING_PARSERS.get(name, response_template(name, tokenizer))


def find_reasoning_markers(
    tokenizer: "Tokenizer | None", parser: ReasoningParser | None, config: ReasoningConfig = DEFAULTS
) -> ReasoningMarkers | str:
    """Returns the model's reasoning markers; or why its reasoning cannot be found by tokens."""
    if tokenizer is None or parser is None:
        return UNMARKED
    marks = reasoning_marker_ids(tokenizer, parser, config.reasoning_start_str or "", config.reasoning_end_str or "")
    shown = " and ".join(repr(each) for each in (*parser.opens[:1], *parser.closes[:1]))
    return WRITTEN.format(shown) if marks is None else ReasoningMarkers(tokenizer, parser, marks)


def reasoning_marker_ids(
    tokenizer: "Tokenizer", parser: ReasoningParser, start: str = "", end: str = ""
) -> ReasoningMarkerIds | None:
    """Returns the markers that are tokens of the vocabulary; None where the model writes them as text, which may be cut
    into tokens in many ways.

    `start` and `end` stand in the parser's place (vLLM's reasoning_start_str and reasoning_end_str); an end may have
    words before it, which are output where an end is forced.
    """

    def exact(texts: Iterable[str]) -> tuple[Ids, ...]:
        found = (tuple(tokenizer.encode(text, add_special_tokens=False)) for text in texts)
        return tuple(ids for ids in found if ids and ids[0] in own)

    own = set(tokenizer.added.values())
    opens, closes = exact([start] if start else parser.opens), exact(parser.closes)
    until = exact(parser.until)
    forced = tuple(tokenizer.encode(end, add_special_tokens=False)) if end else (closes[0] if closes else ())
    if not any(_place(forced, each) >= 0 for each in closes) and forced and forced[0] in own:
        closes = (*closes, forced)
    stops = [_place(forced, each) + len(each) for each in closes if _place(forced, each) >= 0]
    texts = {text: bool(exact([text])) for text in parser.opens}
    # a marker that also ends one which is written as text may end anything
    unclear = any(
        known and not other and text.endswith(mark) for mark, known in texts.items() for text, other in texts.items()
    )
    return ReasoningMarkerIds(opens, closes + until, forced[: min(stops)]) if opens and stops and not unclear else None


def open_reasoning_tokens(
    tokenizer: "Tokenizer", parser: ReasoningParser, marks: ReasoningMarkerIds, prompt: Sequence[int]
) -> int:
    """Counts the tokens of open reasoning at the prompt's end, which the output goes on with; NOT_REASONING if it has
    none.

    Only the last turn is searched: a marker that an earlier turn mentions does not count.
    """
    for end in range(len(prompt), 0, -1):
        if any(tuple(prompt[end - len(mark) : end]) == mark for mark in marks.closes):
            return NOT_REASONING
        if any(tuple(prompt[end - len(mark) : end]) == mark for mark in marks.opens):
            return len(prompt) - end
        if prompt[end - 1] in tokenizer.special_ids:
            break
    tail = tokenizer.decode(list(prompt[-8:]), skip_special_tokens=False)
    return 0 if parser.begins_inside(tail) else NOT_REASONING


class ReasoningCounter:
    """Counts the reasoning tokens of an output as it grows, markers left out."""

    def __init__(self, marks: ReasoningMarkerIds, begun: int = NOT_REASONING) -> None:
        """`begun`: see thought_of()."""
        self._marks, self.inside, self.used = marks, begun >= 0, max(begun, 0)
        self._begun = self.used
        self._most = max(map(len, (*marks.opens, *marks.closes, marks.forced)))
        self._lasts = {mark[-1] for mark in (*marks.opens, *marks.closes)}
        self._tail: Ids = ()  # the latest tokens, since the last marker

    @property
    def num_tokens(self) -> int:
        """Tokens of thought, those of the prompt left out."""
        return max(0, self.used - self._begun)

    def advance(self, token_ids: Iterable[int]) -> "ReasoningCounter":
        """Counts the next tokens of the output."""
        ids, start = list(token_ids), 0
        for place, token_id in enumerate(ids):  # most tokens end no marker, and answers may be long
            if token_id in self._lasts:
                self._pass(ids[start:place])
                self._take(token_id)
                start = place + 1
        self._pass(ids[start:])
        return self

    def after(self, drafts: Sequence[int]) -> "ReasoningCounter":
        """Returns the state after these drafts too; this one stays as it is."""
        if not drafts:
            return self
        other = ReasoningCounter.__new__(ReasoningCounter)
        other.__dict__.update(self.__dict__)
        return other.advance(drafts)

    def forced_token(self, budget: int) -> int | None:
        """The token that must come next, where so many have been thought."""
        if not self.inside or self.used < budget:
            return None
        end = self._marks.forced
        marker = next(
            count for count in range(len(end) - 1, -1, -1) if self._tail[len(self._tail) - count :] == end[:count]
        )
        return end[marker]

    def _pass(self, ids: Sequence[int]) -> None:
        """Counts tokens that end no marker."""
        self.used += len(ids) if self.inside else 0
        self._tail = (*self._tail, *ids[-self._most :])[-self._most :]

    def _take(self, token_id: int) -> None:
        self._tail = (*self._tail, token_id)[-self._most :]
        self.used += self.inside
        for mark in self._marks.closes if self.inside else self._marks.opens:
            if self._tail[-len(mark) :] == mark:
                self.used -= len(mark) if self.inside else 0
                self.inside, self._tail = not self.inside, ()
                return


def _place(ids: Sequence[int], wanted: Ids) -> int:
    """Returns the first position of `wanted` in the ids; -1 if there is none."""
    return next((at for at in range(len(ids) - len(wanted) + 1) if tuple(ids[at : at + len(wanted)]) == wanted), -1)
