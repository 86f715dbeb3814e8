"""Beam search without an engine: the candidates of one output, and which of them are kept."""

import itertools
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from quintet.outputs import CompletionOutput, LogprobsAt
from quintet.sampling_params import BeamSearchParams, ParameterError, SamplingParams


@dataclass
class BeamSearchSequence:
    """One candidate. `tokens` begins with the prompt, `text` too."""

    tokens: list[int]
    cum_logprob: float = 0.0
    logprobs: list[LogprobsAt] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | None = None
    text: str | None = None


@dataclass
class BeamSearchOutput:
    """The candidates that were kept, best first."""

    sequences: list[BeamSearchSequence]


class BeamSearch:
    """Keeps beam_width candidates of a prompt; one that ends by end-of-text is set aside and competes with its final
    score. Each round asks for one token of every candidate of `beams`: none are left where no other could be best."""

    def __init__(
        self,
        prompt: Sequence[int],
        params: BeamSearchParams,
        eos_ids: Collection[int],
        is_complete: Callable[[BeamSearchSequence], bool] | None = None,
    ) -> None:
        """`is_complete`: whether nothing may follow a candidate; None: something always may."""
        self._params, self._eos = params, () if params.ignore_eos else eos_ids
        self._start, self._is_complete = len(prompt), is_complete
        self.beams = [BeamSearchSequence(list(prompt))]
        self._ended: list[BeamSearchSequence] = []
        if is_complete is not None and is_complete(self.beams[0]):  # nothing is what the output must be
            self.beams[0].finish_reason = "stop"
            self.beams, self._ended = [], self.beams

    def rounds(self, max_model_len: int) -> int:
        """Returns the most rounds that the parameters and the context leave; admission says what is wrong with less
        than one."""
        return min(self._params.max_tokens, max(1, max_model_len - self._start))

    def grow(self, steps: Sequence[LogprobsAt]) -> None:
        """Takes the likeliest next tokens of each candidate, best first; those after 2 * beam_width are for readers."""
        width = self._params.beam_width
        likely = sorted(
            ((beam.cum_logprob + each.logprob, beam, step, token_id)
             for beam, step in zip(self.beams, steps, strict=True)
             for token_id, each in itertools.islice(step.items(), 2 * width)),
            key=lambda item: -item[0],
        )  # fmt: skip
        self.beams = []
        for total, beam, step, token_id in likely:
            ends = token_id in self._eos
            if len(self.beams) == width and not ends and self._is_complete is None:
                continue
            made = BeamSearchSequence([*beam.tokens, token_id], total, [*beam.logprobs, step])
            if ends or (self._is_complete is not None and self._is_complete(made)):
                made.finish_reason, made.stop_reason = "stop", token_id if ends else None
                self._ended.append(made)
            elif len(self.beams) < width:
                self.beams.append(made)
        self._ended = sorted(self._ended, key=lambda each: -self._score(each))[:width]
        if len(self._ended) == width and all(self._bound(beam) <= self._score(self._ended[-1]) for beam in self.beams):
            self.beams = []

    def best(self) -> list[BeamSearchSequence]:
        """Returns the candidates with the best scores, once the rounds are over."""
        for beam in self.beams:
            beam.finish_reason = "length"
        return sorted((*self._ended, *self.beams), key=lambda beam: -self._score(beam))[: self._params.beam_width]

    def _score(self, beam: BeamSearchSequence) -> float:
        return score(beam, self._start, self._params.length_penalty)

    def _bound(self, beam: BeamSearchSequence) -> float:
        """Returns a score that no output which begins with the beam exceeds: further tokens only take from its sum."""
        penalty, length = self._params.length_penalty, len(beam.tokens) - self._start
        return beam.cum_logprob / math.pow(self._params.max_tokens if penalty > 0 else length, penalty)


def score(beam: BeamSearchSequence, num_prompt: int, length_penalty: float) -> float:
    """Sum of log-probabilities over output length to the power of the penalty, end-of-text not counted."""
    length = len(beam.tokens) - num_prompt - (beam.stop_reason is not None)
    return beam.cum_logprob / math.pow(max(length, 1), length_penalty)


def next_token_params(params: BeamSearchParams, vocab_size: int) -> SamplingParams:
    """Returns parameters of a round's requests: enough log-probabilities, even if beam_width of them are the end."""
    number = min(2 * params.beam_width, vocab_size)
    made = SamplingParams(max_tokens=1, temperature=params.temperature, logprobs=number, detokenize=False)
    if params.allowed_token_ids is not None:
        made.allowed_token_ids = made.logprob_token_ids = list(params.allowed_token_ids)
    return made


def likeliest(output: CompletionOutput, number: int) -> LogprobsAt:
    """Returns so many of the likeliest tokens that may be next. RuntimeError says that the step failed."""
    if output.error is not None or not output.logprobs:
        raise RuntimeError(f"beam search failed: {output.error}")
    likely = [item for item in output.logprobs[0].items() if item[1].logprob > -math.inf]
    return dict(sorted(likely, key=lambda item: -item[1].logprob)[:number])


def check_beams(params: BeamSearchParams, logprobs_mode: str, vocab_size: int, max_logprobs: int) -> None:
    """Checks the parameters against the engine, whose log-probabilities are the scores. ValueError says what is
    wrong."""
    number = min(2 * params.beam_width, vocab_size)
    if not logprobs_mode.endswith("logprobs"):
        raise ValueError(
            f"beam search adds log-probabilities, and logprobs_mode={logprobs_mode!r} gives none; leave it out"
        )
    if max_logprobs != -1 and number > max_logprobs:
        raise ParameterError(
            "beam_width", f"must be at most {max_logprobs // 2}, not {params.beam_width}; the engine's "
            f"max_logprobs={number} would allow it",
        )  # fmt: skip
    if params.structured_outputs is not None and logprobs_mode.startswith("raw"):
        raise ParameterError(
            "structured_outputs", f"change no score with logprobs_mode={logprobs_mode!r}; start the engine with "
            "logprobs_mode='processed_logprobs'",
        )  # fmt: skip
    if params.temperature not in (0, 1) and logprobs_mode.startswith("raw"):
        raise ParameterError(
            "temperature", f"changes no score with logprobs_mode={logprobs_mode!r}; leave it out, or start the engine "
            "with logprobs_mode='processed_logprobs'",
        )  # fmt: skip
