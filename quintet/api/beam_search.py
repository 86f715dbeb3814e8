"""Beam search over the engine: every step asks for one token of each candidate, and the prefix cache does the rest."""

import math
from dataclasses import dataclass, field, replace

from quintet.api.thread_sharing import SharedClient
from quintet.chat.prompts import Prompt
from quintet.engine.client import EngineClient
from quintet.outputs import LogprobsAt, RequestOutput
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


def search(shared: SharedClient, prompt: Prompt, params: BeamSearchParams) -> BeamSearchOutput:
    """Keeps beam_width candidates; one that ends by end-of-text is set aside and competes with its final score.

    ValueError says what is wrong with the prompt or a parameter; RuntimeError, that a step failed.
    """
    client = shared.client
    _check_params(client, params)
    if prompt.embeds:
        raise ValueError("beam_search goes on from token ids; give text or ids in the place of 'prompt_embeds'")
    if client.input_processor.limits.max_prefix:
        raise ValueError("beam_search goes on from prompts, and tokens of this model's prompts see all of them")
    start = len(prompt.token_ids)
    eos = frozenset() if params.ignore_eos else client.input_processor.eos_ids
    fmt = None if params.structured_outputs is None else _GrammarLimit(client, params, start)
    beams, ended = [BeamSearchSequence(list(prompt.token_ids))], list[BeamSearchSequence]()
    if fmt is not None and not fmt.allowed_token_ids(beams[0]):  # nothing is what the output must be
        beams[0].finish_reason = "stop"
        beams, ended = [], beams
    room = max(1, client.input_processor.limits.max_model_len - start)  # admission says what is wrong with less
    for _ in range(min(params.max_tokens, room)):
        if not beams:
            break
        grown = []
        for beam, step in zip(beams, _expand(shared, beams, prompt, params, fmt), strict=True):
            for token_id, logprob in step.items():
                candidate = BeamSearchSequence(
                    [*beam.tokens, token_id], beam.cum_logprob + logprob.logprob, [*beam.logprobs, step]
                )
                if token_id in eos:
                    candidate.finish_reason, candidate.stop_reason = "stop", token_id
                    ended.append(candidate)
                elif fmt is not None and not fmt.allowed_token_ids(candidate):
                    candidate.finish_reason = "stop"
                    ended.append(candidate)
                else:
                    grown.append(candidate)
        beams = sorted(grown, key=lambda beam: -beam.cum_logprob)[: params.beam_width]
    for beam in beams:
        beam.finish_reason = "length"
    best = sorted((*ended, *beams), key=lambda beam: -score(beam, start, params.length_penalty))[: params.beam_width]
    for beam in best:
        beam.text = _decode_beam(client, beam, params)
    return BeamSearchOutput(best)


def _check_params(client: EngineClient, params: BeamSearchParams) -> None:
    """Against the engine: the scores are its logprobs."""
    mode, most, number = (
        client.config.logprobs_mode,
        client.input_processor.limits.max_logprobs,
        _num_candidates(client, params),
    )
    if not mode.endswith("logprobs"):
        raise ValueError(f"beam search adds log-probabilities, and logprobs_mode={mode!r} gives none; leave it out")
    if most != -1 and number > most:
        raise ParameterError(
            "beam_width",
            f"must be at most {most // 2}, not {params.beam_width}; the engine's max_logprobs={number} would allow it",
        )
    if params.structured_outputs is not None and mode.startswith("raw"):
        raise ParameterError(
            "structured_outputs", f"change no score with logprobs_mode={mode!r}; start the engine with "
            "logprobs_mode='processed_logprobs'",
        )  # fmt: skip
    if params.temperature not in (0, 1) and mode.startswith("raw"):
        raise ParameterError(
            "temperature",
            f"changes no score with logprobs_mode={mode!r}; leave it out, or start the engine with "
            "logprobs_mode='processed_logprobs'",
        )


def _num_candidates(client: EngineClient, params: BeamSearchParams) -> int:
    """Number of next tokens to look at: enough, even if beam_width of them are the end."""
    return min(2 * params.beam_width, client.vocab_size)


def score(beam: BeamSearchSequence, num_prompt: int, length_penalty: float) -> float:
    """Sum of log-probabilities over output length to the power of the penalty, end-of-text not counted."""
    length = len(beam.tokens) - num_prompt - (beam.stop_reason is not None)
    return beam.cum_logprob / math.pow(max(length, 1), length_penalty)


class _GrammarLimit:
    """Grammar of the outputs (structured output)."""

    def __init__(self, client: EngineClient, params: BeamSearchParams, start: int) -> None:
        assert params.structured_outputs is not None
        self._matcher = client.grammars.matcher(client.grammars.compile_and_wait(params.structured_outputs))
        if why := self._matcher.wait():
            raise ParameterError("structured_outputs", f"cannot be served: {why}")
        self._start, self._forbidden = start, client.input_processor.eos_ids if params.ignore_eos else frozenset()

    def allowed_token_ids(self, beam: BeamSearchSequence) -> list[int]:
        """Returns the token ids that may follow; [] where the output is complete."""
        ids = self._matcher.allowed_after(beam.tokens[self._start :])
        return [] if ids is None else [token_id for token_id in ids.tolist() if token_id not in self._forbidden]


def _expand(
    shared: SharedClient,
    beams: list[BeamSearchSequence],
    prompt: Prompt,
    params: BeamSearchParams,
    fmt: _GrammarLimit | None,
) -> list[LogprobsAt]:
    """The 2 * beam_width likeliest next tokens of each candidate, of those that its form allows."""
    client = shared.client
    number = _num_candidates(client, params)
    one = SamplingParams(max_tokens=1, temperature=params.temperature, logprobs=number, detokenize=False)
    ids = [client.next_id() for _ in beams]
    outputs: dict[str, RequestOutput] = {}

    def add() -> None:
        for request_id, beam in zip(ids, beams, strict=True):
            own = one if fmt is None else replace(one, allowed_token_ids=fmt.allowed_token_ids(beam))
            client.add(
                request_id, Prompt(beam.tokens, None, prompt.cache_salt, lora=prompt.lora, encoder=prompt.encoder), own
            )

    try:
        shared.call(add)
        while len(outputs) < len(ids):
            outputs.update((output.request_id, output) for output in shared.receive(set(ids)) if output.finished)
    finally:
        shared.abort(ids)  # of those that have ended, nothing is left
    found = []
    for request_id in ids:
        (completion,) = outputs[request_id].outputs
        if completion.error is not None or not completion.logprobs:
            raise RuntimeError(f"beam search failed: {completion.error}")
        likely = [item for item in completion.logprobs[0].items() if item[1].logprob > -math.inf]
        ranked = sorted(likely, key=lambda item: -item[1].logprob)
        found.append(dict(ranked[:number]))
    return found


def _decode_beam(client: EngineClient, beam: BeamSearchSequence, params: BeamSearchParams) -> str | None:
    if client.tokenizer is None:
        return None
    ended = beam.stop_reason is not None and not params.include_stop_str_in_output
    return client.tokenizer.decode(beam.tokens[:-1] if ended else beam.tokens)
