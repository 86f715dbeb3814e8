"""Small models of every family, in every dtype and every scheme, against transformers."""

import copy
from collections.abc import Iterator, Sequence
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from quintet.conformance.check import ContractViolation, NotSupported, Trial, check, require
from quintet.conformance.harness.encoder_runner import EncoderRunner
from quintet.conformance.harness.subject import Subject
from quintet.conformance.harness.traffic import (
    TrafficOutput,
    check_tokens,
    dtype_name,
    greedy,
    logits_tolerance,
    plain_dtype,
)
from quintet.conformance.harness.turns_runner import TurnsRunner
from quintet.conformance.harness.worker_runner import WorkerRunner, random_prompts
from quintet.interface.weights import ShardRange, WeightFormat
from quintet.layers.build import RequestedOutputs
from quintet.layers.quantization import ONLINE, QuantizationPlan
from quintet.ops.quantize import quantize
from quintet.ops.quantized import dequantized
from quintet_tools.checkpoints.added_families import added_families
from quintet_tools.checkpoints.encoder_decoders import ENCODER_DECODERS, behind, encoder_decoder, encoder_input
from quintet_tools.checkpoints.tiny import (
    EVERY,
    FAMILIES,
    PLAIN,
    VOCAB,
    Tiny,
    added_names,
    make,
    smooth,
    variant,
    variants,
)

LENGTHS = (30, 1, 37, 9)  # tokens of the requests that go through a model
ENCODED = (40, 1, 17, 64)  # tokens that their encoder takes, or 25 ms of sound, as far as these have no fixed number
# the tokens of each request in each step: prompts in one piece and in chunks, decodes beside them, all within 64
STEPS = ((23, 1, 20, 0), (1, 0, 10, 7), (1, 0, 1, 1), (1, 0, 1, 1), (4, 0, 5, 0))
WIDE = {  # groups of 128, 64 and 32 divide its inputs, none divides those of one layer
    **PLAIN, "hidden_size": 128, "intermediate_size": 192, "num_attention_heads": 8, "num_key_value_heads": 4,
    "head_dim": 16, "num_hidden_layers": 2,
}  # fmt: skip
OTHER = {**WIDE, "intermediate_size": 96, "num_hidden_layers": 1}  # a model beside one of WIDE
NARROW = {**WIDE, "intermediate_size": 200}  # the products down have 200 inputs: they stay as they are
MAX_PROMPT = 20  # tokens of a prompt beside which others go through a step of 64
GENERATED = 6  # tokens that follow each
OUTPUTS = ("llama", "gemma3_text", "gpt2")
FEW = ("llama", "gemma2")  # families in every dtype, where each model is compiled
HALF = 1.5  # times the error of transformers in the same type, squared: rounded at other places, not more often
MAGNIFIED = 2  # times the error of transformers in float32: chunks and single tokens add in other orders
MAX_ERROR_RATIO = 1.3  # times the error of the specification's weights: a scale that is off shows beside it
EIGHT_BITS = 0.05  # of the logits' size: what activations in 8 bits may add


@check("models.families")
def families(subject: Subject) -> Iterator[Trial]:
    for family, name in _variants(subject):
        yield Trial(f"{family}: {name}", partial(_family, subject, family, name), (f"family/{family}",))
        yield Trial(f"{family}: {name}, tokens", partial(_tokens, subject, family, name), (f"tokens/{family}",))
    for name, reason in added_families()[1].items():
        if name not in EVERY:  # no feature: without a model to compare with, a family stays unverified
            yield Trial(f"{name}: added by a package", partial(_without_reference, reason))


def _without_reference(reason: str) -> None:
    raise NotSupported(reason)


@check("models.families")
def encoder_decoders(subject: Subject) -> Iterator[Trial]:
    for family in ENCODER_DECODERS:
        yield Trial(f"{family}: behind an encoder", partial(_behind_encoder, subject, family), (f"family/{family}",))


@check("models.dtypes")
def dtypes(subject: Subject) -> Iterator[Trial]:
    for dtype in subject.facts.dtypes:
        half = dtype == torch.bfloat16
        every = (*EVERY, *added_names()) if half else FAMILIES
        for family in FEW if subject.facts.static_shapes else every:
            features = (f"bfloat16/{family}",) if half else ()
            if family == "llama":  # a family that is refused says nothing of the type
                features = (*features, f"dtype/{dtype_name(dtype)}")
            yield Trial(f"{family} in {dtype_name(dtype)}", partial(_dtype, subject, family, dtype), features)


