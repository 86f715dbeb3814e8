"""The sampler: each row is its own, whoever is beside it and wherever it stands."""

import random
from dataclasses import replace

import numpy as np
import pytest
import torch
import transformers

from quintet.engine.request import Request
from quintet.engine.sampling import logits_edits as logit_edits
from quintet.engine.sampling.sampler import HostSampling, Sampler, logprob_sizes
from tests.helpers.platforms.sampling import HOST, VOCAB, HostDevice, bound, logits_of, random_request, request

PROVIDERS = sorted({"reference", HOST})
MODES = ["raw_logprobs", "raw_logits", "processed_logprobs", "processed_logits"]


def sampler(provider: str = HOST, mode: str = "raw_logprobs", vocab: int = VOCAB, processors=()) -> Sampler:
    return Sampler(bound(provider), HostDevice(), vocab, processors, mode)


def step(sample: Sampler, requests) -> list[tuple]:
    """Each row's token and its own columns of log-probabilities; appends the tokens."""
    logits = torch.stack([logits_of(r.request_id, len(r.token_ids)) for r in requests])
    tokens, logprobs = sample(logits, requests)
    results = []
    for row, (r, token) in enumerate(zip(requests, tokens.tolist(), strict=True)):
        own = None
        if r.params.logprobs is not None:
            num = (VOCAB if r.params.logprobs == -1 else r.params.logprobs) + 1
            own = (logprobs.token_ids[row, :num].tolist(), logprobs.logprobs[row, :num].tolist())
            own = (*own, int(logprobs.ranks[row]))
        results.append((token, own))
        r.append_sampled(token)
    return results


@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize("mode", MODES)
def test_batched_equals_alone_bit_for_bit_while_rows_come_go_and_move(provider, mode):
    rng, together = random.Random(mode), sampler(provider, mode)
    requests = [random_request(rng, str(i)) for i in range(10)]
    mirror_rng = random.Random(mode)
    mirrors = [random_request(mirror_rng, str(i)) for i in range(10)]
    for _ in range(8):
        rows = rng.sample(range(10), rng.randrange(1, 9))
        for _ in range(rng.randrange(1, 3)):
            batched = step(together, [requests[i] for i in rows])
            alone = [step(sampler(provider, mode), [mirrors[i]])[0] for i in rows]
            assert batched == alone


@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize("mode", MODES)
def test_padded_equals_unpadded_bit_for_bit(provider, mode, monkeypatch):
    monkeypatch.setattr(logit_edits, "CHUNK", 7)  # so that lists of places are cut
    rng, mirror = random.Random(mode), random.Random(mode)
    requests, mirrors = ([random_request(r, str(i)) for i in range(10)] for r in (rng, mirror))
    free = sampler(provider, mode)
    fixed = Sampler(bound(provider), HostDevice(), VOCAB, (), mode, logprob_sizes(VOCAB, -1))
    chosen = [0]
    for _ in range(14):
        size = rng.choice([8, 16])  # the bucket changes under the same requests, too
        chosen = rng.sample(range(10), rng.randrange(1, 8)) if rng.random() < 0.6 else chosen
        mine, theirs = [requests[i] for i in chosen], [mirrors[i] for i in chosen]
        logits = torch.full((size, VOCAB), float("nan"))
        logits[: len(mine)] = torch.stack([logits_of(r.request_id, len(r.token_ids)) for r in mine])
        wanted, wanted_logprobs = free(logits[: len(mine)].clone(), theirs)
        tokens, logprobs = fixed(logits, mine)
        assert len(tokens) == size and torch.equal(tokens[: len(mine)], wanted)
        assert (logprobs is None) == (wanted_logprobs is None)
        if logprobs is not None:
            num = wanted_logprobs.token_ids.shape[1]
            assert logprobs.token_ids.shape[1] - 1 in logprob_sizes(VOCAB, -1) and len(logprobs.ranks) == size
            assert torch.equal(logprobs.token_ids[: len(mine), :num], wanted_logprobs.token_ids)
            assert torch.equal(logprobs.logprobs[: len(mine), :num], wanted_logprobs.logprobs)
            assert torch.equal(logprobs.ranks[: len(mine)], wanted_logprobs.ranks)
        for r, token in zip([*mine, *theirs], [*wanted.tolist()] * 2, strict=True):
            r.append_sampled(token)


