"""Sampling parameters of one request: vLLM's names, each value checked when it is given."""

import copy
import enum
import functools
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, TypeVar

from quintet.common import param_checks as values
from quintet.common.suggestions import refuse_unknown
from quintet.config.schema.docs import documented
from quintet.config.schema.unsupported import PARAMETERS

logger = logging.getLogger(__name__)
C = TypeVar("C", bound="Checked")

MAX_COMPLETIONS = 128  # of one request
MAX_STOP_IDS = 1024
MAX_PATTERN = 1024  # tokens of one that is looked for at the end of an output
MIN_TEMPERATURE = 0.01  # below it logits / temperature leaves the range where float32 tells tokens apart


class ParameterError(ValueError):
    """A field that cannot be served; the message starts with the field's name. `code` is for programs."""

    def __init__(self, parameter: str, problem: str, code: str | None = None) -> None:
        super().__init__(f"{parameter} {problem}")
        self.parameter, self.code = parameter, code

    def __reduce__(self) -> Any:
        return type(self), (self.parameter, str(self)[len(self.parameter) + 1 :], self.code)


class RequestOutputKind(enum.Enum):
    """Amount of text that each output of a streamed request repeats."""

    CUMULATIVE = 0  # everything so far, each time
    DELTA = 1  # only what is new
    FINAL_ONLY = 2  # one output, at the end


def _read_as(kind: "type[C]", value: Any) -> "C":
    """Returns a checked object, from an object (it may have changed since it was made) or from its fields."""
    if isinstance(value, kind):
        value.__post_init__()
        return value
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise ValueError(f"must be a {kind.__name__} or a dict of its fields, not {values.shorten(value)}")
    try:
        return kind(**value)
    except ValueError as error:
        raise ValueError(f"cannot be used: {error}") from None


def _constraint(value: Any) -> "StructuredOutputsParams":
    return _read_as(StructuredOutputsParams, value)


def _repetition(value: Any) -> "RepetitionDetectionParams":
    return _read_as(RepetitionDetectionParams, value)


def _kind(value: Any) -> RequestOutputKind:
    if not isinstance(value, RequestOutputKind):
        raise ValueError(f"must be a RequestOutputKind (CUMULATIVE, DELTA or FINAL_ONLY), not {values.shorten(value)}")
    return value


def param(default: Any, parse: values.Parse, help: str) -> Any:
    """A field that knows how to read itself; flags and request bodies are generated from this."""
    return field(default=default, metadata={"parse": parse, "help": help})


class Checked:
    """Dataclass that parses its fields, and refuses unknown keywords with the nearest name."""

    __slots__ = ()
    _called = "sampling parameter"

    if not TYPE_CHECKING:  # editors shall see the fields

        def __new__(cls, *args: Any, **kwargs: Any) -> Any:
            known = cls.__dataclass_fields__
            if not kwargs.keys() <= known.keys():
                refuse_unknown(cls._called, kwargs, known, PARAMETERS)
            return object.__new__(cls)

    def __post_init__(self) -> None:
        for f in fields(self):  # type: ignore[arg-type]
            try:
                setattr(self, f.name, f.metadata["parse"](getattr(self, f.name)))
            except ValueError as error:
                raise ParameterError(f.name, str(error)) from None


# parameters that exclude tokens, or end an output
_NOT_WITH_A_TRACE = (
    "structured_outputs", "repetition_detection", "thinking_token_budget", "bad_words", "allowed_token_ids"
)  # fmt: skip
CONSTRAINTS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")


@documented
@dataclass(slots=True)
class StructuredOutputsParams(Checked):
    """Structured output of a request: one of CONSTRAINTS, and the format of JSON; vLLM's names."""

    _called = "structured outputs parameter"

    json: Any = param(
        None,
        values.optional(values.dict_or_json("a JSON schema")),
        "a JSON schema that the output follows, as a dict or as JSON text",
    )
    regex: str | None = param(None, values.optional(values.text), "a regular expression that matches the whole output")
    choice: list[str] | None = param(None, values.optional(values.choices), "the texts of which the output is one")
    grammar: str | None = param(
        None,
        values.optional(values.text),
        "a grammar that the output follows: Lark's, from its rule `start`, or EBNF, from `root`",
    )
    json_object: bool | None = param(None, values.optional(values.only_true), "any JSON object")
    structural_tag: Any = param(
        None,
        values.optional(values.dict_or_json("a structural tag")),
        "free text with tagged stretches that have a shape, as a dict or as JSON text",
    )
    whitespace_pattern: str | None = param(
        None, values.optional(values.text), "a regular expression of the whitespace in JSON"
    )
    disable_any_whitespace: bool = param(False, values.flag, "JSON without whitespace")
    disable_additional_properties: bool = param(
        False, values.flag, "JSON objects have the properties that are named alone"
    )

    def __post_init__(self) -> None:
        Checked.__post_init__(self)
        given = [name for name in CONSTRAINTS if getattr(self, name) is not None]
        if len(given) != 1:
            what = f"{' and '.join(given)} are given" if given else "none is given"
            raise ValueError(f"exactly one of {', '.join(CONSTRAINTS)} is wanted, and {what}")


