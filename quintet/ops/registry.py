"""Ops and their providers: the plain torch function is the specification; bind() picks one provider for each, once.

An op that multiplies by weights has providers for each kind of format that a weight may have: "linear" is the plain
one, "linear:int4" the one for int4.
"""

import inspect
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Function = Callable[..., Any]
Instrument = Callable[
    [str, str, Function], Function
]  # (op, provider, its function) -> the same, which reports its calls


_BINDING = threading.RLock()  # probes compile, and ranks of one process are its threads: compilers keep no locks


@dataclass(frozen=True)
class ProviderChoice:
    """One row of the start-up table: what serves an op, and why the others do not."""

    op: str
    provider: str
    reason: str
    rejected: tuple[tuple[str, str], ...] = ()  # (provider, why not)


class Op:
    """A named function: its reference, and providers that do the same faster somewhere."""

    registry: dict[str, "Op"] = {}

    def __init__(self, reference: Function, kind: str = "plain") -> None:
        self.name: str = of_kind(reference.__name__, kind)
        self.reference = reference
        self.providers: dict[str, Function] = {"reference": reference}
        self.probes: dict[str, Callable[[], str | None]] = {}
        self.kinds: dict[str, Op] = {}  # of quantized weights, beside the plain one
        if self.name in Op.registry:
            first = Op.registry[self.name].reference.__module__
            raise ValueError(f"op {self.name} is defined twice: {first} and {reference.__module__}; rename one")
        Op.registry[self.name] = self

    @classmethod
    def of_kinds(cls, *kinds: str) -> Callable[[Function], "Op"]:
        """Declares an op with weights that are plain or of these kinds."""

        def made(reference: Function) -> Op:
            op = cls(reference)
            op.kinds = {kind: cls(reference, kind) for kind in kinds}
            return op

        return made

    def provide(
        self, provider: str, probe: Callable[[], str | None] | None = None, kinds: Sequence[str] = ()
    ) -> Callable[[Function], Function]:
        """Registers a provider. `probe` calls it on something small; it returns why it cannot serve, or None.

        `kinds`: of quantized weights (WeightFormat.kind) that it is for, instead of plain ones.
        """
        if unknown := [kind for kind in kinds if kind not in self.kinds]:
            raise ValueError(f"{self.name} has no kinds {unknown}; it has {', '.join(self.kinds) or 'none'}")

        def register_each(function: Function) -> Function:
            for kind in kinds:
                self.kinds[kind].provide(provider, probe)(function)
            return function

        def register(function: Function) -> Function:
            want, got = (list(inspect.signature(f).parameters) for f in (self.reference, function))
            if want != got:
                raise TypeError(f"{self.name}: provider {provider!r} takes {got}, the specification takes {want}")
            taken = self.providers.get(provider, function)
            if (taken.__module__, taken.__name__) != (function.__module__, function.__name__):
                raise ValueError(f"{self.name}: provider {provider!r} is {taken.__module__}'s; choose another name")
            self.providers[provider] = function
            if probe is not None:
                self.probes[provider] = probe
            return function

        return register_each if kinds else register

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The specification itself; a model calls the bound provider instead."""
        return self.reference(*args, **kwargs)


class Ops:
    """One provider per op, fixed: `ops.rms_norm` is a plain function. Given to layers when they are built.

    Probing calls a provider, which may have to compile first: an op is bound when it is first requested. Layers do
    so when they are built, by take(), so that no step waits for it.
    """

    def __init__(
        self, priority: Mapping[str, Sequence[str]], requested: Mapping[str, str], timed: Instrument | None = None
    ) -> None:
        self._priority, self._asked, self._instrument = priority, requested, timed
        self._chosen: dict[str, ProviderChoice] = {}

    def __getattr__(self, name: str) -> Function:  # reached once for each op
        if name.startswith("_"):
            raise AttributeError(name)
        function = Op.registry[name].providers[self.choice(name).provider] if name in Op.registry else None
        if function is None:
            raise AttributeError(f"no op {name!r}; there are {', '.join(sorted(Op.registry))}")
        if self._instrument is not None:
            function = self._instrument(name, self.choice(name).provider, function)
        self.__dict__[name] = function
        return function

    def take(self, *names: str) -> "Ops":
        """Binds these ops now; what a layer calls in its steps, it takes when it is built."""
        for name in names:
            getattr(self, name)
        return self

    def choice(self, name: str) -> ProviderChoice:
        """Returns the provider that serves the op, and why."""
        if name not in self._chosen:
            op, whole = Op.registry[name], name.partition(":")[0]  # kinds without an order have their op's
            order = self._priority.get(name, self._priority.get(whole, ()))
            with _BINDING:
                self._chosen[name] = (
                    _requested_provider(op, order, self._asked[name]) if name in self._asked else _choose(op, order)
                )
        return self._chosen[name]

    def served(self, name: str) -> bool:
        """True if more than the specification serves an op that is two others at once: else these are called."""
        return bool(self._priority.get(name)) and self.choice(name).provider != "reference"

    @property
    def bound(self) -> tuple[ProviderChoice, ...]:
        """The choices that were made so far."""
        return tuple(self._chosen[name] for name in sorted(self._chosen))

    @property
    def choices(self) -> tuple[ProviderChoice, ...]:
        """Every op's."""
        return tuple(self.choice(name) for name in sorted(Op.registry))


def of_kind(op: str, kind: str) -> str:
    """The name under which the op is bound for weights of such a format."""
    return op if kind == "plain" else f"{op}:{kind}"


def bind(
    priority: Mapping[str, Sequence[str]], requested: Mapping[str, str] | None = None, timed: Instrument | None = None
) -> Ops:
    """For each op the first provider in the platform's order that is registered and probes well; the reference last.

    `asked` names the provider of an op and no other: ValueError says which there are, and why each does not serve.
    `timed` wraps what is bound.
    """
    unknown = sorted(set(priority) - set(Op.registry))
    if unknown:
        raise ValueError(f"op_priority names ops that do not exist: {', '.join(unknown)}")
    ops = Ops(priority, requested or {}, timed)
    for name in requested or {}:
        ops.choice(name)
    return ops


def _choose(op: Op, wanted: Sequence[str]) -> ProviderChoice:
    rejected: list[tuple[str, str]] = []
    order = [p for p in wanted if p != "reference"]
    for provider in order:
        reason = _why_not(op, provider)
        if reason is None:
            why = "first in the platform's order" if not rejected else "the next in the platform's order"
            return ProviderChoice(op.name, provider, why, tuple(rejected))
        rejected.append((provider, reason))
    why = "no other provider serves here" if order else "the platform names no other provider"
    return ProviderChoice(op.name, "reference", why, tuple(rejected))


def _requested_provider(op: Op, order: Sequence[str], asked: str) -> ProviderChoice:
    if not order:
        raise ValueError(f"{asked!r} was asked for, and this platform has one way to serve {op.name}; leave it out")
    reasons = {provider: _why_not(op, provider) for provider in (*order, "reference")}
    if asked in reasons and reasons[asked] is None:
        return ProviderChoice(op.name, asked, "asked for")
    there = ", ".join(f"{provider} ({reason or 'serves'})" for provider, reason in reasons.items())
    raise ValueError(f"{asked!r} was asked for, and does not serve {op.name} on this platform; there are {there}")


def _why_not(op: Op, provider: str) -> str | None:
    if provider not in op.providers:
        return "not registered"
    probe = op.probes.get(provider)
    return probe() if probe else None
