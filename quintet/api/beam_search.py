"""Beam search over the engine: every step asks for one token of each candidate, and the prefix cache does the rest."""

from dataclasses import replace

from quintet.api.thread_sharing import SharedClient
from quintet.beam_search import (
    BeamSearch,
    BeamSearchOutput,
    BeamSearchSequence,
    check_beams,
    likeliest,
    next_token_params,
)
from quintet.chat.prompts import Prompt
from quintet.engine.client import EngineClient
from quintet.outputs import LogprobsAt, RequestOutput
from quintet.sampling_params import BeamSearchParams, ParameterError, SamplingParams


def search(shared: SharedClient, prompt: Prompt, params: BeamSearchParams) -> BeamSearchOutput:
    """Searches for the likeliest outputs of a prompt.

    ValueError says what is wrong with the prompt or a parameter; RuntimeError, that a step failed.
    """
    client = shared.client
    limits, eos_ids = client.input_processor.limits, client.input_processor.eos_ids
    check_beams(params, client.config.logprobs_mode, client.vocab_size, limits.max_logprobs)
    if prompt.embeds:
        raise ValueError("beam_search goes on from token ids; give text or ids in the place of 'prompt_embeds'")
    if limits.max_prefix:
        raise ValueError("beam_search goes on from prompts, and tokens of this model's prompts see all of them")
    start = len(prompt.token_ids)
    fmt = None if params.structured_outputs is None else _GrammarLimit(client, params, start)
    is_complete = None if fmt is None else lambda beam: not fmt.allowed_token_ids(beam)
    found = BeamSearch(prompt.token_ids, params, eos_ids, is_complete)
    one = next_token_params(params, client.vocab_size)
    for _ in range(found.rounds(limits.max_model_len)):
        if not found.beams:
            break
        found.grow(_expand(shared, found.beams, prompt, one, fmt))
    best = found.best()
    for beam in best:
        beam.text = _decode_beam(client, beam, params)
    return BeamSearchOutput(best)


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
    one: SamplingParams,
    fmt: _GrammarLimit | None,
) -> list[LogprobsAt]:
    """The likeliest next tokens of each candidate, of those that its form allows."""
    client = shared.client
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
    assert one.logprobs is not None
    return [likeliest(outputs[request_id].outputs[0], one.logprobs) for request_id in ids]


def _decode_beam(client: EngineClient, beam: BeamSearchSequence, params: BeamSearchParams) -> str | None:
    if client.tokenizer is None:
        return None
    ended = beam.stop_reason is not None and not params.include_stop_str_in_output
    return client.tokenizer.decode(beam.tokens[:-1] if ended else beam.tokens, params.skip_special_tokens)
