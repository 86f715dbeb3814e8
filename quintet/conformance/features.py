"""Turns reports into facts: supported, unsupported or unverified, with the reason, for each platform and feature."""

import enum
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from quintet.common.suggestions import refuse_unknown
from quintet.conformance.kit import section_names
from quintet.conformance.report import ConformanceReport, SectionTally, TrialOutcome, TrialResult
from quintet.engine.platform_support import Support

PREFACE = """\
<!-- Written by scripts/support.py from the reports in conformance/reports/: do not edit. -->
# What is supported, as measured

Every line follows from a report of `quintet conformance` in `conformance/reports/`; none is written by hand.

- *Supported*: every trial of it passed.
- *Unsupported*: the platform says that it has no such thing, or a trial failed; the reasons stand below each table.
- *Unverified*: no report speaks of it.
- An *op* is supported where what serves it gives its specification's results; the specification itself may serve it, as
  `quintet explain MODEL` says. Of two ops in one, such as `rotary_write_kv`, models then call the two.
- *Emulated*: the report is of a stand-in for the device; on the device itself everything is unverified.

What holds on your machine: `quintet platforms --features`. A platform of your own: [vendors.md](vendors.md).

"""

CLAIMS = {  # what stands before the "/" of a feature that is a family's alone -> what was shown; on a page of its own
    "family": "logits",
    "tokens": "tokens",
    "bfloat16": "bfloat16",
    "bits": "bits",
}
GROUPS = {  # what stands before the "/" of a feature, or is one -> its heading, in the order of the page
    "family": "Model families",
    **{group: "" for group in CLAIMS if group != "family"},
    "dtype": "Types that weights and activations are computed in",
    "numbers": "Models that answer with numbers",
    "scheme": "Quantization while loading",
    "form": "Forms of quantized checkpoints: what is unsupported is held in another format, or in floats",
    "kv": "Formats of the KV cache",
    "attention": "Attention",
    "page-size": "Tokens in a page of the KV cache",
    "sampling": "Sampling",
    "parallel": "Devices that share a model",
    "graphs": "Whole engine",
    "overlap": "Whole engine",
    "sleep": "Whole engine",
    "reload": "Whole engine",
    "lora": "Whole engine",
    "batch-invariance": "Whole engine",
    "op": "Ops",
}


class FeatureState(str, enum.Enum):
    """State of one feature on one platform."""

    SUPPORTED = "supported"
    UNSUPPORTED = "unsupported"
    UNVERIFIED = "unverified"


class Verdict(NamedTuple):
    """State of a feature, and the reason."""

    state: FeatureState
    reason: str = ""


def verdicts(report: ConformanceReport) -> dict[str, Verdict]:
    """Supported is what every trial of it passed. Of several reasons against it, a failure's is given first."""
    trials: dict[str, list[TrialResult]] = {}
    for result in report.results:
        for feature in result.features:
            trials.setdefault(feature, []).append(result)
    refuse_unknown("group of features", {feature.split("/")[0] for feature in trials}, GROUPS)
    return {feature: _verdict(results) for feature, results in sorted(trials.items())}


def _verdict(results: Sequence[TrialResult]) -> Verdict:
    worst = min(results, key=lambda each: _ORDER.index(each.outcome))
    if worst.outcome is TrialOutcome.PASSED:
        return Verdict(FeatureState.SUPPORTED)
    if worst.outcome is TrialOutcome.UNSUPPORTED:
        return Verdict(FeatureState.UNSUPPORTED, worst.detail)
    return Verdict(FeatureState.UNSUPPORTED, f"{worst.clause} failed, {worst.what}: {worst.detail}")


_ORDER = (TrialOutcome.FAILED, TrialOutcome.UNSUPPORTED, TrialOutcome.PASSED)


def missing(report: ConformanceReport) -> list[str]:
    """Sections of the kit that did not run, or tried nothing."""
    tried = {result.section for result in report.results}
    return [section for section in section_names() if section not in tried]


