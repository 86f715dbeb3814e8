"""What the sampler's tests share: a device that is the host, bound ops of each provider, random requests."""

import random

import numpy as np
import torch

from quintet.engine.request import CoreRequest, Request
from quintet.ops.registry import Op, Ops, bind
from quintet.platforms.cpu.ops import sampling as native_sampling
from quintet.sampling_params import SamplingParams

VOCAB = 400
HOST = "reference" if native_sampling.probe() else "native"  # what serves the CPU here: the latter has to be compiled


class HostDevice:
    """Stands in for a Device: what the sampler uploads is copied, as the contract says."""

    def to_device(self, arrays):
        return tuple(torch.from_numpy(np.array(array)) for array in arrays)


def bound(provider: str) -> Ops:
    return bind({name: (provider,) for name, op in Op.registry.items() if provider in op.providers})


def bits_of(kept: torch.Tensor) -> torch.Tensor:
    """bool [R, V] -> what keep_tokens takes, a bit at a time."""
    rows, vocab = kept.shape
    words = [[0] * -(-vocab // 32) for _ in range(rows)]
    for row, token in kept.nonzero().tolist():
        words[row][token // 32] |= 1 << token % 32
    signed = [[word - 2**32 if word >= 2**31 else word for word in row] for row in words]
    return torch.tensor(signed, dtype=torch.int32)


def request(name: str, prompt: list[int], output: list[int] = (), **params) -> Request:
    extra = {key: params.pop(key) for key in ("stop_ids", "bad_words_ids") if key in params}
    made = Request(CoreRequest(name, prompt, SamplingParams(**params), (int(name), 17), 100, **extra))
    for token_id in output:
        made.append_sampled(token_id)
    return made


def logits_of(name: str, position: int, vocab: int = VOCAB) -> torch.Tensor:
    """A model that depends on the request and the position alone; rounded, so that ties are frequent."""
    generator = torch.Generator().manual_seed(sum(map(ord, name)) * 1009 + position)
    return (torch.randn(vocab, generator=generator) * 3).bfloat16().float()


def random_request(rng: random.Random, name: str, vocab: int = VOCAB) -> Request:
    """Any mix of parameters."""

    def maybe(value, off):
        return value if rng.random() < 0.4 else off

    prompt = [rng.randrange(vocab) for _ in range(rng.randrange(1, 12))]
    params = {
        "temperature": maybe(0.0, rng.uniform(0.2, 1.5)),
        "top_k": maybe(rng.randrange(1, 60), 0),
        "top_p": maybe(rng.uniform(0.1, 0.99), 1.0),
        "min_p": maybe(rng.uniform(0.01, 0.3), 0.0),
        "presence_penalty": maybe(rng.uniform(-2, 2), 0.0),
        "frequency_penalty": maybe(rng.uniform(-2, 2), 0.0),
        "repetition_penalty": maybe(rng.uniform(0.6, 1.8), 1.0),
        "logit_bias": maybe({rng.randrange(vocab): rng.uniform(-9, 9) for _ in range(3)}, None),
        "allowed_token_ids": maybe([rng.randrange(vocab) for _ in range(30)], None),
        "min_tokens": maybe(3, 0),
        "logprobs": maybe(rng.choice([0, 1, 5, -1]), None),
    }
    stop_ids = frozenset(rng.randrange(vocab) for _ in range(2))
    words = ((rng.randrange(vocab),), (prompt[-1], rng.randrange(vocab)))
    return request(name, prompt, stop_ids=stop_ids, bad_words_ids=maybe(words, ()), **params)
