"""Models that answer with numbers: encoders of every family, and what an engine makes of hidden states."""

import copy
import random
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from quintet.conformance.check import ContractViolation, Trial, check, require
from quintet.conformance.harness.pooling_engine import PoolingEngine
from quintet.conformance.harness.subject import Subject
from quintet.conformance.harness.traffic import dtype_name, logits_tolerance, plain_dtype
from quintet.conformance.harness.worker_runner import WorkerRunner
from quintet.layers.build import RequestedOutputs
from quintet_tools.checkpoints.encoders import ENCODERS, PLACES, SMALL, encoder, hidden, made
from quintet_tools.checkpoints.tiny import PLAIN, VOCAB, Tiny, make

LENGTHS = (23, 1, 30, 9)  # of texts that go through a step together: all within 64
OTHERS = (40, 5, 17)  # of texts beside which one of them goes once more
SERVED = (40, 1, 17, 33, 2)  # of texts that an engine gets at once
CHUNK = 16  # tokens of a step, so that decoders' texts come in pieces
HALF = 1.5  # times the error of transformers in the same type, squared: see the section of models
HALF_SEEDS = (3, 4, 5, 6)  # of texts; their errors are added up: of one draw alone the ratio is 0.6 to 1.6
CLASSES = {**SMALL, "num_labels": 3}
FIRST_ID = 3  # the first that stands for no special token: RoBERTa counts no position for padding


@check("numbers.encoders")
def encoders(subject: Subject) -> Iterator[Trial]:
    for family, name in _variants(subject):
        yield Trial(f"{family}: {name}", partial(_encoder, subject, family, name), (f"family/{family}",))


@check("numbers.encoders")
def in_half(subject: Subject) -> Iterator[Trial]:
    for family in ENCODERS if torch.bfloat16 in subject.facts.dtypes else ():
        yield Trial(f"{family} in bfloat16", partial(_half, subject, family), (f"bfloat16/{family}",))


@check("numbers.alone")
def alone(subject: Subject) -> Iterator[Trial]:
    """A family's bits are shown where the platform promises any."""
    for family, name in list(_variants(subject))[: 1 if subject.facts.static_shapes else None]:
        features = (f"bits/{family}",) if subject.facts.batch_invariant else ()
        yield Trial(f"{family}: {name}", partial(_alone, subject, family, name), features)


@check("numbers.served")
def served(subject: Subject) -> Iterator[Trial]:
    calls: dict[str, tuple[str, Callable[[Subject], None]]] = {
        "embeddings, and vectors of tokens": ("embeddings", _embeddings),
        "classes of texts": ("classification", _classes),
        "classes of tokens": ("token-classification", _token_classes),
        "scores of pairs, in segments": ("scores", _scores),
        "a decoder's last token, in chunks and cached": ("decoders", _last),
        "a decoder's mean, over chunks": ("decoders-mean", _mean),
        "a decoder whose tokens see both ways": ("decoders-both-ways", _both_ways),
    }
    for what, (feature, call) in calls.items():
        yield Trial(what, partial(call, subject), (f"numbers/{feature}",))


def _variants(subject: Subject) -> Iterator[tuple[str, str]]:
    """All; where shapes are fixed, and each model is compiled, the first of each family."""
    for family, variants in ENCODERS.items():
        for name in list(variants)[: 1 if subject.facts.static_shapes else None]:
            yield family, name


def texts(lengths: Sequence[int], seed: int = 3) -> list[list[int]]:
    generator = random.Random(seed)
    return [[generator.randrange(FIRST_ID, VOCAB) for _ in range(length)] for length in lengths]


def _runner(subject: Subject, tiny: Tiny, dtype: torch.dtype) -> WorkerRunner:
    return subject.runner(
        tiny, dtype, requested_outputs=RequestedOutputs(logits=False, hidden_states=True), max_model_len=PLACES
    )


def _states(
    run: WorkerRunner, ids: dict[Any, list[int]], segments: dict[Any, list[int]] | None = None
) -> dict[Any, Tensor]:
    """Hidden states of texts that are whole in one step."""
    out = run.outputs(ids, segments)
    require(out.hidden_states is not None, "hidden states were wanted, and did not come")
    assert out.hidden_states is not None
    found = run.host_outputs(ids, out.hidden_states)
    for key in ids:
        run.finish(key)
    return found


