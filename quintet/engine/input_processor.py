"""Checks a user's prompt and parameters, applies defaults, and makes the engine's requests."""

import hashlib
import logging
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from quintet.chat.prompts import Prompt
from quintet.chat.reasoning_tokens import NOT_REASONING, UNMARKED, ReasoningMarkers
from quintet.engine.kv_transfer_params import check_transfer_params
from quintet.engine.pooling.input_processor import PoolingBounds
from quintet.engine.request import CoreRequest, random_key
from quintet.engine.sampling.logits_processors import LogitsProcessor
from quintet.media.audio.encoder_input import SpeechInput
from quintet.media.encoder_text import TextInput
from quintet.media.spans import identity
from quintet.outputs import child_ids
from quintet.pooling_params import PoolingParams
from quintet.sampling_params import ParameterError, SamplingParams, StructuredOutputsParams
from quintet.structured_output.grammar import GrammarCompiler
from quintet.tokenizers.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ModelLimits:
    """Limits of requests, from the model and the configuration."""

    vocab_size: int
    max_model_len: int
    max_logprobs: int
    embeds_width: int = 0  # numbers of an embedding that stands for a token of a prompt; 0: none may
    by_priority: bool = True  # whether a request's priority counts
    pooling: PoolingBounds | None = None  # what numbers texts may become; None: the model generates text
    kv_role: str | None = None  # kv_role: whether pages go to other engines, or come from them
    embeds_rows: int = 0  # most embeddings of a prompt, where the row store has to hold all of them; 0: it has not
    encoder: SpeechInput | TextInput | None = None  # what the model's encoder takes; None: it has none
    whole_runs: bool = False  # tokens of an image are computed in one step
    max_prefix: int = 0  # tokens of a prompt, where they see one another and are computed in one step; 0: they do not


class _CallParams(NamedTuple):
    """Values that all prompts of a call have in common."""

    params: SamplingParams
    stop_ids: frozenset[int]
    bad_words_ids: tuple[tuple[int, ...], ...]
    priority: int
    grammar: str
    reasoning_markers: "ReasoningMarkers | None"


