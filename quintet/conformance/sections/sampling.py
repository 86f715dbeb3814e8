"""Compares sampling on the device, from logits to tokens, with the same sampler on the specifications, on the host."""

import random
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from quintet.conformance.check import ContractViolation, Trial, check, require
from quintet.conformance.close import dtype_name, require_close
from quintet.conformance.harness.samplers import EDGE, ROWS, VOCAB, SamplerPair, edges, logits_of, request
from quintet.conformance.harness.subject import Subject
from quintet.engine.request import Request
from quintet.engine.sampling.sampler import LogprobTensors, Sampled
from quintet.ops.random import gumbel
from quintet.ops.sampling import NEVER, Draw, scale_logits
from quintet.sampling_params import SamplingParams

LARGE = 50_000  # tokens of today's vocabularies, about
STEPS = 6

# --------------------------------------------------------------------------------------------------------------- draws


DRAWS: dict[str, list[dict[str, Any]]] = {
    "temperature": [{"temperature": t} for t in (0.01, 0.2, 0.7, 1.0, 1.5, 4.0, 100.0)],
    "top_k": [{"top_k": k} for k in (1, 2, 7, 40, 200, VOCAB, 10**6)],
    "top_p": [{"top_p": p} for p in (1e-6, 0.1, 0.5, 0.9, 0.99, 0.9999)],
    "min_p": [{"min_p": p} for p in (0.001, 0.05, 0.3, 1.0)],
    "greedy": [{"temperature": 0.0}, {"temperature": 0.0, "top_k": 3, "top_p": 0.5}],
    "all together": [
        {"temperature": 0.7, "top_k": 20, "top_p": 0.9, "min_p": 0.02},
        {"temperature": 1.3, "top_k": 5, "top_p": 0.95},
        {"temperature": 1.1, "top_p": 0.8, "min_p": 0.05},
        {"temperature": 0.0},
        {},
    ],
}


@check("sampling.draws")
def draws(subject: Subject) -> Iterator[Trial]:
    for name, kinds in DRAWS.items():
        features = () if name == "all together" else (f"sampling/{name}",)
        yield Trial(name, partial(_drawn, subject, kinds), (*features, "op/sample", "op/greedy"))
    yield Trial("rows that come, go and change places", partial(_position_independent, subject), ("op/sample",))
    yield Trial("places far on in a request", partial(_far_positions, subject), ("op/sample",))
    yield Trial(f"{LARGE} tokens", partial(_large, subject), ("op/sample",))
    yield Trial("rows from which nothing can be drawn", partial(_undrawable, subject), ("op/sample", "op/greedy"))
    for dtype in subject.facts.dtypes:
        yield Trial(
            f"the likeliest of logits in {dtype_name(dtype)}", partial(_likeliest, subject, dtype), ("op/greedy",)
        )
    yield Trial("the random numbers themselves", partial(_noise, subject), ("op/gumbel",))


def _drawn(subject: Subject, kinds: list[dict[str, Any]]) -> None:
    both, requests = SamplerPair(subject), [request(i, **kind) for i, kind in enumerate(kinds)]
    for _ in range(STEPS):
        _same_tokens(both, logits_of(requests), requests)


def _same_tokens(both: SamplerPair, logits: Tensor, requests: Sequence[Request]) -> None:
    """Draws one token for each, and appends the specification's."""
    ours, theirs = both(logits, requests)
    got, want = ours.token_ids.tolist(), theirs.token_ids.tolist()
    for row, (token, wanted) in enumerate(zip(got, want, strict=True)):
        if token != wanted and not _on_the_edge(both, row, token):
            raise ContractViolation(
                f"row {row}, {_shown(requests[row])}: drew {token}, the specification {wanted}, whose logits are "
                f"{float(logits[row, token]):.6g} and {float(logits[row, wanted]):.6g}"
            )
        requests[row].token_ids.append(wanted)


def _on_the_edge(both: SamplerPair, row: int, token: int) -> bool:
    """True if, by the specification's own numbers, the token is within a rounding of the one that it draws."""
    if token < 0 or "sample" not in both.seen:
        return False
    logits, draw = both.seen["sample"]
    logits, draw = logits[row : row + 1], Draw(*(column[row : row + 1] for column in draw))
    if not float(draw.temperature) > 0:
        return False
    tight, loose = edges(scale_logits.reference(logits, draw.temperature), draw)
    ids = torch.arange(logits.shape[1], dtype=torch.int32)[None]
    scores = scale_logits.reference(logits, draw.temperature) + gumbel.reference(draw.keys, draw.positions, ids)
    best = float(scores[tight].max())
    return bool(loose[0, token]) and float(scores[0, token]) >= best - EDGE * max(1.0, abs(best))


