"""Triton's JIT without a launch: compiles what a device of compute capability 9.0 would ask for, without a GPU.

A launch is specialized as on a device (an argument of 1 becomes a constant, a multiple of 16 is marked) and goes
through Triton's front end, AST to TTIR. No kernel runs: results are zeros. Prints a line of JSON for each case.

    python tests/platforms/gpu/kernels/jit.py [--kinds probes,models,kernels,ops] [--every] [--only PART OF A NAME]
        [--share NUMBER/COUNT] [--module NAME]

- probes: the probe of every op's Triton providers.
- models: prompts and two tokens of every variant of every family in bfloat16; with --every, in each type.
- kernels: each kernel's first variant, its integers as 1, as a multiple of 16 and as another number, one at a time;
  with --every, all its variants but those for float16 with a twin for bfloat16. --module: another module's kernels.
- ops: the arguments with which the conformance kit calls each op.

In a process of its own: where Triton interprets kernels it specializes none. Works with Triton 3.6 and 3.7.
"""

import argparse
import contextlib
import functools
import importlib
import inspect
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from tests.platforms.gpu.kernels import aot

PACKAGE = "quintet.platforms.gpu"
KINDS = ("probes", "models", "kernels", "ops")
SHARED, PROCESSORS = 232448, 132  # an H100's bytes of shared memory for one program, and its processors
PROVIDERS = ("triton", "invariant")  # those of ours
TYPES = (torch.bfloat16, torch.float16, torch.float32)  # that a model computes in
OTHER = 17  # neither 1 nor a multiple of 16
SCALARS = {"i32": OTHER, "i32:16": 3 * 16, "i64": 2**40 + 1, "i64:16": 2**40, "fp32": 0.5}
ARRAYS = {
    "i8": torch.int8, "i16": torch.int16, "i32": torch.int32, "i64": torch.int64, "u8": torch.uint8,
    "fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32, "fp8e4nv": torch.float8_e4m3fn,
    "fp8e4b8": torch.float8_e4m3fnuz, "fp8e5": torch.float8_e5m2,
}  # fmt: skip


class RefusedError(Exception):
    """The front end refused a launch, or did not get that far with it."""