@dataclass
class InputProcessor:
    """Needs no engine, so that it can run in another process."""

    limits: ModelLimits
    tokenizer: Tokenizer | None
    eos_ids: frozenset[int]
    seed: int  # of requests that bring none
    processors: Sequence[type[LogitsProcessor]] = ()
    defaults: dict[str, Any] = field(default_factory=dict)  # sampling parameters of the generation config
    model_name: str = ""  # tells the unseeded requests of several admissions to one engine apart
    grammars: GrammarCompiler | None = None  # None: callers say what the output must look like
    reasoning_markers: "Callable[[], ReasoningMarkers | str]" = lambda: (
        UNMARKED
    )  # how the model marks them, or why none can be bounded
    _num_unseeded: int = 0

    def __post_init__(self) -> None:
        if past := sorted(each for each in self.eos_ids if each >= self.limits.vocab_size):
            logger.warning("no text ends by the tokens %s: the model has %d", past, self.limits.vocab_size)
            self.eos_ids -= frozenset(past)

    def default_params(self) -> SamplingParams:
        """SamplingParams with the model's own defaults; a new object for each call."""
        return SamplingParams(**self.defaults)

    def admit(
        self, request_id: str, prompt: Prompt, params: SamplingParams | PoolingParams, priority: int = 0,
        settled: bool = False,
    ) -> list[CoreRequest]:  # fmt: skip
        """One per completion. ValueError says what is wrong with prompt or parameters; `settled`: see Client.add."""
        if settled and isinstance(params, PoolingParams):
            self._check_priority(priority)
            return [self.pooling_bounds.admit(request_id, prompt, params, priority)]
        return self.admit_all([(request_id, prompt)], params, priority)[0]

    def admit_all(
        self,
        prompts: Sequence[tuple[str, Prompt]],
        params: SamplingParams | PoolingParams,
        priority: int = 0,
        grammar: str = "",
    ) -> list[list[CoreRequest]]:
        """The same for several prompts (request id, prompt) with the same parameters, which are looked at once.

        `grammar` is what params.structured_outputs ask for, where the caller has found out that it can be served.
        """
        self._check_priority(priority)
        if isinstance(params, PoolingParams):
            pooling = self.pooling_bounds
            for _, prompt in prompts:
                _check_not_empty(prompt)
            known = pooling.resolve_params(params)
            return [[pooling.admit(request_id, prompt, known, priority)] for request_id, prompt in prompts]
        self.check_generates()
        params.check(self.limits.vocab_size, self.limits.max_model_len, self.limits.max_logprobs)
        check_transfer_params(params, self.limits.kv_role)
        for processor in self.processors:
            processor.validate(params)
        if params.structured_outputs is not None and not grammar:
            grammar = self._compile_grammar(params.structured_outputs)
        stop_ids = frozenset(params.stop_token_ids or ()) | (frozenset() if params.ignore_eos else self.eos_ids)
        bad_words = self._bad_words(params)
        _check_samplable(params, stop_ids, bad_words, self.limits.vocab_size)
        shared = _CallParams(params, stop_ids, bad_words, priority, grammar, self._bounded(params, bad_words))
        return [self._admit(request_id, prompt, shared) for request_id, prompt in prompts]

    def _check_priority(self, priority: int) -> None:
        if priority and not self.limits.by_priority:
            raise ParameterError(
                "priority", "changes nothing here; start the engine with scheduling_policy='priority', or leave it out"
            )

    def check_generates(self) -> None:
        """ValueError where the model gives numbers."""
        if self.limits.pooling is not None:
            raise ValueError(
                f"this model gives numbers ({', '.join(self.limits.pooling.tasks)}), and no text; use embed(), "
                "classify(), score() or encode() (`quintet embed`, `quintet rerank`), or choose a model that generates"
            )

    @property
    def pooling_bounds(self) -> PoolingBounds:
        """ValueError where the model generates text."""
        if self.limits.pooling is None:
            raise ValueError(
                "this model generates text, and was not asked for numbers; start it with runner='pooling' "
                "(--runner pooling), or choose an embedding model, such as 'bundled-embed'"
            )
        return self.limits.pooling

    def _admit(self, request_id: str, prompt: Prompt, shared: "_CallParams") -> list[CoreRequest]:
        params = shared.params
        if prompt.embeds and params.scores_prompt:
            raise ParameterError(_scoring(params), "are of tokens, and this prompt is embeddings; leave it out")
        _check_not_empty(prompt)
        self._check_media(prompt)
        kept = params.kept(len(prompt.token_ids), self.limits.max_model_len)
        ids = prompt.token_ids[kept]
        if prompt.media and len(ids) < len(prompt.token_ids):
            raise ParameterError("truncate_prompt_tokens", "would cut a prompt with images; shorten its text instead")
        room = self.limits.max_model_len - len(ids)
        if room < 1:
            raise ValueError(
                f"the prompt has {len(ids)} tokens, and max_model_len is {self.limits.max_model_len} with at least one "
                "token of output; shorten it, raise max_model_len, or set truncate_prompt_tokens"
            )
        self._check_whole(prompt, params, len(ids))
        _check_candidates(params, len(ids))
        if prompt.embeds and 0 < self.limits.embeds_rows < len(ids):
            raise ValueError(
                f"the prompt has {len(ids)} embeddings, and the device has room for {self.limits.embeds_rows} "
                "(encoder_cache_rows), where a step computes the whole prompt; raise encoder_cache_rows, or leave "
                "enable_chunked_prefill on"
            )
        max_tokens = room if params.max_tokens is None else min(params.max_tokens, room)
        seed: int | str | None = params.seed
        if seed is None:
            seed = f"{self.seed}/{self.model_name}{self._num_unseeded}"
            self._num_unseeded += 1
        row = len(prompt.embeds) // len(prompt.token_ids)  # bytes
        embeds = prompt.embeds[row * kept.start : row * kept.stop]
        arrival = time.monotonic()
        marks = None if shared.reasoning_markers is None else shared.reasoning_markers.marks
        thought = NOT_REASONING if shared.reasoning_markers is None else shared.reasoning_markers.open_tokens(ids)
        return [
            CoreRequest(
                request_id=engine_id,
                prompt_ids=ids,
                params=params,
                random_key=random_key(seed, index),
                max_tokens=max_tokens,
                stop_ids=shared.stop_ids,
                bad_words_ids=shared.bad_words_ids,
                salt=_prefix_salt(prompt, ids) if self.limits.max_prefix else prompt.salt,
                priority=shared.priority,
                arrival=arrival,
                returns_prompt_logprobs=index == 0,
                embeds=embeds,
                grammar=shared.grammar,
                reasoning_marker_ids=marks,
                open_reasoning_tokens=thought,
                lora=prompt.lora,
                encoder=prompt.encoder,
                media=prompt.media,
                sees_prompt=self.limits.max_prefix > 0,
                alignment=prompt.alignment,
            )
            for index, engine_id in enumerate(child_ids(request_id, params.n))
        ]

    def _check_media(self, prompt: Prompt) -> None:
        """ValueError where a prompt has nothing for the model's encoder."""
        if self.limits.encoder is None or prompt.encoder is not None:
            return
        if isinstance(self.limits.encoder, TextInput):
            raise ValueError(
                "this model's encoder takes the prompt, and chats have none for it; use generate(), or /v1/completions"
            )
        raise ValueError(
            "this model transcribes audio, and the prompt has none; give {'prompt_token_ids': [...], "
            "'multi_modal_data': {'audio': samples}}"
        )

    def _check_whole(self, prompt: Prompt, params: SamplingParams, count: int) -> None:
        """ValueError where a step has to compute a prompt, or the tokens of its images, and cannot."""
        if 0 < self.limits.max_prefix < count:
            raise ValueError(
                f"the prompt has {count} tokens that see one another, and {self.limits.max_prefix} do at most (the "
                "window of the model's layers, or max_num_batched_tokens); shorten it"
            )
        if params.scores_prompt and (self.limits.max_prefix or (self.limits.whole_runs and prompt.media)):
            why = "cut a prompt into steps, and tokens of an image of this model are computed in one; leave it out"
            raise ParameterError(_scoring(params), why)

    def _compile_grammar(self, wanted: StructuredOutputsParams) -> str:
        """Compiles it, so that it is there when the request comes to the engine."""
        if self.grammars is None:
            raise ParameterError("structured_outputs", "were not tried before; that is for the caller to do")
        return self.grammars.compile_and_wait(wanted)

    def _bounded(self, params: SamplingParams, bad_words: Sequence[tuple[int, ...]]) -> ReasoningMarkers | None:
        """Returns the markers of reasoning if thinking_token_budget bounds it, else None."""
        if params.thinking_token_budget is None:
            return None
        thoughts = self.reasoning_markers()
        if isinstance(thoughts, str):
            raise ParameterError("thinking_token_budget", f"cannot be served: {thoughts}")
        forced, banned = set(thoughts.marks.forced), {word[0] for word in bad_words if len(word) == 1}
        if forced & banned or not forced <= set(params.allowed_token_ids or forced):
            why = "ends reasoning by tokens that allowed_token_ids or bad_words exclude; allow these tokens"
            raise ParameterError("thinking_token_budget", why)
        return thoughts

    def _bad_words(self, params: SamplingParams) -> tuple[tuple[int, ...], ...]:
        if not params.bad_words:
            return ()
        if self.tokenizer is None:
            raise ParameterError("bad_words", "needs a tokenizer, and the engine was started without one; leave it out")
        return self.tokenizer.bad_word_ids(params.bad_words)