@documented
@dataclass(slots=True)
class RepetitionDetectionParams(Checked):
    """Detection of repetition: the output ends if one pattern of tokens repeats at its end; vLLM's names."""

    _called = "repetition detection parameter"

    max_pattern_size: int = param(0, values.integer(0, MAX_PATTERN), "tokens of the longest pattern; 0 is off")
    min_pattern_size: int = param(0, values.integer(0, MAX_PATTERN), "tokens of the shortest; 0 is 1")
    min_count: int = param(
        0, values.count, "how often it is there, one after the other, at the output's end; 2 or more"
    )

    def __post_init__(self) -> None:
        Checked.__post_init__(self)
        most = self.max_pattern_size
        if self.min_pattern_size > most:
            raise ParameterError("min_pattern_size", f"must be at most max_pattern_size ({most})")
        if most and self.min_count < 2:
            raise ParameterError("min_count", f"must be at least 2, not {self.min_count}; max_pattern_size=0 is off")


@documented
@dataclass(slots=True)
class SamplingParams(Checked):
    """Parameters to sample one request's tokens and to stop; vLLM's names, defaults and meanings.

    Where it differs: n > 1 is allowed with temperature 0, and a change after construction is checked at admission.
    Everything is checked when it is made (ParameterError names the field); what depends on the model, by check().
    """

    n: int = param(1, values.integer(1, MAX_COMPLETIONS), "completions of the prompt")
    presence_penalty: float = param(0.0, values.penalty, "taken once from the logit of each token of the output")
    frequency_penalty: float = param(
        0.0, values.penalty, "taken from a token's logit for each time it is in the output"
    )
    repetition_penalty: float = param(
        1.0, values.number(0.01, 100), "divides positive, multiplies negative logits of tokens of prompt and output"
    )
    temperature: float = param(
        1.0, values.number(0, 1e4, " (0 is greedy)"), "divides the logits; 0 is greedy, what is below 0.01 becomes 0.01"
    )
    top_p: float = param(
        1.0, values.number(0, 1, above=True), "draw from the fewest tokens whose probabilities add up to this; 1 is off"
    )
    top_k: int = param(
        0, values.integer(-1, values.INT32, " (0 and -1 are off)"), "draw from this many most likely tokens; 0: all"
    )
    min_p: float = param(
        0.0, values.number(0, 1), "draw from tokens at least this likely relative to the likeliest; 0: all"
    )
    seed: int | None = param(
        None, values.optional(values.seed), "of the random numbers; None and -1: unlike any other request"
    )
    stop: Any = param(None, values.strings, "text that ends the output; one string or several, kept as list[str]")
    stop_token_ids: list[int] = param(None, values.list_of(values.token_id, MAX_STOP_IDS), "tokens that end the output")
    bad_words: list[str] = param(None, values.strings, "text whose last token is not drawn after the tokens before it")
    ignore_eos: bool = param(False, values.flag, "go on after the end-of-text token")
    max_tokens: int | None = param(
        16, values.optional(values.positive), "most tokens of output; None: as far as the model goes"
    )
    min_tokens: int = param(0, values.count, "tokens of output before it may end by a token")
    logprobs: int | None = param(
        None, values.logprobs, "likeliest tokens to report at each position beside the one drawn"
    )
    prompt_logprobs: int | None = param(None, values.logprobs, "the same for each position of the prompt")
    logprob_token_ids: list[int] | None = param(
        None,
        values.optional(values.token_ids),
        "tokens whose log-probabilities are reported at each position, instead of those of the likeliest",
    )
    prompt_logprob_token_ids: list[list[int]] | None = param(
        None,
        values.optional(values.candidate_rows),
        "rows of tokens whose log-probabilities prompt_token_id_logprobs gives: a row for each prompt token after "
        "prompt_logprob_start",
    )
    prompt_logprob_start: int = param(
        0,
        values.count,
        "position of the prompt, from 0: the first row of prompt_logprob_token_ids is of the token after it",
    )
    routed_experts_prompt_start: int = param(
        0,
        values.count,
        "position of the prompt, from 0: routed_experts, where the engine returns them, begin with its token",
    )
    flat_logprobs: bool = param(
        False, values.flag, "give log-probabilities as FlatLogprobs, a few lists for all positions, not a dict for each"
    )
    trace_decode_token_ids: list[int] | None = param(
        None,
        values.optional(values.trace),
        "tokens of the output, whatever the model would draw; with their log-probabilities, for replay",
    )
    detokenize: bool = param(True, values.flag, "give text, not only token ids")
    skip_special_tokens: bool = param(True, values.flag, "leave special tokens out of the text")
    keep_special_tokens: list[int] = param(
        None, values.list_of(values.token_id, MAX_STOP_IDS), "special tokens that stay in it where others are left out"
    )
    spaces_between_special_tokens: bool = param(
        True, values.flag, "keep the spaces that a tokenizer writes between special tokens, where these show"
    )
    include_stop_str_in_output: bool = param(False, values.flag, "keep the stop string at the text's end")
    output_kind: RequestOutputKind = param(RequestOutputKind.CUMULATIVE, _kind, "what each streamed output holds")
    stream_interval: int | None = param(
        None,
        values.optional(values.positive),
        "tokens from one output of a stream to the next, where the engine has fewer",
    )
    truncate_prompt_tokens: int | None = param(
        None,
        values.optional(values.integer(-1, values.INT32)),
        "keep this many last tokens of the prompt; -1: what the model takes",
    )
    truncation_side: str = param(
        "left", values.truncation_side, "where that cuts: left; or right, which keeps the first tokens"
    )
    logit_bias: dict[int, float] | None = param(
        None, values.optional(values.biases), "token id -> what is added to its logit"
    )
    allowed_token_ids: list[int] | None = param(
        None, values.optional(values.allowed_token_ids), "draw from these tokens only"
    )
    thinking_token_budget: int | None = param(
        None,
        values.budget,
        "most tokens of thought, whose end then comes by force; None and -1: any number",
    )
    structured_outputs: StructuredOutputsParams | None = param(
        None, values.optional(_constraint), "what the output must look like: a JSON schema, a regex, choices, a grammar"
    )
    repetition_detection: RepetitionDetectionParams | None = param(
        None,
        values.optional(_repetition),
        "end an output that goes in circles: its max_pattern_size, min_pattern_size and min_count",
    )
    extra_args: dict[str, Any] | None = param(
        None, values.optional(values.extra_args), "for logits processors; not read otherwise"
    )

    def __post_init__(self) -> None:
        Checked.__post_init__(self)
        if 0 < self.temperature < MIN_TEMPERATURE:
            _warn_once(f"temperatures over 0 and under {MIN_TEMPERATURE} are served as {MIN_TEMPERATURE}")
            self.temperature = MIN_TEMPERATURE
        if self.trace_decode_token_ids is not None:
            self._follow_trace(self.trace_decode_token_ids)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ParameterError("min_tokens", f"must be at most max_tokens ({self.max_tokens}), not {self.min_tokens}")
        if self.stop and not self.detokenize:
            raise ParameterError("stop", "needs text to look in; set detokenize=True or use stop_token_ids")
        if self.prompt_logprob_start and self.prompt_logprob_token_ids is None:
            raise ParameterError(
                "prompt_logprob_start", "belongs to prompt_logprob_token_ids; give both or leave it out"
            )
        if self.truncate_prompt_tokens == 0:
            raise ParameterError("truncate_prompt_tokens", "must keep at least 1 token, not 0; None keeps all")

    def _follow_trace(self, trace: list[int]) -> None:
        """The trace ends the output, as in vLLM; nothing else does. ParameterError: what would change its tokens."""
        for name in _NOT_WITH_A_TRACE:
            if getattr(self, name) not in (None, []):
                raise ParameterError(name, "changes which tokens are drawn, and trace_decode_token_ids has them all")
        if self.n != 1:
            raise ParameterError("n", f"must be 1 with trace_decode_token_ids, not {self.n}")
        self.max_tokens, self.min_tokens, self.ignore_eos = len(trace), 0, True
        self.stop, self.stop_token_ids = [], []

    @property
    def greedy(self) -> bool:
        """True if the likeliest token is taken; top_k, top_p, min_p and seed then change nothing."""
        return self.temperature == 0

    @property
    def num_logprobs(self) -> int | None:
        """Log-probabilities of each position beside the drawn token's; None: not even that, -1: of all tokens."""
        return len(self.logprob_token_ids) if self.logprob_token_ids else self.logprobs

    @property
    def scores_prompt(self) -> bool:
        """True if log-probabilities of positions of the prompt are asked for."""
        return self.prompt_logprobs is not None or self.prompt_logprob_token_ids is not None

    def kept(self, length: int, max_model_len: int) -> slice:
        """Returns the slice of a prompt of `length` tokens that is read (truncate_prompt_tokens)."""
        keep = self.truncate_prompt_tokens
        if keep is None:
            return slice(0, length)
        keep = min(length, max_model_len - 1 if keep == -1 else keep)
        return slice(0, keep) if self.truncation_side == "right" else slice(length - keep, length)

    def clone(self) -> "SamplingParams":
        """A copy that shares nothing."""
        return copy.deepcopy(self)

    def check(self, vocab_size: int, max_model_len: int, max_logprobs: int = 20) -> None:
        """At admission: every field again (they may have been set since), then against the model and the engine.

        max_logprobs -1 is no limit. Raises ParameterError.
        """
        self.__post_init__()
        ids = ("stop_token_ids", "logit_bias", "allowed_token_ids", "logprob_token_ids", "trace_decode_token_ids")
        for name in ids:
            given = getattr(self, name)  # of logit_bias, the keys
            _check_ids(name, max(given) if given else 0, vocab_size)
        if self.prompt_logprob_token_ids is not None:
            _check_ids("prompt_logprob_token_ids", max(map(max, self.prompt_logprob_token_ids)), vocab_size)
            _check_logprobs(
                "prompt_logprob_token_ids", max(map(len, self.prompt_logprob_token_ids)), vocab_size, max_logprobs
            )
        for name, num in (("logprobs", self.logprobs), ("prompt_logprobs", self.prompt_logprobs)):
            if num is not None:
                _check_logprobs(name, num, vocab_size, max_logprobs)
        for name, num in (("min_tokens", self.min_tokens), ("truncate_prompt_tokens", self.truncate_prompt_tokens)):
            if num is not None and num > max_model_len:
                raise ParameterError(name, f"must be at most max_model_len ({max_model_len}), not {num}")