@check("models.schemes")
def schemes(subject: Subject) -> Iterator[Trial]:
    for name in sorted(subject.facts.weight_formats & set(ONLINE)):
        for what, settings in (("all groups divide", WIDE), ("one layer stays", NARROW)):
            yield Trial(f"{name}: {what}", partial(_scheme, subject, name, settings), (f"scheme/{name}",))


@check("models.replaced")
def replaced(subject: Subject) -> Iterator[Trial]:
    schemes = [None, *sorted(subject.facts.weight_formats & set(ONLINE))]
    for name in schemes[:2] if subject.facts.static_shapes else schemes:
        yield Trial(f"a tied head, {name or 'as it is'}", partial(_replaced, subject, name), ("reload",))


@check("models.turns")
def turns(subject: Subject) -> Iterator[Trial]:
    yield Trial("two models on one cache", partial(_turns, subject))


@check("models.outputs")
def outputs(subject: Subject) -> Iterator[Trial]:
    for family in OUTPUTS[: 1 if subject.facts.static_shapes else None]:
        yield Trial(f"{family}: logits, hidden states and taps", partial(_outputs, subject, family))
    yield Trial("llama: hidden states alone", partial(_hidden_alone, subject))


def _variants(subject: Subject) -> Iterator[tuple[str, str]]:
    """All; where shapes are fixed, and each model is compiled, the first of families with something of their own."""
    for family in (*(FAMILIES if subject.facts.static_shapes else EVERY), *added_names()):
        for name in list(variants(family))[: 1 if subject.facts.static_shapes else None]:
            yield family, name


def _family(subject: Subject, family: str, name: str) -> None:
    tiny, dtype = variant(family, name), plain_dtype(subject.facts)
    got = logits_in_steps(_runner(subject, family, name))
    for number, (ids, logits) in enumerate(zip(_ids(), got, strict=True)):
        want = tiny.logits(ids)
        require(float(want.std()) > 0.3, "the reference's logits are too alike to tell anything")
        limit = logits_tolerance(dtype) * float(want.std())
        if float((logits - want).abs().max()) > limit:
            want, limit = _exact(tiny, ids, want, limit)
        _close(f"request {number}", logits, want, limit)


def _behind_encoder(subject: Subject, family: str) -> None:
    """Each request reads the rows of an input of its own; prompts come in chunks, beside decodes."""
    tiny, dtype = encoder_decoder(family), plain_dtype(subject.facts)
    length = getattr(tiny.config, "max_target_positions", None) or tiny.config.max_position_embeddings
    runner = EncoderRunner(tiny, subject.make(), dtype, length)
    inputs = [encoder_input(tiny, seed, count) for seed, count in enumerate(ENCODED)]
    for key, given in enumerate(inputs):
        runner.encode(key, given)
    wanted = [behind(tiny, given).logits(ids) for given, ids in zip(inputs, _ids(), strict=True)]
    swapped = behind(tiny, inputs[1]).logits(_ids()[0])
    require(_relative(swapped, wanted[0]) > 0.1, "the reference's logits hang too little on the encoder's input")
    for number, (ids, logits) in enumerate(zip(_ids(), logits_in_steps(runner), strict=True)):
        want = wanted[number]
        limit = logits_tolerance(dtype) * float(want.std())
        if float((logits - want).abs().max()) > limit:
            want, limit = _exact(behind(tiny, inputs[number]), ids, want, limit)
        _close(f"request {number}", logits, want, limit)


def _exact(tiny: Tiny, ids: Sequence[int], plain: Tensor, limit: float) -> tuple[Tensor, float]:
    """Returns expected logits and tolerance of a model with layers that magnify roundings: the reference's logits in
    doubles; its `plain` ones, in float32, are as far from them as another order of adding brings them."""
    try:
        want = tiny.exact(ids)
    except RuntimeError:  # its code has floats of its own (plamo2, xglm)
        return plain, limit
    return want, max(limit, MAGNIFIED * float((plain - want).abs().max()))


@lru_cache(maxsize=1)
def _runner(subject: Subject, family: str, name: str) -> WorkerRunner:
    return subject.runner(variant(family, name), plain_dtype(subject.facts))


def _tokens(subject: Subject, family: str, name: str) -> None:
    """Greedy tokens over the cache, requests side by side: the reference sees all tokens before each."""
    dtype, prompts = plain_dtype(subject.facts), [ids[:MAX_PROMPT] for ids in _ids()]
    answers = _runner(subject, family, name).greedy(prompts, GENERATED)
    for number, (ids, tokens) in enumerate(zip(prompts, answers, strict=True)):
        check_tokens(variant(family, name), greedy(str(number), ids, GENERATED), TrafficOutput(tokens), dtype)


