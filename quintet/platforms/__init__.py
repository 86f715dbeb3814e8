"""Finds the platforms: the built-in names and the entry-point group "quintet.platforms"; probes them; chooses one."""

import importlib
import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass, replace

from quintet.common.distribution import install_hint
from quintet.common.plugins import entry_points
from quintet.common.suggestions import unknown_name_error
from quintet.config import AUTO, EngineConfig
from quintet.interface.platform import CONTRACT_VERSION, Capabilities, Platform, Unavailable, WrongContract

GROUP = "quintet.platforms"
OURS = "built in"  # where a platform is from that no other distribution brings
BUILT_IN = ("cuda", "rocm", "xpu", "tpu", "cpu", "null")  # in the order that "auto" tries them


@dataclass(frozen=True)
class PlatformCandidate:
    """A platform that is known here by name, usable or not."""

    name: str
    source: str  # OURS, or the distribution that brings it
    result: Capabilities | Unavailable
    platform: type[Platform] | None = None  # None: its package could not be imported
    version: str = ""  # of that distribution

    @property
    def available(self) -> bool:
        return isinstance(self.result, Capabilities)

    @property
    def auto_selectable(self) -> bool:
        """True if "auto" may choose it: an unavailable one counts, since the user may want to know why."""
        return not isinstance(self.result, Capabilities) or self.result.auto_select


@dataclass(frozen=True)
class SelectedPlatform:
    """The platform that will run, its facts, and why it was chosen."""

    platform: type[Platform]
    capabilities: Capabilities
    reason: str
    source: str = OURS  # or the distribution that brings it
    version: str = ""  # of that distribution

    def configure(self, config: EngineConfig) -> tuple[EngineConfig, list[str]]:
        """As the platform settles it; ValueError where it asks for what the platform does not say that it has."""
        if config.batch_invariant and not (self.capabilities.batch_invariant or self.capabilities.batch_invariant_mode):
            raise ValueError(
                f"batch_invariant=True: platform {self.platform.name} does not give a request the same bits in every "
                "batch; leave it out, or run on cpu"
            )
        if config.tensor_parallel_size != AUTO:
            return self.platform.configure(config)
        if self.capabilities.processes:  # the platform knows where its ranks had better be
            config, reasons = self.platform.configure(config)
        else:
            size = self.capabilities.devices
            reasons = [f"tensor_parallel_size={size}: auto, and so many devices are visible"]
            config, more = self.platform.configure(config.replace(tensor_parallel_size=size))
            reasons += more
        if config.tensor_parallel_size == AUTO:
            return config.replace(tensor_parallel_size=1), [
                *reasons,
                "tensor_parallel_size=1: auto, and the platform has no wish",
            ]
        return config, reasons


_UNPROBED = Unavailable("not probed")


class UnavailableError(ValueError):
    """The platform that was asked for cannot run here; the message says why and what would help."""


def discover() -> list[PlatformCandidate]:
    """Every platform that is built in or installed, probed, in the order that "auto" tries them."""
    plugins = [_plugin(point) for point in entry_points(group=GROUP)]
    taken = {found.name for found in plugins}
    return [*plugins, *(_built_in(name) for name in BUILT_IN if name not in taken)]


def choose(name: str) -> SelectedPlatform:
    """The platform of that name, or for "auto" the best that is available here."""
    return _best(discover()) if name == "auto" else _require(_named(name), "asked for by name")


def _named(name: str) -> PlatformCandidate:
    """The others are not even imported."""
    points = {point.name: point for point in entry_points(group=GROUP)}
    if name in points:
        return _plugin(points[name])
    if name not in BUILT_IN:
        raise UnavailableError(
            unknown_name_error("device", name, ["auto", *points, *(n for n in BUILT_IN if n not in points)])
        )
    return _built_in(name)


def _best(found: Sequence[PlatformCandidate]) -> SelectedPlatform:
    passed: list[str] = []
    for candidate in found:
        if not candidate.auto_selectable:
            continue
        if candidate.available:
            why = "the best available" + (f"; passed over: {', '.join(passed)}" if passed else "")
            return _require(candidate, why)
        passed.append(candidate.name)
    reasons = "; ".join(f"{f.name}: {f.result}" for f in found if f.auto_selectable)
    raise UnavailableError(f"no platform is available here: {reasons}")


def _require(found: PlatformCandidate, reason: str) -> SelectedPlatform:
    if found.platform is None or isinstance(found.result, Unavailable):
        raise UnavailableError(f"device {found.name!r} is not available: {found.result}")
    return SelectedPlatform(found.platform, found.result, reason, found.source, found.version)


def _built_in(name: str) -> PlatformCandidate:
    module = f"{__name__}.{name}"
    if importlib.util.find_spec(module) is None:
        return PlatformCandidate(
            name, OURS, Unavailable("this version of quintet does not have it yet", "use another device")
        )
    try:
        platform = importlib.import_module(module).PLATFORM
    except Exception as error:  # one that cannot be imported must not take the others down either
        return PlatformCandidate(name, OURS, Unavailable(f"{type(error).__name__}: {error}", install_hint(name)))
    return _probe(PlatformCandidate(name, OURS, _UNPROBED, platform))


def _plugin(point: "importlib.metadata.EntryPoint") -> PlatformCandidate:
    source, version = (point.dist.name, point.dist.version) if point.dist else (point.value, "")
    found = PlatformCandidate(point.name, source, _UNPROBED, version=version)
    try:
        platform = point.load()
        if not (isinstance(platform, type) and issubclass(platform, Platform)):
            raise TypeError(f"{point.value} is not a subclass of quintet.interface.platform.Platform")
        if not hasattr(platform, "contract"):
            raise WrongContract(platform.__name__, None)
    except WrongContract as error:
        remedy = f"{error.remedy(source)}; docs/contract-changes.md says what changed"
        return replace(found, result=Unavailable(f"{source} {version}: {error}", remedy))
    except Exception as error:  # a vendor's package must not take the others down; its reason is shown
        remedy = f"mend or remove {source} {version}; this quintet has contract {CONTRACT_VERSION}"
        return replace(found, result=Unavailable(f"{type(error).__name__}: {error}", remedy))
    return _probe(replace(found, platform=platform))


def _probe(found: PlatformCandidate) -> PlatformCandidate:
    assert found.platform is not None, "only a class can be probed"
    try:
        result = found.platform.probe()
    except Exception as error:
        whom = "quintet" if found.source == OURS else found.source
        result = Unavailable(f"its probe failed, {type(error).__name__}: {error}", f"report this to {whom}")
    return replace(found, result=result)