def support(report: ConformanceReport) -> Support:
    """The small table of a report, which an engine reads when it starts."""
    found = verdicts(report)
    return Support(
        platform=report.platform,
        distribution=report.distribution,
        version=report.version,
        quintet=report.quintet,
        contract=report.contract,
        detail=report.detail,
        emulated=report.emulated,
        date=report.date,
        supported=frozenset(feature for feature, verdict in found.items() if verdict.state is FeatureState.SUPPORTED),
        unsupported={f: _line(v.reason) for f, v in found.items() if v.state is FeatureState.UNSUPPORTED},
    )


def table(tables: Mapping[str, Support | None]) -> dict[str, dict[str, Verdict]]:
    """feature -> platform -> what is known, in the order of the page. A platform without a table is unverified."""
    features = {f for each in tables.values() if each for f in (*each.supported, *each.unsupported)}
    return {f: {name: _of(each, f) for name, each in tables.items()} for f in sorted(features, key=_place)}


def _of(known: Support | None, feature: str) -> Verdict:
    if known is None:
        return Verdict(FeatureState.UNVERIFIED, "no report")
    if feature in known.supported:
        return Verdict(FeatureState.SUPPORTED)
    if feature in known.unsupported:
        return Verdict(FeatureState.UNSUPPORTED, known.unsupported[feature])
    return Verdict(FeatureState.UNVERIFIED, "its report does not speak of it")


def _place(feature: str) -> tuple[int, int, str]:
    """Groups in their order, numbers by size, names by letter."""
    group, _, name = feature.partition("/")
    return [*GROUPS].index(group), int(name) if name.isdecimal() else 0, name


def _line(reason: str) -> str:
    return " ".join(reason.split())


# ------------------------------------------------------------------------------------------------ the page


def page(reports: Mapping[str, ConformanceReport | None]) -> str:
    """docs/support.md: platform -> its report, or None where there is none."""
    found = table({name: support(each) if each else None for name, each in reports.items()})
    lines = [
        *PREFACE.splitlines(),
        "| platform | measured on | package | passed | failed | unsupported |",
        "|---|---|---|---|---|---|",
        *(_origin(name, each) for name, each in reports.items()),
    ]
    columns = [f"`{name}`{', emulated' * bool(each and each.emulated)}" for name, each in reports.items()]
    for heading in filter(None, dict.fromkeys(GROUPS.values())):
        rows = {f: row for f, row in found.items() if GROUPS[f.partition("/")[0]] == heading}
        lines += _section(heading, columns, rows) if rows else []
    return "\n".join(lines) + "\n"


def _origin(name: str, report: ConformanceReport | None) -> str:
    """Formats a report's origin and its counts as a table row."""
    if report is None:
        return f"| `{name}` | no report: everything is unverified | | | | |"
    tally, emulated = SectionTally.of(report.results), ", emulated" * report.emulated
    where = (
        f"{report.detail or 'no detail'}{emulated}; torch {report.machine.get('torch', 'unknown')}; {report.date[:10]}"
    )
    package = f"{report.distribution} {report.version}"
    return f"| `{name}` | {where} | {package} | {tally.passed} | {tally.failed} | {tally.unsupported} |"


def _section(heading: str, columns: Sequence[str], rows: Mapping[str, Mapping[str, Verdict]]) -> list[str]:
    lines = ["", f"## {heading}", "", f"| | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
    for feature, row in rows.items():
        cells = " | ".join(verdict.state.value for verdict in row.values())
        lines.append(f"| {feature.partition('/')[2] or feature} | {cells} |")
    notes = reasons(rows)
    return [*lines, "", *(f"- {note}" for note in notes)] if notes else lines


def reasons(rows: Mapping[str, Mapping[str, Verdict]]) -> list[str]:
    """Why features are unsupported; those of a platform that share a reason stand together."""
    shared: dict[tuple[str, str], list[str]] = {}
    for feature, row in rows.items():
        for name, verdict in row.items():
            if verdict.state is FeatureState.UNSUPPORTED:
                shared.setdefault((name, verdict.reason), []).append(feature)
    return [f"{name}, {', '.join(features)}: {reason}" for (name, reason), features in shared.items()]


def counts(row: Iterable[Verdict]) -> str:
    """Formats the number of features in each state."""
    found = Counter(verdict.state for verdict in row)
    return ", ".join(f"{found[state]} {state.value}" for state in FeatureState)