def _shown(of: Request) -> str:
    names = ("temperature", "top_k", "top_p", "min_p")
    return ", ".join(f"{name} {getattr(of.params, name):g}" for name in names)


def _mixed(rng: random.Random, number: int, vocab: int = VOCAB) -> Request:
    """Any mix of cuts."""

    def maybe(value: Any, off: Any) -> Any:
        return value if rng.random() < 0.5 else off

    prompt = [rng.randrange(vocab) for _ in range(rng.randrange(1, 9))]
    return request(
        number,
        prompt,
        temperature=maybe(0.0 if rng.random() < 0.3 else 1.0, rng.uniform(0.2, 1.5)),
        top_k=maybe(rng.randrange(1, 60), 0),
        top_p=maybe(rng.uniform(0.1, 0.99), 1.0),
        min_p=maybe(rng.uniform(0.01, 0.3), 0.0),
    )


def _position_independent(subject: Subject) -> None:
    """A request's draw is its own, whatever stands beside it and wherever it stands."""
    rng, both = random.Random(1), SamplerPair(subject)
    requests = [_mixed(rng, number) for number in range(ROWS)]
    for _ in range(3 * STEPS):
        chosen = rng.sample(requests, rng.randrange(1, ROWS + 1))
        for _ in range(rng.randrange(1, 3)):
            _same_tokens(both, logits_of(chosen), chosen)


def _far_positions(subject: Subject) -> None:
    both = SamplerPair(subject)
    requests = [request(i, [5] * length) for i, length in enumerate((1, 2, 1000, 65_535, 65_536, 1_000_003))]
    for _ in range(2):
        _same_tokens(both, logits_of(requests), requests)


def _large(subject: Subject) -> None:
    rng, both = random.Random(2), SamplerPair(subject, LARGE, most=20)
    requests = [_mixed(rng, number, LARGE) for number in range(8)]
    for spread in (1.0, 8.0):
        _same_tokens(both, logits_of(requests, LARGE, spread), requests)


def _undrawable(subject: Subject) -> None:
    """-1 for them, and for the others what they would have drawn."""
    mixes: list[list[dict[str, Any]]] = [[{"temperature": 0.0}] * 6, [{}] * 6, [*DRAWS["all together"], {"top_k": 5}]]
    for kinds in mixes:
        both, requests = SamplerPair(subject), [request(i, **kind) for i, kind in enumerate(kinds)]
        logits = logits_of(requests)
        logits[1] = torch.nan
        logits[2, 7] = torch.inf
        logits[4] = NEVER
        logits[0, :-3] = NEVER  # three are left
        ours, _ = both(logits, requests)
        bad = ours.token_ids[[1, 2, 4]].tolist()
        require(bad == [-1, -1, -1], f"rows of NaN, with an infinity, and of -inf alone gave tokens {bad}, not -1")
        _same_tokens(both, logits, requests)


def _likeliest(subject: Subject, dtype: torch.dtype) -> None:
    both, requests = SamplerPair(subject), [request(i, temperature=0.0) for i in range(6)]
    logits = logits_of(requests, spread=1.0)
    logits[0] = 2.5  # all equal: the first
    logits[1, [30, 17, 400]] = 60.0
    logits[2] = -logits[2].abs() - 1.0
    _same_tokens(both, logits.to(dtype), requests)


def _noise(subject: Subject) -> None:
    generator = torch.Generator().manual_seed(0)
    keys = torch.randint(-(2**31), 2**31 - 1, (ROWS, 2), generator=generator).to(torch.int32)
    positions = torch.arange(ROWS, dtype=torch.int32) ** 5
    ids = torch.arange(2048, dtype=torch.int32)[None]
    got = subject.down(subject.ops.gumbel(*map(subject.up, (keys, positions, ids))))
    require_close(
        "gumbel() of 16 keys and places, 2048 tokens", got, gumbel.reference(keys, positions, ids), EDGE / 100
    )


# --------------------------------------------------------------------------------------------------------------- edits

