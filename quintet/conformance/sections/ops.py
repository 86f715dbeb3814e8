"""Every op but those that draw tokens: the provider that serves here, against the specification in float32."""

import itertools
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from quintet.conformance.cases.expert_placement import EXPERT_PLACEMENT
from quintet.conformance.cases.lora import LORA
from quintet.conformance.cases.model_ops import ATTENTION, CASES, DTYPES, PACKED, PAGES, SAMPLING, TYPES, USES
from quintet.conformance.cases.published_formats import FORMS
from quintet.conformance.cases.random_arguments import Case
from quintet.conformance.cases.states import DRAFT_MIXES, DRAFTS, STATES
from quintet.conformance.check import NotSupported, Trial, check, evenly_chosen, require
from quintet.conformance.close import dtype_name, require_close
from quintet.conformance.harness import linear_layers as products
from quintet.conformance.harness.calls import OpCall, results, send
from quintet.conformance.harness.subject import Subject
from quintet.interface.weights import WeightFormat
from quintet.layers.quantization import ONLINE
from quintet.ops import Op
from quintet.ops.registry import of_kind

FEW = 6  # cases of an op where each shape is compiled; of these fewer, since they take seconds each
FEWER = {"biased_experts": 2, "experts": 3, "grouped_linear": 3, "paged_attention": 2, "write_kv": 2} | {
    "ungated_experts": 2, "lora_experts": 2
}  # fmt: skip

# called only where such weights are kept as they are (Capabilities.weight_formats)
KEPT = {"quantized_experts": ("experts", "experts"), "quantized_embedding": ("embedding", "tables")}
# ops with results made row by row of their first argument, or of their first two
ROWS = ("activate", "add", "add_rms_norm", "biased_experts", "experts", "gated", "layer_norm", "linear") + (
    *PACKED, "by_heads", "rms_norm", "route", "route_grouped", "route_limited", "route_sparse", "scale", "softcap",
    "as_large", "keep_above", "scale_adapted", "scale_rows", "ungated_experts", "lora_experts",
)  # fmt: skip
PAIRS = ("add_lora", "norm_rotary", "pair_rotary", "rotary")
POISONED = 1  # the row
POISONS = (torch.nan, torch.inf, -torch.inf)


@check("ops.specification")
def equals_the_specification(subject: Subject) -> Iterator[Trial]:
    """One trial per op and type."""
    for name in sorted(set(Op.registry) - SAMPLING):
        if name not in CASES and name not in subject.chosen.platform.op_priority:
            continue  # another package's
        if name not in CASES:
            yield Trial(f"{name}: an op that the platform brought", partial(_unknown, name))
            continue
        for dtype in subject.facts.dtypes if not _is_packed(subject, name) else ():
            # a form that is not kept, and pages that go nowhere, say nothing of types
            typed = () if name in (*KEPT, *PAGES, *LORA, *EXPERT_PLACEMENT) else (f"dtype/{dtype_name(dtype)}",)
            features = (f"op/{name}", *typed)
            hidden = name in ATTENTION and subject.facts.ops_only
            yield Trial(
                f"{name} in {dtype_name(dtype)}", partial(_specified, subject, name, dtype), features * (not hidden)
            )


@check("ops.drafts")
def states_keep_drafts_apart(subject: Subject) -> Iterator[Trial]:
    """Steps that end with draft tokens, after steps of which some were accepted."""
    for name, dtype in itertools.product(sorted(DRAFTS), subject.facts.dtypes):
        yield Trial(f"{name} in {dtype_name(dtype)}", partial(_drafts_specified, subject, name, dtype))


