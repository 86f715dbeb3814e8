"""Beam search over the engine: every step asks for one token of each candidate, and the prefix cache does the rest."""

import math
from dataclasses import dataclass, field

from quintet.engine.client import Client
from quintet.engine.prompts import Prompt
from quintet.outputs import LogprobsAt, RequestOutput
from quintet.sampling_params import BeamSearchParams, SamplingParams


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


def search(client: Client, prompt: Prompt, params: BeamSearchParams) -> BeamSearchOutput:
    """Keeps beam_width candidates; one that ends by end-of-text is set aside and competes with its final score."""
    start = len(prompt.token_ids)
    eos = frozenset() if params.ignore_eos else client.admission.eos_ids
    beams, ended = [BeamSearchSequence(list(prompt.token_ids))], []
    room = client.admission.bounds.max_model_len - start
    for _ in range(min(params.max_tokens, room)):
        grown = []
        for beam, step in zip(beams, _expand(client, beams, prompt, params), strict=True):
            for token_id, logprob in step.items():
                candidate = BeamSearchSequence(
                    [*beam.tokens, token_id], beam.cum_logprob + logprob.logprob, [*beam.logprobs, step]
                )
                if token_id in eos:
                    candidate.finish_reason, candidate.stop_reason = "stop", token_id
                    ended.append(candidate)
                else:
                    grown.append(candidate)
        beams = sorted(grown, key=lambda beam: -beam.cum_logprob)[: params.beam_width]
        if not beams:
            break
    for beam in beams:
        beam.finish_reason = "length"
    best = sorted((*ended, *beams), key=lambda beam: -score(beam, start, params.length_penalty))[: params.beam_width]
    for beam in best:
        beam.text = _text(client, beam, params)
    return BeamSearchOutput(best)


def score(beam: BeamSearchSequence, num_prompt: int, length_penalty: float) -> float:
    """Sum of log-probabilities over output length to the power of the penalty, end-of-text not counted."""
    length = len(beam.tokens) - num_prompt - (beam.finish_reason == "stop")
    return beam.cum_logprob / math.pow(max(length, 1), length_penalty)


def _expand(
    client: Client, beams: list[BeamSearchSequence], prompt: Prompt, params: BeamSearchParams
) -> list[LogprobsAt]:
    """The 2 * beam_width likeliest next tokens of each candidate: enough, even if beam_width of them are the end."""
    number = min(2 * params.beam_width, client.vocab_size)
    one = SamplingParams(max_tokens=1, temperature=params.temperature, logprobs=number, detokenize=False)
    ids = []
    for beam in beams:
        request_id = client.next_id()
        client.add(request_id, Prompt(beam.tokens, None, prompt.cache_salt), one)
        ids.append(request_id)
    outputs: dict[str, RequestOutput] = {}
    while len(outputs) < len(ids):
        outputs.update((o.request_id, o) for o in client.step() if o.finished)
    found = []
    for request_id in ids:
        logprobs = outputs[request_id].outputs[0].logprobs or [{}]
        ranked = sorted(logprobs[0].items(), key=lambda item: -item[1].logprob)
        found.append(dict(ranked[:number]))
    return found


def _text(client: Client, beam: BeamSearchSequence, params: BeamSearchParams) -> str | None:
    if client.tokenizer is None:
        return None
    ended = beam.finish_reason == "stop" and not params.include_stop_str_in_output
    return client.tokenizer.decode(beam.tokens[:-1] if ended else beam.tokens)
