"""Checks of a platform before anything is opened: probe() in a process of its own, facts, configure()."""

import copy
import dataclasses
import importlib.metadata
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import lru_cache, partial
from typing import Any

import torch

from quintet.common.distribution import DISTRIBUTION
from quintet.common.subprocess_python import with_our_path
from quintet.config import EngineConfig
from quintet.conformance.check import ContractViolation, NotSupported, Trial, check, require
from quintet.conformance.harness.subject import Subject
from quintet.interface.platform import Capabilities, Platform
from quintet.ops.linear import EXTRAS, KINDS

TIMEOUT = 5.0  # seconds that the user of a command waits without wondering
LONG = 120.0  # seconds after which a process that probes is ended

# What the process writes is its last line. Its baseline has what quintet itself needs: torch, and the contract.
CHILD = """
import importlib, importlib.machinery, json, os, time
module, name, hidden = (json.loads(each) for each in sys.argv[1:])

class Bare(importlib.machinery.PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in hidden else super().find_spec(name, path, target)

sys.meta_path[:] = [Bare if each is importlib.machinery.PathFinder else each for each in sys.meta_path]

import psutil, torch
import quintet.platforms
from quintet.config import EngineConfig
from quintet.interface.platform import Capabilities, Platform, Unavailable

def state():
    context = getattr(torch.get_device_module(), "is_initialized", lambda: False)
    return psutil.Process().num_threads(), bool(context())

before, variables, began, facts, opened = state(), dict(os.environ), time.perf_counter(), {}, []
try:
    platform = importlib.import_module(module)
    for part in name.split("."):
        platform = getattr(platform, part)
    real = platform.open
    platform.open = lambda self, rank: opened.append(rank) or real(self, rank)
    result = platform.probe()
    facts["kind"] = type(result).__name__
    if isinstance(result, Unavailable):
        facts["reason"], facts["remedy"] = result.reason, result.remedy
    else:
        platform.configure(EngineConfig())
except Exception as error:
    facts["error"] = f"{type(error).__name__}: {error}"
facts["seconds"] = time.perf_counter() - began
after = state()
facts["variables"] = sorted(v for v in {*os.environ, *variables} if os.environ.get(v) != variables.get(v))
facts["threads"], facts["context"], facts["opened"] = after[0] - before[0], after[1] and not before[1], len(opened)
print(json.dumps(facts))
"""


@lru_cache(maxsize=4)
def _probe_in_child(subject: Subject, hidden: tuple[str, ...] = ()) -> dict[str, Any]:
    """Returns the results and leftovers of probing and configuring, in a fresh process without the hidden packages."""
    kind = subject.chosen.platform
    given = [json.dumps(each) for each in (kind.__module__, kind.__qualname__, hidden)]
    command, variables = [sys.executable, "-c", with_our_path(CHILD), *given], subject.variables
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=LONG)
    if done.returncode:
        raise ContractViolation(f"the process that probed ended with {done.returncode}: {done.stderr[-500:]}")
    facts: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return facts


@check("probe.pure")
def a_fresh_process(subject: Subject) -> Iterator[Trial]:
    def nothing() -> None:
        facts = _probe_in_child(subject)
        require("error" not in facts, f"probe() or configure() raised {facts.get('error')}")
        left = {
            f"changed environment variables ({', '.join(facts['variables'])})": facts["variables"],
            f"opened {facts['opened']} devices, where it is to look": facts["opened"],
            "made a context of torch's accelerator, where the driver's library can be asked": facts["context"],
            f"left {facts['threads']} threads running, as a runtime does": facts["threads"] > 0,
        }
        done = [what for what, happened in left.items() if happened]
        require(not done, f"probing {'; it '.join(done)}")

    yield Trial("environment, devices, context and threads are as before", nothing)


@check("probe.quick")
def seconds(subject: Subject) -> Iterator[Trial]:
    def quick() -> None:
        took = _probe_in_child(subject)["seconds"]
        if took > TIMEOUT:  # a busy machine is no slow platform: once more
            took = _probe_in_child.__wrapped__(subject)["seconds"]
        require(took <= TIMEOUT, f"importing, probing and configuring took {took:.1f} s; {TIMEOUT:.0f} s are allowed")

    yield Trial("importing its package, probe() and configure()", quick)