def _dtype(subject: Subject, family: str, dtype: torch.dtype) -> None:
    """No further from float32 than transformers is in the same type, give or take."""
    tiny = smooth(family)
    half = copy.deepcopy(tiny.reference).to(dtype)
    ours = theirs = floor = 0.0
    for ids, logits in zip(_ids(), logits_in_steps(subject.runner(tiny, dtype)), strict=True):
        exact = tiny.logits(ids)
        with torch.no_grad():
            other = half(torch.tensor([ids]), use_cache=False).logits[0].float()
        ours += float((logits - exact).pow(2).sum())
        theirs += float((other - exact).pow(2).sum())
        floor += exact.numel() * (logits_tolerance(torch.float32) * float(exact.std())) ** 2
    limit = max(HALF * theirs, floor)
    require(
        ours <= limit,
        f"squared errors against float32 add up to {ours:.4g}; transformers on the host, in {dtype_name(dtype)}, has "
        f"{theirs:.4g}, and {limit:.4g} is allowed",
    )


def _scheme(subject: Subject, name: str, settings: dict[str, Any]) -> None:
    """As near the unquantized model as the specification's quantize() comes; a platform may choose better values."""
    tiny, dtype, scheme = make("llama", settings), plain_dtype(subject.facts), ONLINE[name]
    got = torch.cat(logits_in_steps(subject.runner(tiny, dtype, quantization=QuantizationPlan(scheme))))
    exact = torch.cat([tiny.logits(ids) for ids in _ids()])
    specified = torch.cat([_quantized(tiny, scheme).logits(ids) for ids in _ids()])
    limit = (
        MAX_ERROR_RATIO * _relative(specified, exact)
        + (EIGHT_BITS if scheme.activations == 8 else 0)
        + logits_tolerance(dtype)
    )
    off = _relative(got, exact)
    require(off <= limit, f"off by {off:.3f} of the size of the unquantized logits; {limit:.3f} is allowed")


def _replaced(subject: Subject, name: str | None) -> None:
    """Steps that were compiled or recorded before read the new numbers; nothing of the old ones is left."""
    old, new = (make("llama", {**WIDE, "tie_word_embeddings": True}, seed) for seed in (0, 1))
    forms, dtype = QuantizationPlan(ONLINE[name] if name else None), plain_dtype(subject.facts)
    runner = subject.runner(old, dtype, quantization=forms)
    before = torch.cat([*logits_in_steps(runner), *logits_in_steps(runner)])  # the second time, as they were recorded
    held = {name: (tensor, tensor.shape) for name, tensor in runner.worker.model.named_parameters()}
    runner.worker.reload(new.folder)
    for name, tensor in runner.worker.model.named_parameters():
        require(held[name][0] is tensor and held[name][1] == tensor.shape, f"{name} is another tensor than before")
    got, want = (
        torch.cat(logits_in_steps(runner)),
        torch.cat(logits_in_steps(subject.runner(new, dtype, quantization=forms))),
    )
    require(_relative(before[: len(want)], want) > 0.3, "the two models' logits are too alike to tell anything")
    off = _relative(got, want)
    require(off <= logits_tolerance(dtype), f"off by {off:.3g} of the size of the new model's logits")


def _turns(subject: Subject) -> None:
    """Each gives its own logits: as it was loaded, recorded, and once the weights of one, then of both, are others."""
    dtype = plain_dtype(subject.facts)
    (first, second), (third, fourth) = ([make("llama", each, seed) for each in (WIDE, OTHER)] for seed in (0, 1))
    runner = TurnsRunner(first, second, subject.make(), dtype)
    assert runner.worker.drafter is not None
    for what, models, reloaded in (
        ("both are loaded", (first, second), None),
        ("their steps were run before", (first, second), None),
        ("the first has other weights", (third, second), runner.worker.main),
        ("the second has other weights, too", (third, fourth), runner.worker.drafter),
    ):
        if reloaded is not None:
            reloaded.reload(models[reloaded is runner.worker.drafter].folder)
        for number, (ids, logits) in enumerate(zip(_ids(), logits_in_steps(runner), strict=True)):
            for place, (tiny, got) in enumerate(zip(models, logits.chunk(2, -1), strict=True), 1):
                want = tiny.logits(ids)
                limit = logits_tolerance(dtype) * float(want.std())
                _close(f"{what}: model {place}, request {number}", got, want, limit)