@check("ops.placed")
def products_with_placed_weights(subject: Subject) -> Iterator[Trial]:
    """Products as layers make them: parts of a checkpoint side by side, transposed, stacked, quantized; a tied head."""
    most = FEW if _is_compiled(subject) else len(products.PRODUCTS)
    for dtype in subject.facts.dtypes:
        yield Trial(
            f"products in {dtype_name(dtype)}",
            partial(products.check_products, subject, None, dtype, most),
            ("op/linear",),
        )
        yield Trial(
            f"a tied head in {dtype_name(dtype)}", partial(products.check_tied_table, subject, dtype), ("op/linear",)
        )
        call = partial(products.check_experts, subject, dtype, FEWER["experts"] if _is_compiled(subject) else FEW)
        yield Trial(f"experts in {dtype_name(dtype)}", call, ("op/experts",))
        for scheme in _schemes(subject):
            call = partial(products.check_products, subject, scheme, dtype, most)
            features = (f"scheme/{scheme.kind}", f"op/{of_kind('linear', scheme.kind)}")
            yield Trial(f"products by {scheme.kind} in {dtype_name(dtype)}", call, features)
        for what, fmt in FORMS.items():
            call = partial(products.check_checkpoint_format, subject, fmt, dtype, most)
            yield Trial(
                f"a checkpoint's {fmt.kind} ({what}) in {dtype_name(dtype)}", call, _features_of(what, fmt, subject)
            )
        call = partial(products.check_quantized_embedding, subject, dtype, evenly_chosen(list(FORMS.items()), most))
        yield Trial(f"tables of quantized checkpoints in {dtype_name(dtype)}", call, ("op/embedding",))


def _features_of(what: str, fmt: WeightFormat, subject: Subject) -> tuple[str, ...]:
    """An op that is not asked for is not lacking."""
    op = f"op/{of_kind('linear', fmt.kind)}"
    return (f"form/{what}", op) if fmt.required_kinds <= subject.facts.weight_formats else (f"form/{what}",)


@check("ops.finite")
def rows_do_not_spread(subject: Subject) -> Iterator[Trial]:
    """A request with numbers that overflow must not change its neighbours."""
    kinds = subject.facts.dtypes[:1] if _is_compiled(subject) else subject.facts.dtypes
    for name, dtype in itertools.product(sorted((*ROWS, *PAIRS, "embedding")), kinds):
        if not _is_packed(subject, name):
            yield Trial(
                f"{name} in {dtype_name(dtype)}", partial(_rows_unchanged, subject, name, dtype), (f"op/{name}",)
            )
    for scheme, dtype in itertools.product(_schemes(subject), kinds):
        call = partial(products.check_poisoned_row, subject, scheme, dtype, POISONS)
        yield Trial(f"products by {scheme.kind} in {dtype_name(dtype)}", call, (f"scheme/{scheme.kind}",))


def _schemes(subject: Subject) -> list[WeightFormat]:
    """Returns the quantization schemes that place() applies to floats."""
    return [ONLINE[name] for name in sorted(subject.facts.weight_formats) if name in ONLINE]


def _is_packed(subject: Subject, op: str) -> bool:
    return PACKED.get(op) in subject.facts.weight_formats


def _is_compiled(subject: Subject) -> bool:
    """True if each shape may cost a second or more."""
    return subject.facts.ops_only or subject.facts.static_shapes


def _unknown(name: str) -> None:
    raise NotSupported(
        f"the kit has no arguments for {name}: the package that brings an op tests it against its reference"
    )


def _specified(subject: Subject, name: str, dtype: torch.dtype) -> None:
    there = subject.with_new_platform() if subject.facts.ops_only else subject
    if name in ATTENTION and subject.facts.ops_only and there.ops.choice(name).provider == "reference":
        raise NotSupported(f"Platform.op_priority lacks {name}: the section `attention` proves attention as a whole")
    if name in PAGES and there.facts.ops_only and there.ops.choice(name).provider == "reference":
        raise NotSupported(f"Platform.op_priority lacks {name}: pages go nowhere from this platform's cache")
    if name in STATES and not there.platform.supports_states:
        raise NotSupported("no layer calls it: Platform.supports_states is False")
    if name in LORA and not there.facts.lora:
        raise NotSupported("no product has adapters beside it: Capabilities.lora is False")
    _require_lora_of_experts(there, name)
    if name in EXPERT_PLACEMENT and there.facts.spmd:
        raise NotSupported("no expert is one rank's: Capabilities.spmd is True, one process drives all devices")
    kept, them = KEPT.get(name, ("", ""))
    if kept and kept not in there.facts.weight_formats:
        raise NotSupported(f"{them} come to this platform in floats: Capabilities.weight_formats lacks {kept!r}")
    cases = list(CASES[name](dtype))
    if name in ATTENTION:
        cases = cases[::3]  # each setting with each size and each mix once; the reference is slow
    if _is_compiled(subject):
        cases = evenly_chosen(cases, FEWER.get(name, FEW))
    gots = _tried(there, name, cases)
    for (what, args), got in zip(cases, gots, strict=True):
        _compare(there, name, what, dtype, got, _wanted(name, args))