@pytest.mark.parametrize("most, sizes", [(20, (0, 32)), (100, (0, 100)), (-1, (0, 32, 400)), (900, (0, 400))])
def test_few_numbers_of_logprobs_are_computed_where_shapes_are_fixed(most, sizes):
    assert logprob_sizes(400, most) == sizes


def shapes_of(ops, seen: set) -> None:
    """Notes every call of an op by the shapes and values that a compiler would see."""

    def facts(x):
        if isinstance(x, tuple):
            return tuple(map(facts, x))
        return (tuple(x.shape), x.dtype) if isinstance(x, torch.Tensor) else x

    def noted(name, op):
        return lambda *args: seen.add((name, *map(facts, args))) or op(*args)

    for name in ("widen", "greedy", "scale_logits", "filter_logits", "sample", "top_logprobs", "penalize",
                 "bias_tokens", "ban_tokens", "keep_tokens"):  # fmt: skip
        ops.__dict__[name] = noted(name, getattr(ops, name))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mode", MODES)
def test_the_warm_up_takes_every_op_through_every_shape_that_traffic_reaches(mode, dtype):
    ops, seen, rng = bound(HOST), set(), random.Random(7)
    shapes_of(ops, seen)
    sample = Sampler(ops, HostSampling(), VOCAB, (), mode, logprob_sizes(VOCAB, -1))
    for size in (12, 24):
        sample.warm_up(torch.zeros(size, VOCAB, dtype=dtype))
    warm = set(seen)
    seen.clear()
    requests = [random_request(rng, str(i)) for i in range(12)]
    for _ in range(60):
        mine = [requests[i] for i in rng.sample(range(12), rng.randrange(1, rng.choice([3, 12])))]
        size = rng.choice([12, 24])
        sample(torch.randn(size, VOCAB).to(dtype), mine)
        own, wanted = np.zeros(size, np.int32), np.ones(size, np.int32)
        sample.prompt_logprobs(torch.randn(size, VOCAB).to(dtype), own, wanted, rng.choice([0, 1, 5, 50, -1]))
        for r in mine:
            r.append_sampled(rng.randrange(VOCAB))
    assert seen <= warm and {name for name, *_ in seen} == {name for name, *_ in warm}


def test_the_host_in_a_devices_place_keeps_what_comes_and_has_no_room_for_a_cache():
    host, array = HostSampling(), np.arange(3)
    assert not any(host.memory()), "it has no memory of its own to plan"
    (x,) = host.to_device([array])
    assert x.data_ptr() == array.ctypes.data and host.to_host(x)() is x
    with pytest.raises(MemoryError, match="sampling alone"):
        host.allocate([], 1)


def test_providers_agree_on_every_token():
    rng, mirror = random.Random(5), random.Random(5)
    left, right = ([random_request(r, str(i)) for i in range(12)] for r in (rng, mirror))
    a, b = sampler("reference"), sampler(HOST)
    for _ in range(6):
        assert [token for token, _ in step(a, left)] == [token for token, _ in step(b, right)]


def test_a_draw_depends_on_key_and_position_alone():
    one, other = request("1", [1, 2, 3]), request("1", [9, 8, 7], temperature=1.0)
    assert step(sampler(), [one]) == step(sampler(), [other])  # the same key, position and logits
    other = Request(replace(request("1", [9, 8, 7]).core_request, random_key=(99, 17)))
    tokens = [[step(sampler(), [r])[0][0] for _ in range(20)] for r in (request("1", [1, 2, 3]), other)]
    assert tokens[0] != tokens[1]


def test_a_greedy_batch_is_one_argmax_and_uploads_nothing():
    device, uploads = HostDevice(), []
    ops, calls = bound(HOST), []
    upload, greedy = device.to_device, ops.greedy
    device.to_device = lambda arrays: uploads.append(1) or upload(arrays)
    ops.__dict__["greedy"] = lambda logits: calls.append(logits) or greedy(logits)
    sample, requests = Sampler(ops, device, VOCAB), [request(str(i), [1], temperature=0) for i in range(4)]
    logits = torch.randn(4, VOCAB).bfloat16()
    sample(logits, requests)
    uploads.clear()
    assert sample(logits, requests).token_ids.tolist() == logits.argmax(-1).tolist()
    assert uploads == [] and calls[-1] is logits


