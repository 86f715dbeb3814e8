"""Logits and requests through two samplers: the platform's, and the specification's on the host."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from quintet.conformance.harness.subject import Subject
from quintet.engine.request import CoreRequest, Request
from quintet.engine.sampling.sampler import HostSampling, LogprobTensors, Sampled, Sampler, logprob_sizes
from quintet.ops import Op, bind
from quintet.ops.sampling import NEVER, Draw, filter_logits
from quintet.sampling_params import SamplingParams

VOCAB = 401  # no multiple of anything
ROWS = 16  # of a step where shapes are fixed
EDGE = 1e-4  # relative: what rounding may move a threshold or a score by


class SamplerPair:
    """The platform's sampler, and the specification's: the same requests and logits go through both."""

    def __init__(self, subject: Subject, vocab: int = VOCAB, mode: str = "raw_logprobs", most: int = -1) -> None:
        self.subject, self.vocab = subject, vocab
        self._fixed = subject.facts.static_shapes
        sizes = logprob_sizes(vocab, most) if self._fixed else ()
        self._ours = Sampler(subject.ops, subject.device, vocab, (), mode, sizes)
        specification = bind({})
        specification.__dict__.update(sample=self._noted("sample"), filter_logits=self._noted("filter_logits"))
        self._theirs = Sampler(specification, HostSampling(), vocab, (), mode)
        self.seen: dict[str, tuple[Tensor, Draw]] = {}  # what the specification drew from, and cut

    def _noted(self, name: str) -> Any:
        reference = Op.registry[name].reference

        def noted(logits: Tensor, draw: Draw, width: int) -> Tensor:
            self.seen[name] = logits.clone(), draw
            result: Tensor = reference(logits, draw, width)
            return result

        return noted

    def __call__(self, logits: Tensor, requests: Sequence[Request]) -> tuple[Sampled, Sampled]:
        """(the platform's, the specification's), on the host, of logits [R, V] and as many requests."""
        self.seen.clear()
        theirs = self._theirs(logits.clone(), requests)
        ours = self._ours(self.subject.up(self._filled(logits)), requests)
        logprobs = None if ours.logprobs is None else self._down(ours.logprobs, len(logits))
        return Sampled(self.subject.down(ours.token_ids)[: len(logits)], logprobs), theirs

    def prompts(self, logits: Tensor, own: Tensor, wanted: Tensor, num: int) -> tuple[LogprobTensors, LogprobTensors]:
        """The same of the log-probabilities of a prompt's tokens, own [R] int32, where wanted [R] is not 0."""
        theirs = self._theirs.prompt_logprobs(logits.clone(), own.numpy(), wanted.numpy(), num)
        filled = [_more(x, ROWS).numpy() if self._fixed else x.numpy() for x in (own, wanted)]
        ours = self._ours.prompt_logprobs(self.subject.up(self._filled(logits)), filled[0], filled[1], num)
        return self._down(ours, len(logits)), theirs

    def _filled(self, logits: Tensor) -> Tensor:
        """Rows that are no request's are not numbers."""
        if not self._fixed:
            return logits.clone()
        filled = torch.full((ROWS, self.vocab), torch.nan, dtype=logits.dtype)
        filled[: len(logits)] = logits
        return filled

    def _down(self, found: LogprobTensors, rows: int) -> LogprobTensors:
        ids, values, ranks = (self.subject.down(x)[:rows] for x in (found.token_ids, found.logprobs, found.ranks))
        return LogprobTensors(ids, values, ranks)


def _more(x: Tensor, count: int) -> Tensor:
    return torch.cat([x, x.new_zeros(count - len(x))])


def request(number: int, prompt: Sequence[int] = (1,), output: Sequence[int] = (), **params: Any) -> Request:
    """Each number has its own random numbers."""
    more = {key: params.pop(key) for key in ("stop_ids", "bad_words_ids") if key in params}
    key = (number * 7919 - 3, -number - 1)
    made = Request(CoreRequest(str(number), prompt, SamplingParams(detokenize=False, **params), key, 100, **more))
    for token_id in output:
        made.append_sampled(token_id)
    return made


def logits_of(requests: Sequence[Request], vocab: int = VOCAB, spread: float = 3.0) -> Tensor:
    """[R, V], of each request's name and length alone; rounded to bfloat16, so that many are equal."""
    rows = []
    for each in requests:
        generator = torch.Generator().manual_seed(int(each.request_id) * 1009 + len(each.token_ids))
        rows.append((torch.randn(vocab, generator=generator) * spread).bfloat16().float())
    return torch.stack(rows)


def edges(scaled: Tensor, draw: Draw) -> tuple[Tensor, Tensor]:
    """Returns masks of the tokens kept if rounding moves the thresholds up, and if down; whole numbers do not move."""
    masks = []
    for sign in (-1, 1):
        moved = torch.where(draw.top_p < 1, (draw.top_p + sign * EDGE).clamp(1e-9, 1 - 1e-7), draw.top_p)
        least = (draw.min_p * (1 - sign * EDGE)).clamp(max=1.0)
        cut = filter_logits.reference(scaled, draw._replace(top_p=moved, min_p=least), scaled.shape[1])
        masks.append(cut > NEVER)
    return masks[0], masks[1]