WORDS = ((5,), (1, 9), (3, 1, 7), ())
EDITS: dict[str, tuple[str, list[dict[str, Any]]]] = {  # what a request asks for -> the op, and requests
    "repetition_penalty": ("penalize", [{"repetition_penalty": p} for p in (0.5, 1.3, 10.0)]),
    "frequency_penalty": ("penalize", [{"frequency_penalty": p} for p in (-2.0, 0.3, 2.0)]),
    "presence_penalty": ("penalize", [{"presence_penalty": p} for p in (-1.1, 0.7)]),
    "penalties together": (
        "penalize",
        [{"repetition_penalty": 1.2, "frequency_penalty": 0.4, "presence_penalty": -0.6}, {}, {"presence_penalty": 1}],
    ),
    "logit_bias": ("bias_tokens", [{"logit_bias": {0: 5.5, 17: -100.0, VOCAB - 1: 100.0}}, {}, {"logit_bias": {3: 1}}]),
    "allowed_token_ids": (
        "keep_tokens",
        [{"allowed_token_ids": [0]}, {}, {"allowed_token_ids": [31, 32, 63, 64, VOCAB - 1]}],
    ),
    "bad_words": ("ban_tokens", [{"bad_words_ids": WORDS}, {}, {"bad_words_ids": ((400,),)}]),
    "min_tokens": ("ban_tokens", [{"min_tokens": 3, "stop_ids": frozenset([2, 8])}, {}, {"min_tokens": 1}]),
    "min_p": ("filter_logits", [{"temperature": 1.0, "min_p": p} for p in (0.001, 0.2, 1.0)]),
    "top_k": ("filter_logits", [{"temperature": 0.8, "top_k": k} for k in (1, 7, 300)]),
    "top_p": ("filter_logits", [{"temperature": 1.2, "top_p": p} for p in (0.01, 0.6, 0.99)]),
    "temperature": ("scale_logits", [{"temperature": t} for t in (0.01, 0.3, 1.0, 3.0)]),
    "everything at once": (
        "filter_logits",
        [
            {"temperature": 0.9, "top_p": 0.9, "repetition_penalty": 1.5, "logit_bias": {4: 3.0}},
            {"temperature": 1.1, "top_k": 50, "min_tokens": 3, "stop_ids": frozenset([1]), "bad_words_ids": WORDS},
            {"temperature": 0.0, "frequency_penalty": 1.0, "allowed_token_ids": list(range(5, 60))},
        ],
    ),
}


@check("sampling.edits")
def edits(subject: Subject) -> Iterator[Trial]:
    for name, (op, kinds) in EDITS.items():
        features = (f"sampling/{name}",) if name in SamplingParams.__dataclass_fields__ else ()
        yield Trial(name, partial(_processed_logits, subject, kinds), (*features, f"op/{op}"))


def _processed_logits(subject: Subject, kinds: list[dict[str, Any]]) -> None:
    """Compares the processed logits of every token, as the outputs grow."""
    both, rng = SamplerPair(subject, mode="processed_logits"), random.Random(3)
    requests = [request(i, [3, 1, 3, 8], **{"temperature": 0.0, "logprobs": -1, **k}) for i, k in enumerate(kinds)]
    for _ in range(STEPS):
        ours, theirs = both(logits_of(requests), requests)
        for row, each in enumerate(requests):
            _same_values(both, row, _by_token(ours, row), _by_token(theirs, row), each)
            each.token_ids.append(rng.choice([3, 1, 7, 5, 9, rng.randrange(VOCAB)]))


def _by_token(of: Sampled, row: int) -> Tensor:
    """The values of all tokens of a row, [V]."""
    assert of.logprobs is not None, "every request asks for them"
    ids, values = of.logprobs.token_ids[row, 1 : VOCAB + 1], of.logprobs.logprobs[row, 1 : VOCAB + 1]
    require(sorted(ids.tolist()) == list(range(VOCAB)), "all log-probabilities were asked for, and tokens are missing")
    return torch.empty(VOCAB).scatter(0, ids.long(), values)


def _same_values(both: SamplerPair, row: int, got: Tensor, want: Tensor, of: Request) -> None:
    kept, wanted = got > NEVER, want > NEVER
    differ = (kept != wanted).nonzero().flatten().tolist()
    if differ and "filter_logits" in both.seen:
        scaled, draw = both.seen["filter_logits"]
        tight, loose = (mask[row] for mask in edges(scaled, draw))
        differ = [token for token in differ if tight[token] or not loose[token]]
    what = f"row {row}, after {of.num_output} tokens"
    if differ:
        token = differ[0]
        raise ContractViolation(
            f"{what}: token {token} came as {float(got[token]):.6g}, {float(want[token]):.6g} is wanted"
        )
    common = kept & wanted
    require_close(what, torch.where(common, got, 0.0), torch.where(common, want, 0.0))


# ---------------------------------------------------------------------------------------------------- log-probabilities