def test_it_looks_back_where_a_row_is_drawn_by_what_it_said():
    kinds = [{"temperature": 1.0, "min_tokens": 3, "logit_bias": {1: 2.0}}, {"bad_words_ids": ((5,), ())}]
    kinds += [{"frequency_penalty": 0.1}, {"presence_penalty": 0.1}, {"repetition_penalty": 1.1}]
    kinds += [{"bad_words_ids": ((5,), (6, 7))}]
    sample, found = sampler(), []
    for kind in kinds:
        found.append(sample.needs_previous_tokens([request("1", [1]), request("2", [1], **kind)]))
    assert found == [False, False, True, True, True, True]
    assert not sample.needs_previous_tokens([request("1", [1])]), "they have left"


def penalized(logits: np.ndarray, prompt, output, repetition=1.0, frequency=0.0, presence=0.0) -> np.ndarray:
    """The penalties by their definitions, one token at a time."""
    logits = logits.copy()
    for token in range(len(logits)):
        if token in prompt or token in output:
            logits[token] = logits[token] / repetition if logits[token] > 0 else logits[token] * repetition
        logits[token] -= frequency * output.count(token) + (presence if token in output else 0)
    return logits


@pytest.mark.parametrize("provider", PROVIDERS)
def test_penalties_equal_their_definitions_as_the_output_grows(provider):
    rng, together = random.Random(3), sampler(provider, "processed_logits")
    mixes = [(1.3, 0.0, 0.0), (1.0, 0.7, 0.0), (1.0, 0.0, -1.1), (0.8, 0.4, 0.6), (1.0, 0.0, 0.0)]
    names = ("repetition_penalty", "frequency_penalty", "presence_penalty")
    prompts = [[rng.randrange(20) for _ in range(6)] for _ in mixes]
    requests = [
        request(str(i), p, temperature=0, logprobs=-1, **dict(zip(names, mix, strict=True)))
        for i, (mix, p) in enumerate(zip(mixes, prompts, strict=True))
    ]
    for _ in range(80):  # past the first room of the counts
        logits = torch.stack([logits_of(r.request_id, len(r.token_ids)) for r in requests])
        wanted = [penalized(x.numpy(), r.token_ids[:6], r.token_ids[6:], *mix)
                  for x, r, mix in zip(logits, requests, mixes, strict=True)]  # fmt: skip
        _, logprobs = together(logits, requests)
        for row, r in enumerate(requests):
            got = torch.empty(VOCAB)
            got[logprobs.token_ids[row, 1:].long()] = logprobs.logprobs[row, 1:]
            np.testing.assert_allclose(got.numpy(), wanted[row], rtol=1e-5, atol=1e-5)
            r.append_sampled(rng.randrange(VOCAB))


def test_the_repetition_penalty_equals_that_of_transformers():
    r = request("1", [3, 5, 3], [7, 5], temperature=0, repetition_penalty=1.7, logprobs=-1)
    logits = logits_of("1", 5)[None]
    wanted = transformers.RepetitionPenaltyLogitsProcessor(1.7)(torch.tensor([r.token_ids]), logits.clone())
    _, found = sampler(mode="processed_logits")(logits, [r])
    assert torch.equal(torch.empty(1, VOCAB).scatter(1, found.token_ids[:, 1:].long(), found.logprobs[:, 1:]), wanted)


def processed(logits: torch.Tensor, temperature: float, top_k: int) -> torch.Tensor:
    scaled = logits / temperature
    return scaled.masked_fill(scaled < scaled.topk(top_k).values[-1], float("-inf"))