def _drafts_specified(subject: Subject, name: str, dtype: torch.dtype) -> None:
    there = subject.with_new_platform() if subject.facts.ops_only else subject
    if "max_drafts" not in there.platform.optional_spec_fields:
        raise NotSupported("states hold drafts: Platform.optional_spec_fields lacks 'max_drafts'")
    cases = list(DRAFTS[name](dtype, DRAFT_MIXES))
    cases = evenly_chosen(cases, FEW) if _is_compiled(subject) else cases
    for (what, args), got in zip(cases, _tried(there, name, cases), strict=True):
        _compare(there, name, what, dtype, got, _wanted(name, args))


def _tried(there: Subject, name: str, cases: list[Case]) -> list[tuple[Tensor, ...]]:
    """Returns the results of the platform's provider for each case."""
    uses, function = USES.get(name, {}), getattr(there.ops, name)
    calls = []
    for what, args in cases:
        sent = tuple(send(there, each, uses.get(i, "vector")) for i, each in enumerate(args))
        calls.append(OpCall(f"{name} by {there.ops.choice(name).provider}, {what}", function, sent))
    if name in ATTENTION and there.facts.ops_only:
        return [_now(there, call) for call in calls]
    return results(there, calls)


def _now(there: Subject, call: OpCall) -> tuple[Tensor, ...]:
    """Outside of a step, where batches without a plan can be read."""
    return (there.down(call.function(*call.args)),)


def _wanted(name: str, args: tuple[Any, ...]) -> tuple[Tensor, ...]:
    want = Op.registry[name].reference(*(_to_float32(each) for each in args))
    return want if isinstance(want, tuple) else (want,)


def _to_float32(x: Any) -> Any:
    """Activations and weights in float32, a copy; fp8 is a format, and stays."""
    if isinstance(x, Tensor):
        return x.to(torch.float32, copy=True) if x.dtype in DTYPES else x.clone()
    if isinstance(x, tuple):
        parts = [_to_float32(each) for each in x]
        return type(x)(*parts) if hasattr(x, "_fields") else tuple(parts)
    return x


def _compare(
    there: Subject, name: str, what: str, dtype: torch.dtype, gots: tuple[Tensor, ...], wants: tuple[Tensor, ...]
) -> None:
    types = TYPES.get(name, (dtype,) * len(wants))
    where = f"{name} by {there.ops.choice(name).provider} in {dtype_name(dtype)}, {what}"
    require(len(gots) == len(wants), f"{where}: {len(gots)} results, {len(wants)} are wanted")
    for i, (got, want, expected) in enumerate(zip(gots, wants, types, strict=True)):
        result = f"{where}, result {i + 1}" if len(wants) > 1 else where
        require(
            got.dtype == expected, f"{result}: the type is {dtype_name(got.dtype)}, {dtype_name(expected)} is wanted"
        )
        require_close(result, got, want)


def _require_lora_of_experts(there: Subject, name: str) -> None:
    if name == "lora_experts" and not there.facts.lora_experts:
        raise NotSupported("no expert has adapters beside it: Capabilities.lora_experts is False")


def _rows_unchanged(subject: Subject, name: str, dtype: torch.dtype) -> None:
    """The rows beside a poisoned one are what they are without it."""
    there = subject.with_new_platform() if subject.facts.ops_only else subject
    _require_lora_of_experts(there, name)
    what, args = next(case for case in CASES[name](dtype) if case[1][0].shape[0] >= 3)
    poisoned = [(f"{what}, {poison} in row {POISONED}", _poisoned(name, args, poison)) for poison in POISONS]
    clean = _wanted(name, args)
    kept = args[0] != POISONED if name == "embedding" else torch.arange(args[0].shape[0]) != POISONED
    for (label, _), gots in zip(poisoned, _tried(there, name, poisoned), strict=True):
        rows = tuple(got[kept] for got in gots)
        _compare(there, name, label, dtype, rows, tuple(want[kept] for want in clean))


def _poisoned(name: str, args: tuple[Any, ...], value: float) -> tuple[Any, ...]:
    """For a look-up, in a row of the table."""
    where = (1,) if name == "embedding" else (0, 1) if name in PAIRS else (0,)
    changed = []
    for i, each in enumerate(args):
        if i in where:
            each = each.clone()
            each[POISONED].view(-1)[:: max(1, each[POISONED].numel() // 3)] = value
        changed.append(each)
    return tuple(changed)
