"""Structured output: grammars, compiled beside the engine's loop, and each request's position in its grammar."""

import contextlib
import functools
import os
import threading
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import wait
from typing import TYPE_CHECKING, Any, Protocol

from quintet.common.free_memory import release_free_memory
from quintet.config import StructuredOutputsConfig
from quintet.sampling_params import ParameterError, StructuredOutputsParams
from quintet.structured_output.compile_cache import CompileCache, CompileTimeout
from quintet.structured_output.compile_check import CompileChecker
from quintet.structured_output.compile_worker import SLOW_MASKS, mask_error, one_line, parser_limits
from quintet.structured_output.grammar_source import grammar_text, llguidance
from quintet.structured_output.vocabulary import ByteVocabulary
from quintet.structured_output.xgrammar_backend import XGrammarCompiler, XGrammarState, check_installed
from quintet.structured_output.xgrammar_source import xgrammar_source

if TYPE_CHECKING:
    from quintet.interface.types import IntArray
    from quintet.tokenizers.tokenizer import Tokenizer

SECONDS = 10.0  # until a request no longer waits for its grammar
MASK_SHARE = 0.05  # of them: seconds of a processor for the first mask
MAX_THREADS = 8  # that fill masks beside one another
# Seconds of a processor that a request's grammar may take: at first, and for each token. Requests that are slow at the
# same time share them, for the steps of all others are as slow.
FIRST_SECONDS, TOKEN_SECONDS = 0.5, 0.02
SLOW_SECONDS = 0.005  # for each token, from which a request counts as slow
TIMED_STEPS = 32  # in which masks are filled one by one, to find out which are slow
BATCH_SECONDS = 0.001  # counted at most for each of masks that are filled together: the time is not the processor's
WATCHED_CALLS = 16  # whose time is counted after a slow one
STATES_SECONDS = 5e-5, 2e-9  # of a mask, and for each token of the vocabulary: what takes longer makes states
LATE_MESSAGE = "structured_outputs ended: their masks take too long to compute; simplify them"
NO_TOKENS = "the model's tokenizer has no tokens for a text that they ask for"
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
        for its grammar, whose first mask may take a share of them.

        `is_checked`: the caller has found out by a trial that grammars compile; else that is done here.
        """
        if config.backend == "xgrammar":
            check_installed()
        self._tokenizer, self._vocab_size, self._eos_ids = tokenizer, vocab_size, eos_ids
        self._config, self._seconds = config, seconds
        self._compiled = CompileCache(self._compile, seconds)
        self._trials = None if is_checked else CompileChecker()
        self._reading = threading.Lock()
        self._vocabulary: Any = None
        self._xgrammar: XGrammarCompiler | None = None

    def compile_and_wait(self, wanted: StructuredOutputsParams) -> str:
        """Waits until it is compiled -> its text, for matcher(). ParameterError says why it cannot be."""
        names_tokens = wanted.grammar is not None or wanted.structural_tag is not None
        text = grammar_text(wanted, self._config, self._tokenizer() if names_tokens else None)
        if xgrammar_source(text) is not None:
            self._start_xgrammar()
        if why := self.matcher(text).wait():
            raise ParameterError("structured_outputs", f"cannot be served: {why}")
        return text

    def matcher(self, text: str) -> "Matcher":
        """Returns the matcher of a new request; its grammar may not be compiled yet."""
        return Matcher(self._compiled, text, self._vocab_size)

    def warm(self) -> None:
        """Reads the vocabulary, so that the first who asks does not wait for that."""
        with contextlib.suppress(ValueError):  # the first request that needs it gets the error
            self._read()
            if self._config.backend == "xgrammar":
                self._start_xgrammar()

    def close(self) -> None:
        self._compiled.close()
        if self._xgrammar is not None:
            self._xgrammar.close()
        if self._trials is not None:
            self._trials.close()

    def _compile(self, text: str) -> Any:
        """Compiles a grammar, in a thread of its own. ValueError says what is wrong with it."""
        guidance = llguidance()
        if self._trials is not None and (why := self._trials.compile_error(text)):
            raise ValueError(why)
        if (source := xgrammar_source(text)) is not None:
            return self._compile_xgrammar(source)
        compiled = guidance.LLMatcher(self._read(), text, log_level=0, limits=parser_limits())
        if compiled.is_error():
            raise ValueError(one_line(compiled.get_error()))
        start = time.thread_time()
        forced = compiled.compute_ff_tokens()
        compiled.compute_bitmask()  # it makes most of the lexer, which all requests share
        if compiled.is_error():
            raise ValueError(mask_error(compiled.get_error()))
        if time.thread_time() - start > MASK_SHARE * self._seconds:
            raise ValueError(SLOW_MASKS)
        trial = compiled.deep_copy()
        if forced and not trial.consume_tokens(forced):
            no_token = forced[-1] in self._vocabulary.eos_tokens
            raise ValueError(NO_TOKENS if no_token else one_line(trial.get_error()))
        return compiled

    def _read(self) -> Any:
        """The tokenizer in the library's form: 1.6 s for 150k tokens, in which the library holds Python's lock."""
        with self._reading:
            if self._vocabulary is None:
                self._vocabulary = self._made()
                release_free_memory()
            return self._vocabulary

    def _start_xgrammar(self) -> XGrammarCompiler:
        """Returns its compiler once its process has the vocabulary: the first call takes some seconds."""
        with self._reading:
            if self._xgrammar is None:
                self._xgrammar = XGrammarCompiler(*self._bytes())
            return self._xgrammar

    def _compile_xgrammar(self, source: Sequence[Any]) -> XGrammarState:
        state = self._start_xgrammar().compile(source)
        if not any(state.compute_bitmask()):
            raise ValueError(NO_TOKENS)
        return state

    def _made(self) -> Any:
        vocabulary, eos_ids = self._bytes()
        return llguidance().LLTokenizer(vocabulary, eos_token=eos_ids)

    def _bytes(self) -> tuple[ByteVocabulary, list[int]]:
        """Returns the bytes of each token, and the tokens that end a text."""
        tokenizer = self._tokenizer()
        if tokenizer is None:
            raise ValueError("they need a tokenizer, and the engine was started without one")
        eos_ids = sorted({*self._eos_ids, *(each for each in tokenizer.eos_ids if each < self._vocab_size)})
        if not eos_ids:
            raise ValueError("the model names no end-of-text token; name one in generation_config.json (eos_token_id)")
        return ByteVocabulary(tokenizer, self._vocab_size, eos_ids), eos_ids


class Matcher:
    """Position of one request's output in its grammar. The output alone decides it, so freed pages lose nothing."""

    what = "structured_outputs"

    def __init__(self, cache: CompileCache, text: str, vocab_size: int) -> None:
        self._cache, self._text, self._deadline = cache, text, time.monotonic() + cache.seconds
        self.future = cache(text)  # the compilation
        self._state: Any = None  # the library's, once it is needed
        self._taken = 0  # tokens of the output that the state has consumed
        self._chain: tuple[int, list[int]] = (0, [])  # what the grammar alone decides, from this place of the output on
        self._clock, self._watched = time.perf_counter, 0  # the latter: calls whose processor time is still counted
        self._seconds = 0.0  # of a processor, for masks and tokens
        self._free_seconds = max(STATES_SECONDS[0], vocab_size * STATES_SECONDS[1])
        self.is_slow = False  # True: its tokens take so long that steps are slower

    @property
    def ready(self) -> bool:
        """True if the grammar is compiled."""
        return self.future.done() and self.future.exception() is None

    def refused(self) -> str:
        """Returns why the grammar will not be compiled; empty if it is, or still may be."""
        if self.future.done():
            error = self.future.exception()
            if isinstance(error, CompileTimeout):
                return TIMEOUT_MESSAGE
            return "" if error is None else str(error) or type(error).__name__
        return TIMEOUT_MESSAGE if time.monotonic() > self._deadline else ""

    def wait(self) -> str:
        """Waits until the grammar is compiled or refused, and returns refused()."""
        while not self.ready and not self.refused():
            wait([self.future], max(0.0, self._deadline - time.monotonic()))
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
            self._state = self.future.result().deep_copy()
        start = request.num_prompt
        known = request.num_known - start
        if known < self._taken:
            self._state.rollback(self._taken - known)
        elif known > self._taken:
            self._timed(self._state.consume_tokens, request.token_ids[start + self._taken : start + known])
        self._taken = known
        if not self._state.is_error():
            return ""
        self._cache.forget(self._text, self.future)  # its lexer may be full, and no request gets further than this
        return one_line(self._state.get_error())

    def _timed(self, call: "Callable[..., Any]", *args: Any) -> Any:
        """Returns what a call of the library returns. Once one was slow, the processor's time of the next is counted:
        to read that clock costs as much as a mask."""
        clock = self._clock
        begin = clock()
        result = call(*args)
        seconds = clock() - begin
        if seconds > self._free_seconds:
            self._clock, self._watched = time.thread_time, WATCHED_CALLS
        if clock is time.thread_time:
            self._add_time(seconds)
        return result

    def _add_time(self, seconds: float) -> None:
        self._seconds += seconds
        self.is_slow = self._seconds > SLOW_SECONDS * (self._taken + 1)
        self.grow(seconds)
        self._watched -= 1
        if not self._watched:
            self._clock = time.perf_counter

    def grow(self, seconds: float) -> None:
        """Counts the memory of the lexer's states that were made in this time."""
        if seconds > self._free_seconds:
            self._cache.grow(self._text, self.future, seconds)

    def is_late(self, num_slow: int) -> bool:
        """True if it has taken more than its share of time, being one of so many slow ones."""
        return self._seconds > (FIRST_SECONDS + TOKEN_SECONDS * self._taken) / num_slow

    def count_allowed(self, request: TokenSequence, ahead: Sequence[int]) -> int:
        """Returns how many of these tokens may come next, in this order, up to the first that may not; all of them if
        the output has ended."""
        self.advance(request)
        if self._state.is_stopped() or self._state.is_error():
            return len(ahead)
        taken = int(self._state.try_consume_tokens(list(ahead)))
        if taken:
            self._state.rollback(taken)
        return taken

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
        # of all of the text: to ask after each token costs its length each time
        ids = self._timed(self._state.compute_ff_tokens)
        self._chain = self._taken, ids
        return len(ids)

    def allowed_after(self, output_ids: Sequence[int]) -> "IntArray | None":
        """Ids [N] that may follow these tokens of an output; None: it is complete, or the grammar refuses it."""
        import numpy as np  # processes that only admit requests need none

        state = self.future.result().deep_copy()
        if not state.consume_tokens(list(output_ids)) or state.is_stopped():
            return None
        bits = np.frombuffer(state.compute_bitmask(), np.uint8)
        return np.flatnonzero(np.unpackbits(bits, bitorder="little")).astype(np.int32)

    def fill(self, words: "IntArray", ahead: Sequence[int] = ()) -> "Matcher | None":
        """words [W] int32, W at least ceil(V / 32): a bit for each token that may come next, of V the tokenizer's.

        With `ahead`, next after those drafts. Where the grammar refuses one of them every bit is set: it is not drawn,
        and what would follow is not looked at. So it is where the output has ended, and its row still runs.
        Where the model may choose what follows all that is known, the matcher is returned, for MaskFiller.
        """
        if self._state.is_stopped() or self._state.is_error():
            words[:] = -1
        elif ahead:
            self._fill_after(words, ahead)
        elif not self.num_forced:
            return self
        else:
            token_id = self.forced_token()
            words[:] = 0
            words.view("uint32")[token_id // 32] = 1 << token_id % 32
        return None

    def fill_now(self, words: "IntArray") -> None:
        """Fills words [W] int32 with what may come next, and counts the time."""
        self._timed(self._state.unsafe_compute_mask_ptr, words.ctypes.data, words.nbytes)

    @property
    def state(self) -> Any:
        """The library's matcher, after advance()."""
        return self._state

    def _fill_after(self, words: "IntArray", drafts: Sequence[int]) -> None:
        taken = self._state.try_consume_tokens(list(drafts))
        if taken < len(drafts):
            words[:] = -1
        else:
            self.fill_now(words)
        if taken:
            self._state.rollback(taken)


class MaskFiller:
    """Fills the masks of a step beside one another, off Python's lock; where that was slow, one by one for some steps,
    to find the matchers that are slow."""

    def __init__(self) -> None:
        self._timed_steps = 0  # that are left

    def __call__(self, matchers: "Sequence[tuple[Matcher, int]]", bits: "IntArray") -> None:
        """bits [R, W] int32 of the matchers that Matcher.fill() has returned, each with its row."""
        if (
            len(matchers) > 1
            and not self._timed_steps
            and not any(isinstance(matcher.state, XGrammarState) for matcher, _ in matchers)
        ):
            begin, states = time.perf_counter(), [(matcher.state, row) for matcher, row in matchers]
            _executor().unsafe_compute_mask_ptr(states, bits.ctypes.data, bits[0].nbytes, len(bits))
            each = (time.perf_counter() - begin) * min(_num_threads(), len(matchers)) / len(matchers)
            if each > SLOW_SECONDS:
                self._timed_steps = TIMED_STEPS
            else:
                for matcher, _ in matchers:
                    matcher.grow(min(each, BATCH_SECONDS))
            return
        self._timed_steps = max(0, self._timed_steps - 1)
        for matcher, row in matchers:
            matcher.fill_now(bits[row])


@functools.cache
def _num_threads() -> int:
    return min(len(os.sched_getaffinity(0)), MAX_THREADS)


@functools.cache
def _executor() -> Any:
    return llguidance().LLExecutor(_num_threads())