@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize("mode", MODES)
def test_each_mode_reports_what_it_says(provider, mode):
    r = request("1", [1], temperature=0.5, top_k=9, logit_bias={4: 3.0}, logprobs=VOCAB)
    silent = request("2", [1], temperature=0.7)
    logits = torch.stack([logits_of("2", 1), logits_of("1", 1)])
    biased = logits[1].clone()
    biased[4] += 3
    values = logits[1].clone() if mode.startswith("raw") else processed(biased, 0.5, 9)
    values = torch.log_softmax(values, -1) if mode.endswith("logprobs") else values
    tokens, found = sampler(provider, mode)(logits, [silent, r])
    assert torch.allclose(found.logprobs[1], values[found.token_ids[1].long()], atol=1e-5)
    assert found.token_ids[1, 0] == tokens[1] and found.ranks[1] == 1 + int((values > values[tokens[1].long()]).sum())
    assert found.token_ids[0].tolist() == [0] * (VOCAB + 1)  # it did not ask


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("num", [0, 3, -1])
def test_prompt_logprobs_are_the_models_own(mode, num):
    logits, tokens = torch.randn(6, VOCAB).bfloat16(), np.array([1, 9, 0, 399, 7, 7], np.int32)
    wanted = np.array([0, 1, 1, 1, 1, 0], np.int32)
    found = sampler(mode=mode).prompt_logprobs(logits, tokens, wanted, num)
    values = torch.log_softmax(logits.float(), -1) if mode.endswith("logprobs") else logits.float()
    assert found.token_ids.shape == (6, (VOCAB if num < 0 else num) + 1)
    assert torch.allclose(found.logprobs[1:5], values.gather(1, found.token_ids.long())[1:5])
    assert found.token_ids[:, 0].tolist() == (tokens * wanted).tolist()
    assert not found.ranks[[0, 5]].any()


@pytest.mark.parametrize("provider", PROVIDERS)
def test_only_allowed_tokens_are_drawn(provider):
    r = request("1", [1], allowed_token_ids=[7, 300], temperature=1.5)
    free = request("2", [1])
    sample, drawn = sampler(provider), set()
    for _ in range(60):
        drawn.add(step(sample, [free, r])[1][0])
    assert drawn == {7, 300}


@pytest.mark.parametrize("provider", PROVIDERS)
def test_min_tokens_bans_what_would_end_the_request_until_then(provider):
    r = request("1", [1], temperature=0, min_tokens=2, stop_ids=frozenset([5, 6]))
    never = request("2", [1], temperature=0, stop_ids=frozenset([5, 6]))
    sample, tokens = sampler(provider), []
    logits = torch.zeros(2, VOCAB)
    logits[:, [5, 6, 9]] = torch.tensor([3.0, 2.0, 1.0])
    for _ in range(4):
        tokens.append(sample(logits.clone(), [r, never]).token_ids.tolist())
        r.append_sampled(tokens[-1][0])
        never.token_ids.append(9)
    assert tokens == [[9, 5], [9, 5], [5, 5], [5, 5]]


def test_bad_words_are_banned_where_the_output_leads_to_them():
    logits = torch.zeros(VOCAB)
    logits[[5, 6, 7]] = torch.tensor([3.0, 2.0, 1.0])
    cases = [
        (((5,),), [], 6),  # one token: always
        (((8, 5),), [], 5),  # nothing said yet
        (((8, 5),), [8], 6),
        (((8, 5), (9, 8, 6)), [9, 8], 7),
        (((1, 5),), [], 5),  # the prompt does not count
        (((),), [], 5),
    ]
    for words, output, wanted in cases:
        r = request("1", [1], output, temperature=0, bad_words_ids=words)
        assert sampler()(logits[None].clone(), [r]).token_ids.tolist() == [wanted], words


def test_logit_bias_moves_the_choice():
    r = request("1", [1], temperature=0, logit_bias={11: 50.0, 12: -100.0})
    assert sampler()(torch.zeros(1, VOCAB), [r]).token_ids.tolist() == [11]


def test_a_broken_row_gives_minus_one_and_the_others_their_tokens():
    requests = [request(str(i), [1], temperature=t, logprobs=2) for i, t in enumerate([0.0, 1.0, 0.0, 1.0])]
    logits = torch.randn(4, VOCAB)
    wanted = sampler()(logits.clone(), requests).token_ids
    logits[[0, 1]] = float("nan")
    found = sampler()(logits, requests)
    assert found.token_ids.tolist() == [-1, -1, *wanted[2:].tolist()]


def test_no_rows_give_no_tokens():
    assert sampler()(torch.zeros(0, VOCAB), []).token_ids.tolist() == []


def test_an_unknown_mode_is_refused():
    with pytest.raises(ValueError, match="logprobs_mode must be one of raw_logprobs"):
        sampler(mode="raw")
