"""What outputs must look like: grammars, compiled beside the engine's loop, and where each request stands in one."""

import json
import queue
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from functools import partial
from typing import TYPE_CHECKING, Any

from quintet.config import StructuredOutputsConfig
from quintet.sampling_params import ParameterError, StructuredOutputsParams

if TYPE_CHECKING:
    from quintet.engine.request import Request
    from quintet.engine.tokenizer import Tokenizer
    from quintet.types import Array

THREADS = 2  # that compile; more would take the cores that steps are launched from
SECONDS = 10.0  # until a request no longer waits for its grammar
MOMENT = 0.01  # seconds that an engine with nothing else to do waits for a grammar before it looks around
REMEMBERED = 256  # compiled grammars
MAX_SIZE = 2**20  # characters of a grammar
MAX_STATES = 50_000  # of a grammar's lexer, 1 to 2 kB each
DEFAULTS = StructuredOutputsConfig()


class Grammars:
    """Compiles what requests ask for, once for all who ask for the same. The library is loaded at the first."""

    def __init__(
        self,
        tokenizer: "Callable[[], Tokenizer | None]",
        vocab_size: int,
        eos_ids: Collection[int],
        config: StructuredOutputsConfig = DEFAULTS,
        seconds: float = SECONDS,
    ) -> None:
        """`vocab_size` is the model's, the tokenizer may have fewer. A request waits `seconds` for its grammar."""
        self._tokenizer, self._vocab_size, self._eos_ids = tokenizer, vocab_size, sorted(eos_ids)
        self._config, self._seconds = config, seconds
        self._pool = _Pool()
        self._lock = threading.Lock()  # of what follows
        self._compiled: OrderedDict[str, Future[Any]] = OrderedDict()  # the last used at the end
        self._reading = threading.Lock()
        self._vocabulary: Any = None

    def check(self, wanted: StructuredOutputsParams) -> None:
        """Waits until it is compiled; ParameterError says why it cannot be."""
        if why := self.matcher(wanted).wait():
            raise ParameterError("structured_outputs", f"cannot be served: {why}")

    def matcher(self, wanted: StructuredOutputsParams) -> "Matcher":
        """For a new request; it may not be ready yet."""
        text = grammar_text(wanted, self._config)
        with self._lock:
            found = self._compiled.pop(text, None)
            if found is None:
                found = self._pool.submit(partial(self._compile, text))
            self._compiled[text] = found
            if len(self._compiled) > REMEMBERED:
                self._compiled.popitem(last=False)
        return Matcher(found, time.monotonic() + self._seconds)

    def close(self) -> None:
        self._pool.close()

    def _compile(self, text: str) -> Any:
        """In a thread of the pool. ValueError says what of it is wrong."""
        guidance = _library()
        with self._reading:
            if self._vocabulary is None:
                self._vocabulary = self._read(guidance)
        limits = guidance.LLParserLimits(max_lexer_states=MAX_STATES, verbose_errors=False)
        made = guidance.LLMatcher(self._vocabulary, text, log_level=0, limits=limits)
        if made.is_error():
            raise ValueError(_plain(made.get_error()))
        return made

    def _read(self, guidance: Any) -> Any:
        """The tokenizer in the library's form: 1.6 s for 150k tokens, in which the library holds Python's lock."""
        tokenizer = self._tokenizer()
        if tokenizer is None:
            raise ValueError("they need a tokenizer, and the engine was started without one")
        if not self._eos_ids:
            raise ValueError("the model names no end-of-text token; name one in generation_config.json (eos_token_id)")
        text, size = tokenizer.backend.to_str(), self._vocab_size
        try:
            return guidance.LLTokenizer(text, n_vocab=size, eos_token=self._eos_ids)
        except ValueError as error:  # of a kind that it does not read, or with more tokens than the model
            raise ValueError(f"llguidance cannot read this model's tokenizer: {_plain(str(error))}") from None