@check("probe.reasons")
def reasons(subject: Subject) -> Iterator[Trial]:
    def bare() -> None:
        facts = _probe_in_child(subject, _optional(subject.chosen.platform))
        require("error" not in facts, f"where optional packages are missing, probe() raised {facts.get('error')}")
        if "reason" in facts:
            reason, remedy = facts["reason"], facts["remedy"]
            require(len(reason) > 10, f"probe() gives as the reason {reason!r}; say what is missing")
            require(len(remedy) > 5, f"probe() says {reason!r} and not what would help; fill in Unavailable.remedy")

    def detail() -> None:
        facts = subject.facts.detail
        require(
            isinstance(facts, str) and "\n" not in facts,
            f"Capabilities.detail is to be one line, not {facts!r}",
        )

    yield Trial("on a machine without the packages that are optional", bare)
    yield Trial("the detail that a person reads", detail)


def _optional(platform: type[Platform]) -> tuple[str, ...]:
    """Packages here that neither quintet nor the platform's own distribution requires. Lacking where quintet runs from
    its sources: no metadata says what it requires, and all would be hidden, torch too."""
    packages = importlib.metadata.packages_distributions()
    wanted = [DISTRIBUTION, *packages.get(platform.__module__.partition(".")[0], ())]
    if _installed(DISTRIBUTION) is None:
        raise NotSupported(
            f"the distribution {DISTRIBUTION} is not installed here, so nothing says which packages are optional"
        )
    needed: set[str] = set()
    while wanted:
        name = _plain(wanted.pop())
        if name not in needed:
            needed.add(name)
            wanted += _requires(name)
    return tuple(sorted(top for top, owners in packages.items() if not needed & {_plain(each) for each in owners}))


def _requires(distribution: str) -> list[str]:
    """Returns the requirements of a distribution without its extras."""
    return [
        found[0]
        for each in _installed(distribution) or ()
        if "extra ==" not in each and (found := re.match(r"[\w.-]+", each))
    ]


def _installed(distribution: str) -> list[str] | None:
    """Returns the requirements in its metadata; None if there is no such distribution here."""
    try:
        return importlib.metadata.requires(distribution) or []
    except importlib.metadata.PackageNotFoundError:
        return None


def _plain(distribution: str) -> str:
    return re.sub(r"[-_.]+", "-", distribution).lower()


@check("probe.facts")
def facts(subject: Subject) -> Iterator[Trial]:
    facts = subject.facts

    def devices() -> None:
        require(
            type(facts.devices) is int and facts.devices >= 1,
            f"devices is to be 1 or more, not {facts.devices!r}",
        )

    def dtypes() -> None:
        floats = [each for each in facts.dtypes if isinstance(each, torch.dtype) and each.is_floating_point]
        require(
            isinstance(facts.dtypes, tuple) and bool(facts.dtypes),
            f"dtypes is to be a tuple, not {facts.dtypes!r}",
        )
        require(len(floats) == len(facts.dtypes), f"dtypes are torch's floating types, not {facts.dtypes}")
        require(len(set(facts.dtypes)) == len(facts.dtypes), f"dtypes names one twice: {facts.dtypes}")
        require(all(each.itemsize > 1 for each in floats), f"8-bit types are formats, not dtypes: {facts.dtypes}")

    def fp8() -> None:
        known = {each for name, each in vars(torch).items() if name.startswith("float8_")}
        require(facts.fp8 is None or facts.fp8 in known, f"fp8 is to be None or one of {known}, not {facts.fp8!r}")

    def quant() -> None:
        strange = sorted(facts.weight_formats - {*KINDS, *EXTRAS})
        require(
            not strange, f"weight_formats names kinds that quintet does not have: {strange}; it has {sorted(KINDS)}"
        )

    def truths() -> None:
        wrong = [f.name for f in dataclasses.fields(Capabilities) if f.type is bool]
        wrong = [name for name in wrong if not isinstance(getattr(facts, name), bool)]
        require(not wrong, f"{', '.join(wrong)} of Capabilities must be True or False")

    def again() -> None:
        other = subject.chosen.platform.probe()
        require(other == facts, f"a second probe() returns {other}, the first returned {facts}")

    for what in (devices, dtypes, fp8, quant, truths):
        yield Trial(what.__name__, what)
    yield Trial("a second probe says the same", again)


