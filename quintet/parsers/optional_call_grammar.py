"""Grammars of answers that may call: any text, and from a call's first marker on the call that the grammar knows."""

import itertools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from quintet.parsers.combinators import Marker
from quintet.parsers.lark_grammar import GAP, NOTHING, TEXT, LarkGrammar, NoGrammar, quoted

if TYPE_CHECKING:
    from quintet.parsers.formats import CallBlock, ReasoningParser


class OptionalCallGrammar:
    """Writes one. `special`: the tokens that no text can match, and their ids."""

    def __init__(self, lark: LarkGrammar, special: Mapping[str, int], reasoning: "ReasoningParser | None") -> None:
        self._lark, self._special = lark, special
        self._taken: set[int] = set()  # special tokens that begin calls, and nothing else
        self._text = TEXT  # a terminal's expression: what stands between calls
        self._thoughts = reasoning

    def grammar_text(self, blocks: "Sequence[CallBlock]", inside: bool, parallel: bool) -> str:
        """The whole grammar. Raises NoGrammar where a call's first marker may as well be something else."""
        if not all(block.certain for block in blocks):
            raise NoGrammar
        starts = [mark for block in blocks if block.anchored for mark in block.sequence[0].marks()]
        if starts:
            marks = " | ".join(map(quoted, starts))
            self._text = f"{TEXT} & ~(/\\s*/ ({marks}) {TEXT})"
        calls = self._lark.rule(" | ".join(self._call(block) for block in blocks))
        begun = self._begun()
        pieces = [f"{each} {self._thought()}" for each in begun] + ([calls] if parallel else [])
        if others := self._others({*self._taken, *self._opening()}):
            pieces.append(f"{self._some_text()} {others}")
        ends = [self._some_text(), *(f"{each} {self._unfinished()}" for each in begun), *([] if parallel else [calls])]
        rest = self._lark.rule(f"({' | '.join(pieces) or NOTHING})* ({' | '.join(ends)})")
        if not inside or self._thoughts is None:
            return self._lark.text(rest)
        return self._lark.text(f"{self._thought()} {GAP} {rest} | {self._unfinished()}")

    def _call(self, block: "CallBlock") -> str:
        """From the text before it on."""
        first = block.sequence[0]
        if block.anchored:
            return f"{GAP} {self._lark.sequence(block.sequence)}"
        if not isinstance(first, Marker):
            raise NoGrammar
        mark = first.text.strip()
        rest = (Marker(first.text.lstrip()[len(mark) :]), *block.sequence[1:])
        return f"({' | '.join(self._text_until(mark))}) {self._lark.sequence(rest)}"

    def _text_until(self, mark: str) -> list[str]:
        """Text that ends with the marker, written as a token or out of letters."""
        spelled = self._lark.rule(self._lark.terminal(f"({self._text}) {quoted(mark)}"), "[lazy]")
        found = self._lark.first_special(mark)
        if found is None:
            return [spelled]
        before, token, after = found
        self._taken.add(self._special[token])
        text = self._lark.terminal(f"({self._text}) {quoted(before)}")
        return [spelled, f"{text} {self._lark.literal(token + after)}"]

    def _some_text(self) -> str:
        return self._lark.terminal(self._text)

    def _opening(self) -> list[int]:
        opens = self._thoughts.opens if self._thoughts else ()
        return [self._special[each] for each in opens if each in self._special]

    def _begun(self) -> list[str]:
        """Returns the ways to begin a thought: out of letters, where text begins; a token may stand anywhere."""
        opens = self._thoughts.opens if self._thoughts else ()
        spelled = [quoted(each) for each in opens if each not in self._special]
        begun = [self._lark.rule(self._lark.terminal(f"/\\s*/ {each}"), "[lazy]") for each in spelled]
        return begun + [f"{self._some_text()} <[{token}]>" for token in self._opening()]

    def _thought(self) -> str:
        """Returns the rest of a thought, up to its end."""
        assert self._thoughts is not None
        closes = self._thoughts.closes
        spelled = " | ".join(quoted(each) for each in closes if each not in self._special)
        ends = [f"{TEXT} <[{self._special[each]}]>" for each in closes if each in self._special]
        ends += [self._lark.rule(self._lark.terminal(f"{TEXT} ({spelled})"), "[lazy]")] if spelled else []
        return f"{self._within()} ({' | '.join(ends)})"

    def _unfinished(self) -> str:
        return f"{self._within()} {TEXT}"

    def _within(self) -> str:
        """Returns all of a thought but the text before its end."""
        assert self._thoughts is not None
        others = self._others({self._special[each] for each in self._thoughts.closes if each in self._special})
        return f"({TEXT} {others})*" if others else ""

    def _others(self, but: set[int]) -> str:
        """All special tokens but these; empty if there are none."""
        ids = sorted({*self._special.values()} - but)
        runs = [list(run) for _, run in itertools.groupby(enumerate(ids), lambda each: each[1] - each[0])]
        ranges = [f"{run[0][1]}-{run[-1][1]}" if len(run) > 1 else str(run[0][1]) for run in runs]
        return f"<[{','.join(ranges)}]>" if ranges else ""
