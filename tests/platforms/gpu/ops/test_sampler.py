"""The sampler, by the Triton providers, draws what it draws by the host's, for any mix of requests."""

import random

import pytest
import torch

import quintet.platforms.gpu.ops.logits_edits
import quintet.platforms.gpu.ops.sampling  # noqa: F401  registers its providers
from quintet.engine.sampling.sampler import Sampler
from tests.helpers.platforms.sampling import HOST, HostDevice, bound, logits_of, random_request
from tests.helpers.platforms.triton import needs_triton

pytestmark = [
    pytest.mark.skipif(needs_triton().type != "cpu", reason="the sampler's arrays stay on the host here"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter"),  # NumPy's, of infinities
]


@pytest.mark.grid(cases=1)
@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logits"])
def test_tokens_and_logprobs_are_those_of_the_host(mode: str) -> None:
    requests, twins = ([random_request(rng, str(i)) for i in range(8)] for rng in (random.Random(3), random.Random(3)))
    host, triton = (Sampler(bound(provider), HostDevice(), 400, logprobs_mode=mode) for provider in (HOST, "triton"))
    for _ in range(2):
        logits = torch.stack([logits_of(str(i), len(r.token_ids)) for i, r in enumerate(requests)])
        want, got = host(logits.clone(), requests), triton(logits.clone(), twins)
        assert torch.equal(got.token_ids, want.token_ids)
        assert torch.equal(got.logprobs.token_ids, want.logprobs.token_ids)
        assert torch.equal(got.logprobs.ranks, want.logprobs.ranks)
        torch.testing.assert_close(got.logprobs.logprobs, want.logprobs.logprobs, rtol=1e-5, atol=1e-5)
        for request, twin, token in zip(requests, twins, want.token_ids.tolist(), strict=True):
            request.token_ids.append(token)
            twin.token_ids.append(token)
