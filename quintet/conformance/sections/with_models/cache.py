"""One pool of pages that layers with windows and full layers of a model share."""

import itertools
from collections.abc import Iterator, Sequence
from functools import partial

import torch

from quintet.conformance.check import Trial, check, require
from quintet.conformance.harness.subject import Subject
from quintet.conformance.harness.traffic import logits_tolerance, plain_dtype
from quintet.conformance.harness.worker_runner import random_prompts
from quintet_tools.checkpoints.tiny import GEMMA, VOCAB, make

LAYERED = {
    "two windows and one full layer": ("sliding", "sliding", "full"),
    "two of each": ("sliding", "full", "full", "sliding"),
}


@check("cache.groups")
def one_pool(subject: Subject) -> Iterator[Trial]:
    """Windows and full layers, while what windows leave behind goes to other groups and requests."""
    for what, kinds in LAYERED.items():
        yield Trial(what, partial(_grouped, subject, kinds))


def _grouped(subject: Subject, kinds: Sequence[str]) -> None:
    """Requests that outgrow the window several times, one after the other: held against transformers."""
    settings = {**GEMMA, "num_hidden_layers": len(kinds), "layer_types": [f"{kind}_attention" for kind in kinds]}
    tiny, dtype = make("gemma3_text", settings), plain_dtype(subject.facts)
    runner = subject.runner(tiny, dtype, sizes=(64,))
    for wave in range(2):
        ids = dict(enumerate(random_prompts(wave, (70, 41, 90), VOCAB)))
        wants = {key: tiny.logits(each) for key, each in ids.items()}
        for first, last in itertools.pairwise((0, 13, 33, 34, 35, 50, 64, 65, 66, 70, 90)):
            chunks = {key: each[first:last] for key, each in ids.items() if first < len(each)}
            for key, got in runner.step(chunks).items():
                want = wants[key][first : first + len(got)]
                off = float((got - want).abs().max().nan_to_num(torch.inf))
                limit = 2 * logits_tolerance(dtype) * float(wants[key].std())
                message = f"{', '.join(kinds)}: request {key} from token {first} on: logits are off by {off:.3g}"
                require(off <= limit, f"{message}; {limit:.3g} is allowed")
                runner.trim(key)
        for key in ids:
            runner.finish(key)