# What people ask for: a platform may refuse any of it, with what to do instead.
CONFIGS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "a share of the memory": {"gpu_memory_utilization": 0.5},
    "pages": {"num_pages": 64, "page_size": 32},
    "bytes of the cache": {"kv_cache_memory_bytes": 2**28},
    "small pages": {"page_size": 8},
    "odd pages": {"page_size": 24},
    "eager": {"enforce_eager": True},
    "half precision": {"dtype": "float16"},
    "a cache in int8": {"kv_cache_dtype": "int8"},
    "a cache in int4": {"kv_cache_dtype": "int4"},
    "a cache in fp8": {"kv_cache_dtype": "fp8"},
    "few requests": {"max_num_seqs": 1, "max_num_batched_tokens": 64},
    "weights in int4": {"quantization": "int4", "quantization_group_size": 64},
}
MEASURED = "kv_cache_memory_bytes"  # a share of what is free at the moment, which others change


@check("probe.configure")
def configure(subject: Subject) -> Iterator[Trial]:
    for what, settings in CONFIGS.items():
        yield Trial(what, partial(_configured, subject, settings))
    yield Trial("more devices than there are", partial(_too_many, subject))


def _configured(subject: Subject, settings: dict[str, Any]) -> None:
    kind = subject.chosen.platform
    asked = subject.config(**settings)
    kept = copy.deepcopy(asked)
    try:
        settled, why = kind.configure(asked)
    except ValueError as error:
        _helpful(error, settings)
        return
    require(asked == kept, "configure() changed the config that it was given; return another (config.replace)")
    require(isinstance(settled, EngineConfig), f"configure() returned {type(settled).__name__}, not an EngineConfig")
    require(all(isinstance(each, str) and each for each in why), f"reasons are lines of text, not {why!r}")
    require(settled == asked or bool(why), f"configure() changed {_changes(asked, settled)} and gave no reason")
    lost = [name for name in settings if getattr(settled, name) != getattr(asked, name)]
    require(not lost or bool(why), f"{', '.join(lost)} was asked for and changed without a reason")
    _same(kind.configure(asked)[0], settled, "a second configure() of the same config")
    _same(kind.configure(settled)[0], settled, "configure() of what it had settled")


def _too_many(subject: Subject) -> None:
    count = subject.facts.devices + 1
    try:
        subject.chosen.platform.configure(subject.config(tensor_parallel_size=count))
    except ValueError as error:
        _helpful(error, {"tensor_parallel_size": count})
        return
    raise ContractViolation(
        f"configure() took tensor_parallel_size={count}, and probe() says {count - 1} devices; raise ValueError"
    )


def _helpful(error: ValueError, settings: dict[str, Any]) -> None:
    """A refusal names the setting, and says more than no."""
    facts = str(error)
    require(any(name in facts for name in settings), f"refused {settings} by {facts!r}, which names no setting of it")
    require(len(facts.split()) >= 6, f"refused {settings} by {facts!r}; say why, and what to ask for instead")


def _same(other: EngineConfig, settled: EngineConfig, what: str) -> None:
    drifted = [name for name in _changes(settled, other) if name != MEASURED]
    now, then = getattr(other, MEASURED) or 0, getattr(settled, MEASURED) or 0
    require(not drifted, f"{what} gave other values of {', '.join(drifted)}")
    require(abs(now - then) <= 0.2 * then, f"{what} gave {MEASURED}={now}, the first gave {then}")


def _changes(one: EngineConfig, other: EngineConfig) -> list[str]:
    return [f.name for f in dataclasses.fields(one) if getattr(one, f.name) != getattr(other, f.name)]