class _Pool:
    """At most THREADS threads that no exit waits for: a schema may compile for minutes, and nothing stops it."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []

    def submit(self, call: Callable[[], Any]) -> "Future[Any]":
        future: Future[Any] = Future()
        self._jobs.put((future, call))
        if len(self._threads) < THREADS:
            self._threads.append(threading.Thread(target=self._work, name="quintet-grammar", daemon=True))
            self._threads[-1].start()
        return future

    def close(self) -> None:
        for _ in self._threads:
            self._jobs.put(None)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            future, call = job
            try:
                future.set_result(call())
            except BaseException as error:  # who waits shall hear of it; a panic of the library's is no Exception
                future.set_exception(error)


class Matcher:
    """Where one request's output stands in its grammar. The output alone decides, so nothing is lost with its pages."""

    def __init__(self, compiled: "Future[Any]", deadline: float) -> None:
        self.compiled, self._deadline = compiled, deadline
        self._state: Any = None  # the library's, once it is needed
        self._taken = 0  # tokens of the output that it has been told

    @property
    def ready(self) -> bool:
        """Whether it is compiled."""
        return self.compiled.done() and self.compiled.exception() is None

    def refused(self) -> str:
        """Why it will not be compiled; empty if it is, or still may be."""
        if self.compiled.done():
            error = self.compiled.exception()
            return "" if error is None else str(error) or type(error).__name__
        return "they were not compiled in time; simplify them" if time.monotonic() > self._deadline else ""

    def wait(self) -> str:
        """Until it is known -> refused()."""
        while not self.ready and not self.refused():
            wait([self.compiled], max(0.0, self._deadline - time.monotonic()))
        return self.refused()

    @property
    def complete(self) -> bool:
        """Whether nothing but end-of-text may follow."""
        return self._state is not None and bool(self._state.is_stopped())

    def begin_again(self) -> None:
        """A step may have broken off while it was told something: it is told all of the output anew."""
        self._state, self._taken = None, 0

    def follow(self, request: "Request") -> str:
        """Is told what the request has said since the last call, or taken back -> why it cannot go on, if it cannot."""
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

    def fill(self, words: "Array", ahead: Sequence[int] = ()) -> None:
        """words [W] int32, W at least ceil(V / 32): a bit for each token that may come next, of V the tokenizer's.

        With `ahead`, next after those drafts. Where the grammar refuses one of them every bit is set: it is not drawn,
        and what would follow is not looked at. So it is where the output has ended, and its row still runs.
        """
        if self._state.is_stopped() or self._state.is_error():
            words[:] = -1
            return
        taken = self._state.try_consume_tokens(list(ahead)) if ahead else 0
        if taken < len(ahead):
            words[:] = -1
        else:
            self._state.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        if taken:
            self._state.rollback(taken)


def wait_for_any(matchers: "Iterable[Matcher | None]") -> None:
    """Until one of them is ready, or for a moment."""
    wait([each.compiled for each in matchers if each is not None], MOMENT, FIRST_COMPLETED)


def grammar_text(wanted: StructuredOutputsParams, config: StructuredOutputsConfig) -> str:
    """In the library's form. ParameterError if it is too large, or no JSON where it should be."""
    library = _library()
    try:
        text = _written(library, wanted, config)
    except (ValueError, RecursionError) as error:
        why = "nested too deep" if isinstance(error, RecursionError) else str(error)
        raise ParameterError("structured_outputs", f"cannot be served: {why}") from None
    if len(text) > MAX_SIZE:
        raise ParameterError("structured_outputs", f"may have {MAX_SIZE} characters as a grammar, not {len(text)}")
    return text


def _written(library: Any, wanted: StructuredOutputsParams, config: StructuredOutputsConfig) -> str:
    make = library.LLMatcher
    if wanted.regex is not None:
        return str(make.grammar_from_regex(wanted.regex))
    if wanted.choice is not None:
        return str(make.grammar_from_lark("start: " + " | ".join(json.dumps(each) for each in wanted.choice)))
    if wanted.grammar is not None:
        return str(make.grammar_from_lark(wanted.grammar))
    schema: Any = {"type": "object"} if wanted.json is None else wanted.json
    if isinstance(schema, str):
        schema = _parsed(schema)
    if wanted.disable_additional_properties or config.disable_additional_properties:
        schema = _closed(schema)
    bare = wanted.disable_any_whitespace or config.disable_any_whitespace
    options: dict[str, Any] = {"whitespace_flexible": not bare}
    if wanted.whitespace_pattern is not None:
        options["whitespace_pattern"] = wanted.whitespace_pattern
    return str(make.grammar_from_json_schema(json.dumps(schema), defaults=options))


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"the schema is no JSON: {error}") from None


def _closed(schema: Any) -> Any:
    """The schema with additionalProperties false wherever properties are named and it says nothing of others."""
    if isinstance(schema, list):
        return [_closed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {key: _closed(value) for key, value in schema.items()}
    if "properties" in closed or "patternProperties" in closed:
        closed.setdefault("additionalProperties", False)
    return closed


def _library() -> Any:
    try:
        import llguidance
    except ImportError:
        raise ParameterError(
            "structured_outputs", "need the package llguidance, which is not here: pip install 'quintet[structured]'"
        ) from None
    return llguidance


def _plain(error: str) -> str:
    """The library's message on one line."""
    return " ".join(error.replace("<non-verbose/>", "").split())