class FrontEnd:
    """Takes launches in the place of JITFunction.run, and compiles each specialization once, to TTIR."""

    def __init__(self) -> None:
        from triton.backends.compiler import GPUTarget
        from triton.compiler import make_backend

        self._target = GPUTarget("cuda", 90, 32)
        self._backend = make_backend(self._target)
        self._binders: dict[Any, Callable[..., Any]] = {}
        self._compiled: dict[str, Exception | None] = {}  # by specialization: how it failed
        self.used: set[str] = set()  # specializations of the launches since begin()
        self.errors: list[str] = []  # of the same launches, each once

    @property
    def count(self) -> int:
        """Specializations that were compiled."""
        return len(self._compiled)

    def begin(self) -> None:
        self.used, self.errors = set(), []

    def run(self, kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        """JITFunction.run, to where a binary would be looked up. Raises RefusedError."""
        from triton import knobs
        from triton.runtime.jit import create_function_from_signature

        kwargs["debug"] = False
        if hasattr(knobs.compilation, "instrumentation_mode"):
            kwargs["instrumentation_mode"] = ""
        if kernel not in self._binders:
            self._binders[kernel] = create_function_from_signature(kernel.signature, kernel.params, self._backend)
        bound, specialization, options = self._binders[kernel](*args, **kwargs)
        name = f"{kernel.fn.__module__}.{kernel.fn.__name__}"
        key = repr((name, specialization, sorted(options.items())))
        self.used.add(key)
        if key not in self._compiled:
            try:
                self._compile(kernel, bound, specialization, options, kwargs)
                self._compiled[key] = None
            except Exception as error:
                self._compiled[key] = error
        failed = self._compiled[key]
        if failed is not None:
            message = f"{name}: {_message(failed)}"
            self.errors += [message] if message not in self.errors else []
            raise RefusedError(message) from failed

    def _compile(self, kernel: Any, bound: Any, specialization: Any, options: Any, kwargs: dict[str, Any]) -> None:
        from triton._C.libtriton import ir
        from triton.compiler import ASTSource

        parsed, signature, constants, attrs = kernel._pack_args(self._backend, kwargs, bound, specialization, options)
        context = ir.context()
        ir.load_dialects(context)
        self._backend.load_dialects(context)
        source = ASTSource(kernel, signature, constants, attrs)
        given = parsed, self._backend.get_codegen_implementation(parsed), self._backend.get_module_map(), context
        targeted = "target" in inspect.signature(source.make_ir).parameters  # from Triton 3.6 on
        source.make_ir(*((self._target,) if targeted else ()), *given)


def _message(error: BaseException) -> str:
    """A compiler's error and those that it came from, in one line: where, and its last lines."""
    found = []
    cause: BaseException | None = error
    while cause is not None:
        first, *others = [line.strip() for line in str(cause).splitlines() if line.strip()] or ["no message"]
        found.append(f"{type(cause).__name__}: {' / '.join([first, *others[-3:]])[:400]}")
        cause = cause.__cause__
    return " <- ".join(found)


def pretend(front: FrontEnd) -> None:
    """Puts the front end in the place of launches, and an H100's answers in the place of the host's."""
    from triton.runtime.jit import JITFunction

    from quintet.platforms.gpu import providers
    from quintet.platforms.gpu.kernels import chips, matmul
    from quintet.platforms.gpu.kernels.attention_layer import DeviceLimits
    from quintet.platforms.gpu.ops import attention as triton_attention
    from quintet.platforms.gpu.ops import probe as triton_probe

    providers.register()
    host = torch.device("cpu")
    assert chips.chip_limits_for(host) == chips.CHIP_LIMITS["cuda", 32], "tables on the host are not those of an H100"
    limits, trial = DeviceLimits(SHARED, PROCESSORS, e4m3=True), triton_attention.trial

    def tried(spec: Any, device: torch.device) -> str | None:
        trial(spec, device)  # its results are zeros
        return None

    JITFunction.run = lambda kernel, *args, **kwargs: front.run(kernel, *args, **kwargs)
    _replace(triton_probe.device_here, lambda: host)
    _replace(triton_attention.limits, lambda device: limits)
    _replace(triton_attention.trial, tried)
    _replace(matmul.units, lambda device: PROCESSORS)
    _replace(matmul.computed, lambda dtype, device: matmul.TYPES[dtype])
    # memory that no kernel has written: torch's ops go on with it, and with its values as indices
    torch.empty = torch.zeros  # type: ignore[assignment]
    torch.empty_like = torch.zeros_like
    Tensor.new_empty = Tensor.new_zeros  # type: ignore[method-assign]


def _replace(function: Any, other: Any) -> None:
    """Replaces a function in every module of the platform that has imported it."""
    name: str = function.__name__
    for module in [module for path, module in sys.modules.items() if path.startswith(PACKAGE)]:
        if getattr(module, name, None) is function:
            setattr(module, name, other)


Case = tuple[str, Callable[[], str | None]]  # its name; runs it -> what failed beside a kernel


def probes() -> Iterator[Case]:
    from quintet.ops.registry import Op

    for name, op in sorted(Op.registry.items()):
        for provider in PROVIDERS:
            if provider in op.probes:
                yield f"probe {name} by {provider}", functools.partial(_probed, op.probes[provider])


def _probed(probe: Callable[[], str | None]) -> str | None:
    """Returns a probe's reason if something was raised; a wrong result is none, since all results are zeros."""
    reason = probe()
    return reason if reason and reason.startswith(("its kernel fails", "Triton is", "torch finds")) else None


def models(every: bool) -> Iterator[Case]:
    from quintet_tools.checkpoints.tiny import VARIANTS

    for dtype in TYPES if every else TYPES[:1]:
        for family, name in VARIANTS:
            yield f"model {family}: {name} in {dtype}", functools.partial(_modelled, family, name, dtype)


def _modelled(family: str, name: str, dtype: torch.dtype) -> str | None:
    """Runs three prompts in one step, then two tokens each."""
    from quintet.config import EngineConfig
    from quintet.conformance.harness.worker_runner import WorkerRunner, random_prompts
    from quintet.ops.registry import Op
    from quintet.platforms.gpu.providers import PRIORITY
    from quintet_tools.checkpoints.tiny import variant
    from tests.platforms.gpu.fake_torch import FakeGPU, FakeRuntime

    for op in Op.registry.values():
        op.probes.update({each: _yes if each in PROVIDERS else _no for each in op.probes})
    members = {"_fake": FakeRuntime(), "op_priority": PRIORITY}
    platform = type("Device", (FakeGPU,), members)(EngineConfig(max_num_seqs=4))
    WorkerRunner(variant(family, name), platform, dtype).greedy(random_prompts(3, (9, 1, 17), 101), 3)
    return f"attention by torch: {platform._refused}" if platform._fallen else None


def _yes() -> None:
    return None


def _no() -> str:
    return "no library is looked for"


def kernels(every: bool, module: str | None) -> Iterator[Case]:
    found = aot.found() if module is None else [(module, each) for each in importlib.import_module(module).variants()]
    names, seen = {f"{name}: {variant.name}" for name, variant in found}, set()
    for name, variant in found:
        what = f"{name}: {variant.name}"
        if variant.kernel not in seen or (every and not aot._twin(what, names)):
            seen.add(variant.kernel)
            yield f"kernel {what}", functools.partial(_specialized, variant)


def _specialized(variant: Any) -> None:
    """Launches it as declared, then with each integer as 1, as a multiple of 16 and as another number."""
    arguments = {name: _argument(kind) for name, kind in variant.signature.items()}
    options = {"num_warps": variant.num_warps, "num_stages": variant.num_stages}
    numbers = [(name, kind[:3]) for name, kind in variant.signature.items() if kind.startswith("i")]
    changes = ({name: value} for name, kind in numbers for value in (1, SCALARS[f"{kind}:16"], SCALARS[kind]))
    for change in ({}, *changes):
        with contextlib.suppress(RefusedError):
            variant.kernel[(1,)](**arguments | change, **variant.constexprs, **options)


def _argument(kind: str) -> Any:
    """An argument of a declared type; a tensor is aligned as torch allocates it."""
    if not kind.startswith("*"):
        return SCALARS[kind]
    x = torch.zeros(16, dtype=ARRAYS[kind[1:]])
    assert x.data_ptr() % 16 == 0
    return x


def ops() -> Iterator[Case]:
    from quintet.conformance.cases.model_ops import CASES
    from quintet.ops.registry import Op

    for name, drawn in sorted(CASES.items()):
        for provider, function in Op.registry[name].providers.items():
            if provider in PROVIDERS:
                yield f"op {name} by {provider}", functools.partial(_called, function, drawn)


def _called(provider: Callable[..., Any], drawn: Callable[[torch.dtype], Iterator[tuple[str, Any]]]) -> None:
    for dtype in TYPES:
        for _, args in drawn(dtype):
            with contextlib.suppress(RefusedError, ValueError):  # ValueError: what our kernels do not serve
                provider(*args)


def cases(kinds: list[str], every: bool, module: str | None) -> Iterator[Case]:
    """Probes first: models run with other ones. What a case has compiled is not compiled again by those that follow."""
    listed: dict[str, Callable[[], Iterator[Case]]] = {
        "probes": probes, "models": functools.partial(models, every),
        "kernels": functools.partial(kernels, every, module), "ops": ops,
    }  # fmt: skip
    for kind in KINDS:
        if kind in kinds:
            yield from listed[kind]()


def examine(front: FrontEnd, case: Case) -> dict[str, Any]:
    """Runs a case -> its line of output."""
    name, run = case
    begun, before = time.monotonic(), front.count
    front.begin()
    beside: str | None = None
    try:
        beside = run()
    except Exception as error:  # whatever ends a case is its result
        beside = _message(error)
    took = round(time.monotonic() - begun, 2)
    return {
        "case": name, "error": "; ".join(front.errors) or beside, "specializations": len(front.used),
        "compiled": front.count - before, "s": took,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kinds", default=",".join(KINDS), help="of cases")
    parser.add_argument("--every", action="store_true", help="every variant of models and kernels")
    parser.add_argument("--only", default="", help="part of a case's name")
    parser.add_argument("--share", default="1/1", metavar="NUMBER/COUNT", help="this part of the cases alone")
    parser.add_argument("--module", help="whose variants() the kernels are, if not ours")
    args = parser.parse_args()
    kinds = args.kinds.split(",")
    if unknown := sorted(set(kinds) - set(KINDS)):
        raise SystemExit(f"--kinds {', '.join(unknown)}: there are {', '.join(KINDS)}")
    if os.environ.pop("TRITON_INTERPRET", None):
        raise SystemExit("TRITON_INTERPRET is set: kernels are interpreted, and none is specialized; unset it")
    torch.set_num_threads(1)
    front = FrontEnd()
    pretend(front)
    number, _, count = args.share.partition("/")
    for index, case in enumerate(cases(kinds, args.every, args.module)):
        if args.only in case[0] and index % int(count) == int(number) - 1:
            print(json.dumps(examine(front, case)), flush=True)


if __name__ == "__main__":
    main()