def _prefix_salt(prompt: Prompt, ids: Sequence[int]) -> bytes:
    """Returns the salt of a prompt whose tokens see one another: no other prompt finds its pages."""
    content = array("q", ids).tobytes() + identity(prompt.media, 0, len(ids))
    return prompt.salt + hashlib.blake2b(content, digest_size=16).digest()


def _check_not_empty(prompt: Prompt) -> None:
    """A chat template may give nothing."""
    if not prompt.token_ids:
        raise ValueError("the prompt is empty: it has no tokens; give at least one")


def _scoring(params: SamplingParams) -> str:
    """Returns the name of the parameter that has a prompt scored."""
    return "prompt_logprob_token_ids" if params.prompt_logprobs is None else "prompt_logprobs"


def _check_candidates(params: SamplingParams, num_tokens: int) -> None:
    """Refuses prompt_logprob_token_ids whose rows are not those of the prompt's tokens after its start."""
    rows, start = params.prompt_logprob_token_ids, params.prompt_logprob_start
    if rows is not None and len(rows) != num_tokens - 1 - start:
        raise ParameterError(
            "prompt_logprob_token_ids",
            f"must have {max(num_tokens - 1 - start, 0)} rows, one for each of the prompt's {num_tokens} tokens after "
            f"position {start} (prompt_logprob_start), not {len(rows)}",
        )


def _check_samplable(
    params: SamplingParams, stop_ids: frozenset[int], bad_words: Sequence[tuple[int, ...]], vocab_size: int
) -> None:
    """Refuses parameters that leave no token for the first draw."""
    banned = {word[0] for word in bad_words if len(word) == 1} | (stop_ids if params.min_tokens else set())
    allowed = params.allowed_token_ids or (range(vocab_size) if len(banned) >= vocab_size else None)
    if allowed is not None and banned.issuperset(allowed):
        blamed = "allowed_token_ids" if params.allowed_token_ids else "bad_words" if params.bad_words else "min_tokens"
        raise ParameterError(
            blamed, "leave no token to draw: bad_words ban it, or it ends the text before min_tokens; allow another one"
        )
