"""What stands between a user's prompt and the engine: checks it, gives it defaults, and makes its requests."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from quintet.engine.grammar import Grammars
from quintet.engine.logits_processors import LogitsProcessor
from quintet.engine.prompts import Prompt
from quintet.engine.request import Admitted, random_key
from quintet.engine.tokenizer import Tokenizer
from quintet.outputs import child_ids
from quintet.sampling_params import ParameterError, SamplingParams, StructuredOutputsParams


@dataclass(frozen=True)
class Bounds:
    """What the model and the configuration allow."""

    vocab_size: int
    max_model_len: int
    max_logprobs: int
    embeds_width: int = 0  # numbers of an embedding that stands for a token of a prompt; 0: none may
    by_priority: bool = True  # whether a request's priority counts


@dataclass
class Admission:
    """Needs no engine, so that it can run in another process."""

    bounds: Bounds
    tokenizer: Tokenizer | None
    eos_ids: frozenset[int]
    seed: int  # of requests that bring none
    processors: Sequence[type[LogitsProcessor]] = ()
    defaults: dict[str, Any] = field(default_factory=dict)  # sampling parameters of the generation config
    name: str = ""  # tells the unseeded requests of several admissions to one engine apart
    grammars: Grammars | None = None  # None: what the output must look like is not served here
    _num_unseeded: int = 0

    def default_params(self) -> SamplingParams:
        """SamplingParams with the model's own defaults; changing what it returns changes nobody else's."""
        return SamplingParams(**self.defaults)

    def admit(self, request_id: str, prompt: Prompt, params: SamplingParams, priority: int = 0) -> list[Admitted]:
        """One per completion. ValueError says what is wrong with the prompt or a parameter."""
        params.check(self.bounds.vocab_size, self.bounds.max_model_len, self.bounds.max_logprobs)
        for processor in self.processors:
            processor.validate(params)
        if params.structured_outputs is not None:
            self._check_grammar(params.structured_outputs)
        if prompt.embeds and params.prompt_logprobs is not None:
            raise ParameterError("prompt_logprobs", "are of tokens, and this prompt is embeddings; leave it out")
        if priority and not self.bounds.by_priority:
            raise ParameterError(
                "priority", "changes nothing here; start the engine with scheduling_policy='priority', or leave it out"
            )
        ids = _truncate(prompt.token_ids, params, self.bounds.max_model_len)
        room = self.bounds.max_model_len - len(ids)
        if room < 1:
            raise ValueError(
                f"the prompt has {len(ids)} tokens, and max_model_len is {self.bounds.max_model_len} with at least one "
                "token of output; shorten it, raise max_model_len, or set truncate_prompt_tokens"
            )
        max_tokens = room if params.max_tokens is None else min(params.max_tokens, room)
        seed: int | str | None = params.seed
        if seed is None:
            seed = f"{self.seed}/{self.name}{self._num_unseeded}"
            self._num_unseeded += 1
        stop_ids = frozenset(params.stop_token_ids or ()) | (frozenset() if params.ignore_eos else self.eos_ids)
        bad_words = self._bad_words(params)
        row = len(prompt.embeds) // len(prompt.token_ids)  # bytes
        embeds = prompt.embeds[len(prompt.embeds) - row * len(ids) :]
        arrival = time.monotonic()
        return [
            Admitted(
                request_id=engine_id,
                prompt_ids=ids,
                params=params,
                key=random_key(seed, index),
                max_tokens=max_tokens,
                stop_ids=stop_ids,
                bad_words_ids=bad_words,
                salt=(prompt.cache_salt or "").encode(),
                priority=priority,
                arrival=arrival,
                scored=index == 0,
                embeds=embeds,
            )
            for index, engine_id in enumerate(child_ids(request_id, params.n))
        ]

    def _check_grammar(self, wanted: StructuredOutputsParams) -> None:
        """Compiles it, so that it is there when the request comes to the engine."""
        if self.grammars is None:
            raise ParameterError("structured_outputs", "are served by LLM and AsyncLLM alone; leave them out")
        self.grammars.check(wanted)

    def _bad_words(self, params: SamplingParams) -> tuple[tuple[int, ...], ...]:
        if not params.bad_words:
            return ()
        if self.tokenizer is None:
            raise ParameterError("bad_words", "needs a tokenizer, and the engine was started without one; leave it out")
        return self.tokenizer.bad_word_ids(params.bad_words)


def _truncate(ids: Sequence[int], params: SamplingParams, max_model_len: int) -> Sequence[int]:
    """The last tokens, if the caller asked for that."""
    keep = params.truncate_prompt_tokens
    if keep is None:
        return ids
    return ids[-(max_model_len - 1 if keep == -1 else keep) :]
