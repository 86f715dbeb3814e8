"""Structured output: grammars, compiled beside the engine's loop, and each request's position in its grammar."""

import contextlib
import functools
import os
import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import TYPE_CHECKING, Any, Protocol

from quintet.config import StructuredOutputsConfig
from quintet.sampling_params import ParameterError, StructuredOutputsParams
from quintet.structured_output.compile_cache import CompileCache, CompileTimeout
from quintet.structured_output.compile_check import CompileChecker
from quintet.structured_output.compile_worker import MAX_STATES
from quintet.structured_output.grammar_source import grammar_text, llguidance

if TYPE_CHECKING:
    from quintet.interface.types import IntArray
    from quintet.tokenizers.tokenizer import Tokenizer

SECONDS = 10.0  # until a request no longer waits for its grammar
MAX_THREADS = 8  # that fill masks beside one another
WAIT_SECONDS = 0.01  # seconds that an engine with nothing else to do waits for a grammar before it looks around
TIMEOUT_MESSAGE = "they were not compiled in time; simplify them, or try again when less is asked for"
DEFAULTS = StructuredOutputsConfig()


class TokenSequence(Protocol):
    """Tokens of a request: `token_ids[:num_prompt]` are its prompt, `token_ids[num_prompt:num_known]` its output."""

    num_prompt: int
    num_known: int
    token_ids: list[int]


class GrammarCompiler:
    """Compiles what requests ask for, once for all who ask for the same. The library is loaded at the first."""

    def __init__(
        self,
        tokenizer: "Callable[[], Tokenizer | None]",
        vocab_size: int,
        eos_ids: Collection[int],
        config: StructuredOutputsConfig = DEFAULTS,
        seconds: float = SECONDS,
        *,
        is_checked: bool = False,
    ) -> None:
        """`vocab_size` is the model's, the tokenizer may have fewer; it may add to `eos_ids`. A request waits `seconds`
        for its grammar.

        tried: who asks has found out by a trial that it compiles; else that is done here.
        """
        self._tokenizer, self._vocab_size, self._eos_ids = tokenizer, vocab_size, eos_ids
        self._config, self._seconds = config, seconds
        self._compiled = CompileCache(self._compile, seconds)
        self._trials = None if is_checked else CompileChecker()
        self._reading = threading.Lock()
        self._vocabulary: Any = None

    def compile_and_wait(self, wanted: StructuredOutputsParams) -> str:
        """Waits until it is compiled -> its text, for matcher(). ParameterError says why it cannot be."""
        text = grammar_text(wanted, self._config)
        if why := self.matcher(text).wait():
            raise ParameterError("structured_outputs", f"cannot be served: {why}")
        return text

    def matcher(self, text: str) -> "Matcher":
        """Returns the matcher of a new request; its grammar may not be compiled yet."""
        return Matcher(self._compiled(text), time.monotonic() + self._seconds)

    def warm(self) -> None:
        """Reads the vocabulary, so that the first who asks does not wait for that."""
        with contextlib.suppress(ValueError):  # the first request that needs it gets the error
            self._read()

    def close(self) -> None:
        self._compiled.close()
        if self._trials is not None:
            self._trials.close()

    def _compile(self, text: str) -> Any:
        """Compiles a grammar, in a thread of its own. ValueError says what is wrong with it."""
        guidance = llguidance()
        if self._trials is not None and (why := self._trials.compile_error(text)):
            raise ValueError(why)
        vocabulary = self._read()
        limits = guidance.LLParserLimits(max_lexer_states=MAX_STATES, verbose_errors=False)
        made = guidance.LLMatcher(vocabulary, text, log_level=0, limits=limits)
        if made.is_error():
            raise ValueError(_plain(made.get_error()))
        return made

    def _read(self) -> Any:
        """The tokenizer in the library's form: 1.6 s for 150k tokens, in which the library holds Python's lock."""
        with self._reading:
            if self._vocabulary is None:
                self._vocabulary = self._made()
            return self._vocabulary

    def _made(self) -> Any:
        tokenizer = self._tokenizer()
        if tokenizer is None:
            raise ValueError("they need a tokenizer, and the engine was started without one")
        eos_ids = sorted({*self._eos_ids, *(each for each in tokenizer.eos_ids if each < self._vocab_size)})
        if not eos_ids:
            raise ValueError("the model names no end-of-text token; name one in generation_config.json (eos_token_id)")
        text, size = tokenizer.backend.to_str(), self._vocab_size
        try:
            return llguidance().LLTokenizer(text, n_vocab=size, eos_token=eos_ids)
        except ValueError as error:  # of a kind that it does not read, or with more tokens than the model
            raise ValueError(f"llguidance cannot read this model's tokenizer: {_plain(str(error))}") from None