@documented
@dataclass(slots=True)
class BeamSearchParams(Checked):
    """A search for the likeliest output, `beam_width` candidates at a time."""

    beam_width: int = param(4, values.integer(1, MAX_COMPLETIONS), "candidates that are kept at each step")
    max_tokens: int = param(16, values.positive, "most tokens of output")
    ignore_eos: bool = param(False, values.flag, "go on after the end-of-text token")
    temperature: float = param(0.0, values.number(0, 1e4, " (0 leaves the logits as they are)"), "divides the logits")
    length_penalty: float = param(1.0, values.number(-100, 100), "scores are divided by length to this power")
    include_stop_str_in_output: bool = param(False, values.flag, "keep the end-of-text token's text")
    structured_outputs: StructuredOutputsParams | None = param(
        None, values.optional(_constraint), "what the outputs must look like; with logprobs_mode='processed_logprobs'"
    )
    skip_special_tokens: bool = param(True, values.flag, "leave special tokens out of the text")
    allowed_token_ids: list[int] | None = param(
        None, values.optional(values.token_ids), "search among these tokens only"
    )


def _check_ids(name: str, largest: int, vocab_size: int) -> None:
    if largest >= vocab_size:
        wanted = f"the vocabulary has {vocab_size} tokens: use ids from 0 to {vocab_size - 1}"
        raise ParameterError(name, f"names token {largest}, but {wanted}")


def _check_logprobs(name: str, num: int, vocab_size: int, max_logprobs: int) -> None:
    wanted, limit = (vocab_size if num == -1 else num), (vocab_size if max_logprobs == -1 else max_logprobs)
    if wanted > limit:
        remedy = "" if wanted > vocab_size else f"; the engine's max_logprobs={wanted} would allow it"
        raise ParameterError(name, f"must be at most {limit}, not {num}{remedy}")


@functools.cache
def _warn_once(message: str) -> None:
    logger.warning(message)