def _encoder(subject: Subject, family: str, name: str) -> None:
    """The second half of each text is of another segment, where there are any. The third time, as it was recorded."""
    tiny, dtype = encoder(family, name), plain_dtype(subject.facts)
    run, ids = _runner(subject, tiny, dtype), dict(enumerate(texts(LENGTHS)))
    segments = {key: [int(2 * at >= len(each)) for at in range(len(each))] for key, each in ids.items()}
    given = segments if run.worker.model.uses_token_types else {}
    for _ in range(3):
        got = _states(run, ids, given)
        for key, each in ids.items():
            _near(f"text {key}", got[key], hidden(tiny.reference, each, given.get(key)), dtype)


def _half(subject: Subject, family: str) -> None:
    """No further from float32 than transformers is in the same type, give or take."""
    tiny, dtype = encoder(family, next(iter(ENCODERS[family]))), torch.bfloat16
    half, run, ours, theirs = copy.deepcopy(tiny.reference).to(dtype), _runner(subject, tiny, dtype), 0.0, 0.0
    for seed in HALF_SEEDS:
        ids = dict(enumerate(texts(LENGTHS, seed)))
        got = _states(run, ids)
        for key, each in ids.items():
            exact = hidden(tiny.reference, each)
            ours += float((got[key] - exact).pow(2).sum())
            theirs += float((hidden(half, each) - exact).pow(2).sum())
    require(
        ours <= HALF * theirs,
        f"squared errors against float32 add up to {ours:.4g}; transformers on the host, in {dtype_name(dtype)}, has "
        f"{theirs:.4g}, and {HALF} times that is allowed",
    )


def _alone(subject: Subject, family: str, name: str) -> None:
    """In every type: by itself, beside texts of other lengths, in another order."""
    tiny, ids = encoder(family, name), texts(LENGTHS)
    others = texts(OTHERS, seed=4)
    for dtype in subject.facts.dtypes:
        run = _runner(subject, tiny, dtype)
        together = _states(run, dict(enumerate(ids)))
        turned = _states(run, {key: ids[key] for key in reversed(range(len(ids)))})
        for key, each in enumerate(ids):
            beside = {"other": others[key % len(others)][: 64 - len(each)]}
            for what, got in (
                ("beside all", together[key]),
                ("in another order", turned[key]),
                ("beside one", _states(run, {**beside, key: each})[key]),
            ):
                _same(subject, f"text {key} in {dtype_name(dtype)}, {what}", got, _states(run, {key: each})[key], dtype)


def _embeddings(subject: Subject) -> None:
    """Checks embeddings of the first token, cut to some dimensions, of length 1 or as they are; and each token's."""
    tiny, ids, dtype = make_matryoshka(), texts(SERVED), plain_dtype(subject.facts)
    engine, states = PoolingEngine(subject, tiny), [hidden(tiny.reference, each) for each in ids]
    for what, params, wanted in (
        ("its embedding", {"task": "embed"}, lambda x: x[0] / x[0].norm()),
        ("as it is", {"task": "embed", "normalize": False}, lambda x: x[0]),
        ("of 24 dimensions", {"task": "embed", "dimensions": 24}, lambda x: x[0, :24] / x[0, :24].norm()),
        ("each token's", {"task": "token_embed"}, lambda x: x / x.norm(dim=-1, keepdim=True)),
    ):
        got = engine.pool(ids, **params)
        for key, each in enumerate(states):
            _near(f"text {key}, {what}", torch.tensor(got[key]), wanted(each), dtype)


def make_matryoshka() -> Tiny:
    """Returns a BERT with Matryoshka embeddings: its first 24 or 48 numbers may stand for all."""
    return made("bert", "Model", {**SMALL, "matryoshka_dimensions": [24, 48]})


def _classes(subject: Subject) -> None:
    tiny, ids = made("bert", "ForSequenceClassification", CLASSES), texts(SERVED)
    got, plain = (PoolingEngine(subject, tiny).pool(ids, task="classify", use_activation=use) for use in (True, False))
    for key, each in enumerate(ids):
        logits = _logits(tiny, each)
        _near(f"text {key}", torch.tensor(got[key]), logits.softmax(-1), plain_dtype(subject.facts))
        _near(f"text {key}, logits", torch.tensor(plain[key]), logits, plain_dtype(subject.facts))


def _token_classes(subject: Subject) -> None:
    tiny, ids = made("bert", "ForTokenClassification", CLASSES), texts(SERVED)
    for key, got in enumerate(PoolingEngine(subject, tiny).pool(ids, task="token_classify")):
        wanted = _logits(tiny, ids[key]).softmax(-1)
        _near(f"text {key}", torch.tensor(got), wanted, plain_dtype(subject.facts))


