"""Faults of what a platform says of itself before it is opened."""

import os
import time
from dataclasses import replace
from typing import Any

from acme.faults import fault


def _writes_variable(probe: Any) -> Any:
    def faulty(cls: Any) -> Any:
        os.environ["ACME_PROBED_BY"] = str(os.getpid())
        return probe(cls)

    return faulty


def _opens_device(probe: Any) -> Any:
    opened: list[Any] = []

    def faulty(cls: Any) -> Any:
        opened.append(cls().open(0))
        return probe(cls)

    return faulty


def _slow(probe: Any) -> Any:
    def faulty(cls: Any) -> Any:
        time.sleep(5.3)
        return probe(cls)

    return faulty


def _twice(probe: Any) -> Any:
    def faulty(cls: Any) -> Any:
        facts = probe(cls)
        return replace(facts, dtypes=facts.dtypes + facts.dtypes[:1])

    return faulty


def _edits(configure: Any) -> Any:
    def faulty(cls: Any, config: Any) -> Any:
        object.__setattr__(config, "max_num_seqs", 1 + config.max_num_seqs)
        return configure(cls, config)

    return faulty


def _silent(configure: Any) -> Any:
    def faulty(cls: Any, config: Any) -> Any:
        return configure(cls, config)[0], []

    return faulty


def _moody(probe: Any) -> Any:
    asked: list[None] = []

    def faulty(cls: Any) -> Any:
        asked.append(None)
        return replace(probe(cls), detail=f"asked {len(asked)} times")

    return faulty


fault("probe-writes", "Probing sets an environment variable.", "probe.pure", ("platform:Acme.probe", _writes_variable))
fault("probe-opens", "Probing opens a device.", "probe.pure", ("platform:Acme.probe", _opens_device))
fault("probe-slow", "Probing takes more than five seconds.", "probe.quick", ("platform:Acme.probe", _slow))
fault("dtype-twice", "A dtype is declared twice.", "probe.facts", ("platform:Acme.probe", _twice))
fault(
    "configure-edits", "configure() changes what it is given.", "probe.configure", ("platform:Acme.configure", _edits)
)
fault("configure-silent", "configure() gives no reasons.", "probe.configure", ("platform:Acme.configure", _silent))
fault("probe-moody", "Probing says something else each time.", "probe.facts", ("platform:Acme.probe", _moody))