class Matcher:
    """Position of one request's output in its grammar. The output alone decides it, so freed pages lose nothing."""

    def __init__(self, compiled: "Future[Any]", deadline: float) -> None:
        self.compiled, self._deadline = compiled, deadline
        self._state: Any = None  # the library's, once it is needed
        self._taken = 0  # tokens of the output that the state has consumed
        self._chain: tuple[int, list[int]] = (0, [])  # what the grammar alone decides, from this place of the output on

    @property
    def ready(self) -> bool:
        """True if the grammar is compiled."""
        return self.compiled.done() and self.compiled.exception() is None

    def refused(self) -> str:
        """Returns why the grammar will not be compiled; empty if it is, or still may be."""
        if self.compiled.done():
            error = self.compiled.exception()
            if isinstance(error, CompileTimeout):
                return TIMEOUT_MESSAGE
            return "" if error is None else str(error) or type(error).__name__
        return TIMEOUT_MESSAGE if time.monotonic() > self._deadline else ""

    def wait(self) -> str:
        """Waits until the grammar is compiled or refused, and returns refused()."""
        while not self.ready and not self.refused():
            wait([self.compiled], max(0.0, self._deadline - time.monotonic()))
        return self.refused()

    @property
    def complete(self) -> bool:
        """True if only end-of-text may follow."""
        return self._state is not None and bool(self._state.is_stopped())

    def reset(self) -> None:
        """Drops the state, so that the whole output is consumed anew: a step may have failed while it did so."""
        self._state, self._taken = None, 0

    def advance(self, request: TokenSequence) -> str:
        """Consumes the output tokens since the last call, or rolls removed ones back -> why it cannot go on, if so."""
        if self._state is None:
            self._state = self.compiled.result().deep_copy()
        start = request.num_prompt
        known = request.num_known - start
        if known < self._taken:
            self._state.rollback(self._taken - known)
        elif known > self._taken:
            self._state.consume_tokens(request.token_ids[start + self._taken : start + known])
        self._taken = known
        return _plain(self._state.get_error()) if self._state.is_error() else ""

    def allows(self, request: TokenSequence, ahead: Sequence[int]) -> bool:
        """Returns whether these tokens may come next, in this order; True if the output has ended."""
        self.advance(request)
        if self._state.is_stopped() or self._state.is_error():
            return True
        taken = self._state.try_consume_tokens(list(ahead))
        if taken:
            self._state.rollback(taken)
        return bool(taken == len(ahead))

    def forced_token(self) -> int:
        """The first of num_forced."""
        start, ids = self._chain
        return ids[self._taken - start]

    @property
    def num_forced(self) -> int:
        """Number of next tokens that the grammar alone decides: it leaves one text, and they are the tokenizer's tokens
        of that. 0: the model chooses, or the output has ended."""
        start, ids = self._chain
        if start <= self._taken < start + len(ids):
            return start + len(ids) - self._taken
        if self._state is None or self._state.is_stopped() or self._state.is_error():
            return 0
        ids = self._state.compute_ff_tokens()  # of all of the text: to ask after each costs its length each time
        self._chain = self._taken, ids
        return len(ids)

    def allowed_after(self, output_ids: Sequence[int]) -> "IntArray | None":
        """Ids [N] that may follow these tokens of an output; None: it is complete, or the grammar refuses it."""
        import numpy as np  # processes that only admit requests need none

        state = self.compiled.result().deep_copy()
        if not state.consume_tokens(list(output_ids)) or state.is_stopped():
            return None
        bits = np.frombuffer(state.compute_bitmask(), np.uint8)
        return np.flatnonzero(np.unpackbits(bits, bitorder="little")).astype(np.int32)

    def fill(self, words: "IntArray", ahead: Sequence[int] = ()) -> Any:
        """words [W] int32, W at least ceil(V / 32): a bit for each token that may come next, of V the tokenizer's.

        With `ahead`, next after those drafts. Where the grammar refuses one of them every bit is set: it is not drawn,
        and what would follow is not looked at. So it is where the output has ended, and its row still runs.
        Where the model may choose what follows all that is known, the library's state is given back, for fill_all().
        """
        if self._state.is_stopped() or self._state.is_error():
            words[:] = -1
        elif ahead:
            self._fill_after(words, ahead)
        elif not self.num_forced:
            return self._state
        else:
            token_id = self.forced_token()
            words[:] = 0
            words.view("uint32")[token_id // 32] = 1 << token_id % 32
        return None

    def _fill_after(self, words: "IntArray", drafts: Sequence[int]) -> None:
        taken = self._state.try_consume_tokens(list(drafts))
        if taken < len(drafts):
            words[:] = -1
        else:
            self._state.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        if taken:
            self._state.rollback(taken)


def fill_all(states: "Sequence[tuple[Any, int]]", bits: "IntArray") -> None:
    """bits [R, W] int32 of the library's states, each with its row; beside one another, off Python's lock."""
    if len(states) == 1:
        ((state, row),) = states
        state.unsafe_compute_mask_ptr(bits[row].ctypes.data, bits[row].nbytes)
    elif states:
        _executor().unsafe_compute_mask_ptr(states, bits.ctypes.data, bits[0].nbytes, len(bits))


@functools.cache
def _executor() -> Any:
    return llguidance().LLExecutor(min(len(os.sched_getaffinity(0)), MAX_THREADS))


def wait_for_any(matchers: "Iterable[Matcher | None]") -> None:
    """Waits until one of the grammars is compiled, at most WAIT_SECONDS seconds."""
    wait([each.compiled for each in matchers if each is not None], WAIT_SECONDS, FIRST_COMPLETED)


def _plain(error: str) -> str:
    """The library's message on one line."""
    return " ".join(error.replace("<non-verbose/>", "").split())
