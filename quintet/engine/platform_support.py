"""Support table of a platform, made by the conformance kit; an engine reads it at its start and never writes it.

A platform's package may have one beside the platform's module, and the kit keeps one of its runs on this machine. The
newer one is used, so that a new version of a package is not judged by the results of an older one. A family that was
tried alone (--family) has a table of its own, which adds what the other one does not mention.
"""

import json
import logging
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any
from urllib.parse import quote

from quintet.config import EngineConfig
from quintet.config.cache_dir import cache_folder
from quintet.engine.executor.model_part import ModelSizes
from quintet.engine.quantization import scheme_of
from quintet.hub.dtypes import name_of
from quintet.interface.platform import CONTRACT_VERSION, Capabilities, Platform
from quintet.interface.types import cache_dtype_name
from quintet.platforms import PlatformCandidate, SelectedPlatform

SUPPORT_FILE = "support.json"  # beside the platform's module
FORMAT = 1
MAX_BYTES = 2**20
MAX_REASON = 160  # characters of a reason in the log

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Support:
    """Results of one complete run of the kit for every feature, such as "family/llama" or "op/linear"."""

    platform: str
    distribution: str  # that brings it, and its version
    version: str
    quintet: str  # the version that ran
    contract: int
    detail: str  # the platform's description of the device
    emulated: bool  # the device was an emulation, which proves nothing about a real one
    date: str
    supported: frozenset[str]
    unsupported: Mapping[str, str]  # feature -> why

    @property
    def tested_at(self) -> datetime:
        """Date of the run; UTC if it has no time zone."""
        tested = datetime.fromisoformat(self.date)
        return tested if tested.tzinfo else tested.replace(tzinfo=timezone.utc)

    def text(self) -> str:
        """Returns the table as JSON, one feature to a line."""
        plain = {"format": FORMAT, **asdict(self), "supported": sorted(self.supported)}
        plain["unsupported"] = dict(sorted(self.unsupported.items()))
        return json.dumps(plain, indent=1) + "\n"

    def write(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(self.text(), encoding="utf-8")


def read(path: Path) -> Support:
    """ValueError says what is wrong with the file."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
        if len(data) > MAX_BYTES:
            raise ValueError(f"it is longer than {MAX_BYTES >> 20} MiB")
        return _support(json.loads(data))
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is no table of support: {error}; write it anew with `quintet conformance`") from None


def _support(plain: Any) -> Support:
    if not isinstance(plain, dict) or plain.pop("format", None) != FORMAT:
        raise ValueError(f"it is not of format {FORMAT}")
    made = Support(**{**plain, "supported": frozenset(plain["supported"]), "unsupported": dict(plain["unsupported"])})
    words = (made.platform, made.distribution, made.version, made.quintet, made.detail, made.date, *made.supported)
    if not all(isinstance(word, str) for word in (*words, *made.unsupported, *made.unsupported.values())):
        raise ValueError("a name or a reason in it is no text")
    made.tested_at  # noqa: B018  ValueError where its date is none
    return made


@dataclass(frozen=True)
class Evidence:
    """Support table that is used for a platform here, if there is one."""

    support: Support | None
    origin: str  # where it is from, or why there is none

    def unproven_features(self, platform: str, features: Iterable[str]) -> str:
        """One line about those of the features that are not proven; empty if all are."""
        proven = self.support.supported if self.support else frozenset()
        refuted = self.support.unsupported if self.support else {}
        features = [feature for feature in features if feature not in proven]
        unknown = [feature for feature in features if feature not in refuted]
        reasons = [
            f"unsupported on {platform}: {each}: {_shorten(refuted[each])}" for each in features if each in refuted
        ]
        reasons += [f"unverified on {platform}: {', '.join(unknown)}"] if unknown else []
        kit = [feature for feature in features if not feature.startswith("backend/")]
        kind, _, family = kit[0].partition("/") if len(kit) == 1 else ("", "", "")
        part = f" --family {family}" if kind == "family" else ""  # seconds, where the whole kit takes minutes
        remedies = [f"run `quintet conformance --device {platform}{part}`"] if kit else []
        remedies += ["`quintet try MODEL` compares a small copy with transformers"] if len(kit) < len(features) else []
        return "; ".join([*reasons, *remedies]) if reasons else ""


def support_evidence(platform: SelectedPlatform | PlatformCandidate) -> Evidence:
    """The newer of what was found on this machine, with this version and device, and what the package brings; and what
    was found here of families that were tried alone."""
    evidence, kind, facts = _whole_evidence(platform), platform.platform, _facts(platform)
    if kind is None or not isinstance(facts, Capabilities):
        return evidence
    support = evidence.support
    for path in sorted(cache_folder("support").glob(f"{kind.name}.*.json")):
        own = _read_if_there(path)
        if own and own.platform == kind.name and _is_current(own, facts, platform):
            support = own if support is None else _with_new_features(support, own)
    if support is None or evidence.support is not None:
        return replace(evidence, support=support)
    return Evidence(support, f"families that were tried alone; of all else, {evidence.origin}")


def _with_new_features(known: Support, more: Support) -> Support:
    """Adds what only the second table mentions."""
    mentioned = {*known.supported, *known.unsupported}
    unsupported = {feature: why for feature, why in more.unsupported.items() if feature not in mentioned}
    return replace(
        known,
        supported=known.supported | (more.supported - mentioned),
        unsupported={**known.unsupported, **unsupported},
    )


def _facts(platform: SelectedPlatform | PlatformCandidate) -> Any:
    return platform.capabilities if isinstance(platform, SelectedPlatform) else platform.result


def _whole_evidence(platform: SelectedPlatform | PlatformCandidate) -> Evidence:
    """The newer of the tables of whole runs."""
    kind = platform.platform  # the class
    facts = _facts(platform)
    if kind is None or not isinstance(facts, Capabilities):
        return Evidence(None, f"not available here: {facts}")
    own, shipped = _read_if_there(local_table_path(kind.name)), _packaged(kind)
    emulated = shipped is not None and shipped.emulated and facts.auto_select  # says nothing of a real device
    if own and _is_current(own, facts, platform):
        if shipped is None or emulated or own.tested_at >= shipped.tested_at:
            return Evidence(own, f"of this machine, {own.date[:10]}")
    if emulated:
        return Evidence(None, f"its report is of an emulation; run `quintet conformance --device {kind.name}`")
    if shipped:
        return Evidence(shipped, f"shipped with the package, {shipped.date[:10]}, {shipped.detail or 'no detail'}")
    return Evidence(None, f"no report; run `quintet conformance --device {kind.name}`")


def _packaged(kind: type[Platform]) -> Support | None:
    """The table beside a platform's module, if it is of that platform and of this contract."""
    module = sys.modules[kind.__module__].__file__
    found = _read_if_there(Path(module).with_name(SUPPORT_FILE)) if module else None
    return found if found and found.platform == kind.name and found.contract == CONTRACT_VERSION else None


def local_table_path(platform: str, family: str = "") -> Path:
    """Path of the kit's own table on this machine; of a family that was tried alone."""
    return cache_folder("support") / (f"{platform}.{quote(family, safe='')}.json" if family else f"{platform}.json")


def _is_current(own: Support, facts: Capabilities, platform: SelectedPlatform | PlatformCandidate) -> bool:
    """True if the table is of the package that is installed now, and of the device that is here now."""
    same = own.detail == facts.detail and own.contract == CONTRACT_VERSION
    return same and (not platform.version or (own.distribution, own.version) == (platform.source, platform.version))


def _read_if_there(path: Path) -> Support | None:
    """A table that is broken costs a line in the log, and no engine."""
    try:
        return read(path)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        logger.warning("%s", error)
        return None


def _shorten(reason: str) -> str:
    line = reason.splitlines()[0] if reason else "no reason given"
    return line if len(line) <= MAX_REASON else line[:MAX_REASON] + "..."


def features_of(config: EngineConfig, hf_config: Any, sizes: ModelSizes) -> list[str]:
    """Returns the features that will run, as the conformance kit names them; by transformers' code "backend/TYPE"."""
    asked = {
        "backend" if sizes.transformers_backend else "family": hf_config.model_type,
        "dtype": name_of(sizes.dtype),
        "scheme": scheme_of(sizes.quantization),
        "kv": cache_dtype_name(sizes.kv_dtype) if sizes.kv_dtype else None,
        "parallel": config.tensor_parallel_size if config.tensor_parallel_size > 1 else None,
    }
    return [f"{group}/{name}" for group, name in asked.items() if name is not None]