@check("sampling.logprobs")
def logprobs(subject: Subject) -> Iterator[Trial]:
    features = ("sampling/logprobs", "op/top_logprobs", "op/widen")
    for mode in ("raw_logprobs", "raw_logits", "processed_logprobs"):
        yield Trial(f"{mode} of drawn tokens", partial(_of_draws, subject, mode), features)
    for dtype in subject.facts.dtypes:
        what = f"of a prompt's tokens, from logits in {dtype_name(dtype)}"
        yield Trial(what, partial(_of_prompts, subject, dtype), ("sampling/prompt_logprobs", *features[1:]))
    yield Trial("equal logits, in the order of their ids", partial(_tied, subject), features)
    yield Trial("beside rows that are not numbers", partial(_beside_nan, subject), features)
    yield Trial(f"{LARGE} tokens", partial(_of_many, subject), features)


def _of_draws(subject: Subject, mode: str) -> None:
    """Greedy, so that both samplers speak of the same token; rows that ask for none are zeros."""
    nums, both = (0, 5, None, 1, 20, -1), SamplerPair(subject, mode=mode)
    edit: dict[str, Any] = {"repetition_penalty": 1.4} if mode.startswith("processed") else {}
    requests = [request(i, temperature=0.0, logprobs=num, **edit) for i, num in enumerate(nums)]
    for _ in range(2):
        ours, theirs = both(logits_of(requests), requests)
        for row, num in enumerate(nums):
            columns = 0 if num is None else 1 + (VOCAB if num < 0 else num)
            _same_found(ours.logprobs, theirs.logprobs, row, columns, mode)
        for each, token in zip(requests, theirs.token_ids.tolist(), strict=True):
            each.token_ids.append(token)


def _same_found(ours: LogprobTensors | None, theirs: LogprobTensors | None, row: int, columns: int, what: str) -> None:
    assert theirs is not None, "some request asks for them"
    if ours is None:
        raise ContractViolation("log-probabilities were asked for, and none came")
    got, want = ours.token_ids[row, :columns].tolist(), theirs.token_ids[row, :columns].tolist()
    require(got == want, f"{what}, row {row}: tokens by likelihood are {got[:9]}, wanted {want[:9]}")
    require_close(f"{what}, row {row}: values", ours.logprobs[row, :columns], theirs.logprobs[row, :columns])
    rank, wanted = int(ours.ranks[row]), int(theirs.ranks[row])
    require(rank == wanted, f"{what}, row {row}: the rank of token {want[:1]} is {rank}, wanted {wanted}")


def _compare(both: SamplerPair, logits: Tensor, wanted: Tensor, num: int, what: str) -> None:
    rows = len(logits)
    own = torch.arange(rows, dtype=torch.int32) * (both.vocab - 1) // max(rows - 1, 1)
    ours, theirs = both.prompts(logits, own, wanted, num)
    for row in range(rows):
        if not bool(logits[row].isnan().any()):
            _same_found(ours, theirs, row, 1 + (both.vocab if num < 0 else num), what)


def _of_prompts(subject: Subject, dtype: torch.dtype) -> None:
    both, requests = SamplerPair(subject), [request(i) for i in range(10)]
    wanted = torch.tensor([1, 0, 1, 1, 0, 1, 1, 1, 0, 1], dtype=torch.int32)
    logits = logits_of(requests).to(dtype)
    logits[3, 50:90] = NEVER
    for num in (0, 3, -1):
        _compare(both, logits, wanted, num, f"{num} of logits in {dtype_name(dtype)}")


def _tied(subject: Subject) -> None:
    both, logits = SamplerPair(subject), torch.zeros(4, VOCAB)
    logits[1, ::3] = 1.0
    logits[2] = torch.arange(VOCAB).flip(0) // 50
    logits[3, -1] = NEVER
    for num in (5, -1):
        _compare(both, logits, torch.ones(4, dtype=torch.int32), num, f"{num} of equal logits")


def _beside_nan(subject: Subject) -> None:
    both, logits = SamplerPair(subject), logits_of([request(i) for i in range(6)])
    logits[[1, 4]] = torch.nan
    wanted = torch.tensor([1, 1, 0, 1, 0, 1], dtype=torch.int32)
    for num in (0, 5):
        _compare(both, logits, wanted, num, "beside rows of NaN")


def _of_many(subject: Subject) -> None:
    both = SamplerPair(subject, LARGE, most=20)
    logits = logits_of([request(i) for i in range(6)], LARGE)
    _compare(both, logits, torch.ones(6, dtype=torch.int32), 20, f"20 of {LARGE}")