def _outputs(subject: Subject, family: str) -> None:
    """Taps before the first layer and behind each: of all tokens, as transformers' layers take and give them."""
    tiny, dtype, ids = (
        smooth(family),
        plain_dtype(subject.facts),
        dict(enumerate(random_prompts(4, (23, 1, 20), VOCAB))),
    )
    taps = tuple(range(tiny.config.num_hidden_layers + 1))
    runner = subject.runner(tiny, dtype, requested_outputs=RequestedOutputs(hidden_states=True, aux_hidden_states=taps))
    out, wants = runner.outputs(ids), {key: tiny.states(each) for key, each in ids.items()}
    require(out.logits is not None, "logits were wanted, and did not come")
    require(out.hidden_states is not None, "hidden states were wanted, and did not come")
    require(
        len(out.aux_hidden_states) == len(taps), f"{len(taps)} taps were wanted, and {len(out.aux_hidden_states)} came"
    )
    for index, rows in enumerate((out.logits, out.hidden_states, *out.aux_hidden_states)):
        what = ("logits", "hidden states")[index] if index < 2 else f"tap {taps[index - 2]}"
        assert rows is not None
        for key, got in runner.host_outputs(ids, rows).items():
            want = tiny.logits(ids[key]) if index == 0 else wants[key][index - 1]
            _near(f"{what} of request {key}", got, want, 2 * logits_tolerance(dtype))


def _hidden_alone(subject: Subject) -> None:
    tiny, dtype, ids = smooth("llama"), plain_dtype(subject.facts), dict(enumerate(random_prompts(5, (9, 30), VOCAB)))
    runner = subject.runner(tiny, dtype, requested_outputs=RequestedOutputs(logits=False, hidden_states=True))
    out = runner.outputs(ids)
    require(out.logits is None and not out.aux_hidden_states, "logits or taps came, and none were wanted")
    assert out.hidden_states is not None
    for key, got in runner.host_outputs(ids, out.hidden_states).items():
        _near(f"hidden states of request {key}", got, tiny.states(ids[key])[0], 2 * logits_tolerance(dtype))


def _near(what: str, got: Tensor, want: Tensor, share: float) -> None:
    require(got.shape == want.shape, f"{what}: {tuple(got.shape)} came, {tuple(want.shape)} is wanted")
    off, limit = float((got - want).abs().max().nan_to_num(torch.inf)), share * float(want.std())
    require(off <= limit, f"{what} are off by {off:.3g}; {limit:.3g} is allowed")


def _relative(got: Tensor, want: Tensor) -> float:
    return float((got - want).norm() / want.norm())


@torch.no_grad()
def _quantized(tiny: Tiny, scheme: WeightFormat) -> Tiny:
    """The reference with each weight as the scheme keeps it; activations stay as they are."""
    model = copy.deepcopy(tiny.reference)
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            forms = QuantizationPlan(scheme).for_head() if name == "lm_head" else QuantizationPlan(scheme)
            kept, _ = forms.format_for(name, ShardRange((0, module.out_features), (0, module.in_features)))
            if not kept.plain:
                module.weight.copy_(dequantized(quantize(module.weight, kept)))
    return Tiny(tiny.folder, tiny.config, model)


def _ids() -> list[list[int]]:
    return random_prompts(3, LENGTHS, VOCAB)


def logits_in_steps(run: WorkerRunner) -> list[Tensor]:
    """The logits of every token of every request, computed in STEPS."""
    ids, done = _ids(), [0] * len(LENGTHS)
    rows: list[list[Tensor]] = [[] for _ in ids]
    for counts in STEPS:
        chunks: dict[Any, Sequence[int]] = {
            key: ids[key][done[key] :][:count] for key, count in enumerate(counts) if count
        }
        for key, logits in run.step(chunks).items():
            rows[key].append(logits)
            done[key] += len(logits)
    for key in range(len(ids)):
        run.finish(key)
    return [torch.cat(each) for each in rows]


def _close(what: str, got: Tensor, want: Tensor, limit: float) -> None:
    """Says where it goes wrong first, and which logit is furthest off there."""
    wrong = (got - want).abs().nan_to_num(float("inf"))
    positions = (wrong.amax(-1) > limit).nonzero()
    if len(positions):
        position = int(positions[0])
        token = int(wrong[position].argmax())
        raise ContractViolation(
            f"{what}, position {position} of {len(want)}, token {token}: the logit is {got[position, token]:.6g}, "
            f"transformers has {want[position, token]:.6g}; {limit:.3g} off is allowed"
        )