def _scores(subject: Subject) -> None:
    """Checks scores of text pairs; with one segment for both the score differs, so this shows that segments arrive."""
    tiny, ids = made("bert", "ForSequenceClassification", {**SMALL, "num_labels": 1}), texts(SERVED)
    segments = [[int(2 * at >= len(each)) for at in range(len(each))] for each in ids]
    wants = [_logits(tiny, each, own).sigmoid() for each, own in zip(ids, segments, strict=True)]
    flat = _logits(tiny, ids[0]).sigmoid()
    require(abs(float(flat - wants[0])) > 0.01, "the reference's scores are too alike to tell segments")
    for key, got in enumerate(PoolingEngine(subject, tiny).pool(ids, segments, task="score")):
        _near(f"pair {key}", torch.tensor(got), wants[key], plain_dtype(subject.facts))


@torch.no_grad()
def _logits(tiny: Tiny, ids: Sequence[int], segments: Sequence[int] | None = None) -> Tensor:
    """Returns the reference's logits of one text."""
    more = {} if segments is None else {"token_type_ids": torch.tensor([list(segments)])}
    found: Tensor = tiny.reference(torch.tensor([list(ids)]), **more).logits[0]
    return found


def _last(subject: Subject) -> None:
    """In chunks, and once more when its beginning is cached."""
    tiny, ids = make("llama", PLAIN), texts(SERVED)
    engine = PoolingEngine(subject, tiny, max_num_batched_tokens=CHUNK)
    first, again = (engine.pool(ids, task="embed") for _ in range(2))
    for key, each in enumerate(ids):
        last = tiny.states(each)[0][-1]
        for what, got in (("", first[key]), (", cached", again[key])):
            _near(f"text {key}{what}", torch.tensor(got), last / last.norm(), plain_dtype(subject.facts))


def _mean(subject: Subject) -> None:
    """A text that comes in pieces has the mean of one that comes whole; its bits, where any are promised."""
    tiny, ids, dtype = make("llama", PLAIN), texts(SERVED), plain_dtype(subject.facts)
    mean = {"pooler_config": {"pooling_type": "MEAN", "normalize": False}}
    pieces = PoolingEngine(subject, tiny, max_num_batched_tokens=CHUNK, **mean).pool(ids, task="embed")
    whole = PoolingEngine(subject, tiny, **mean).pool(ids, task="embed")
    for key, each in enumerate(ids):
        _near(f"text {key}", torch.tensor(whole[key]), tiny.states(each)[0].mean(0), dtype)
        _same(subject, f"text {key} in pieces", torch.tensor(pieces[key])[None], torch.tensor(whole[key])[None], dtype)


def _both_ways(subject: Subject) -> None:
    """As checkpoints say it that were made into embedders; the reference's mask hides nothing, which shows."""
    tiny, ids = make("llama", {**PLAIN, "is_causal": False}), texts(SERVED)
    got = PoolingEngine(subject, tiny, pooler_config={"pooling_type": "MEAN"}).pool(ids, task="token_embed")
    for key, each in enumerate(ids):
        with torch.no_grad():
            open_mask = torch.zeros(1, 1, len(each), len(each))
            trunk = tiny.reference.get_decoder()
            seen = trunk(torch.tensor([each]), attention_mask=open_mask, use_cache=False).last_hidden_state[0]
        back = make("llama", PLAIN).states(each)[0]  # of the same weights
        require(len(each) < 2 or not torch.allclose(seen[0], back[0], atol=0.01), "the reference looks back alone")
        wanted = seen / seen.norm(dim=-1, keepdim=True)
        _near(f"text {key}", torch.tensor(got[key]), wanted, plain_dtype(subject.facts))


def _near(what: str, got: Tensor, want: Tensor, dtype: torch.dtype) -> None:
    """To the closeness of a whole model's numbers in this type, as a share of their size."""
    require(got.shape == want.shape, f"{what}: the shape is {tuple(got.shape)}, transformers has {tuple(want.shape)}")
    size = float(want.pow(2).mean().sqrt())
    off = (got - want).abs().nan_to_num(float("inf"))
    if float(off.max()) > (limit := 4 * logits_tolerance(dtype) * size):
        at = tuple(int(i) for i in torch.nonzero(off == off.max())[0])
        raise ContractViolation(
            f"{what}: element {list(at)} is {float(got[at]):.6g}, transformers has {float(want[at]):.6g}; "
            f"{limit:.3g} off is allowed"
        )


def _same(subject: Subject, what: str, got: Tensor, want: Tensor, dtype: torch.dtype) -> None:
    """To the last bit, where the platform declares it; else near."""
    if not subject.facts.batch_invariant:
        _near(what, got, want, dtype)
    elif not torch.equal(got, want):
        row, column = (got != want).nonzero()[0].tolist()
        raise ContractViolation(
            f"{what}: row {row}, column {column} is {got[row, column]!r}, alone {want[row, column]!r}"
        )
