"""List the platforms, with their facts or the reason why they cannot run here."""

import argparse
import dataclasses
import json
from typing import TYPE_CHECKING, Any

from quintet.cli.tables import table
from quintet.config import EngineConfig, read_environment

if TYPE_CHECKING:
    from quintet.platforms import PlatformCandidate


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--features", action="store_true", help="print what the conformance kit proved about each; runs nothing"
    )


def run(arguments: argparse.Namespace) -> int:
    """Prints every platform and which one `auto` takes."""
    if arguments.features:
        return _features(arguments.json)

    from quintet.platforms import choose, discover

    wanted = read_environment().apply(EngineConfig()).device
    rows = [_row(found) for found in discover()]
    try:
        choice = choose(wanted)
        chosen, reason = choice.platform.name, choice.reason
    except ValueError as error:
        chosen, reason = None, str(error)
    if arguments.json:
        print(json.dumps({"platforms": rows, "chosen": chosen, "reason": reason}, indent=2))
        return 0 if chosen else 1
    print(table(("platform", "state", "facts, or the reason"), [_cells(row) for row in rows]))
    if chosen and wanted == "auto":
        reason = "the first above that is available, stand-ins left out"
    print(f"\n{wanted} → {chosen}: {reason}" if chosen else f"\n{reason}")
    return 0 if chosen else 1


def _features(as_json: bool) -> int:
    """Prints features proven by the kit on this machine, or by the report that a platform's package ships."""
    from quintet.conformance import features
    from quintet.engine.platform_support import support_evidence
    from quintet.platforms import discover

    known = {found.name: support_evidence(found) for found in discover()}
    rows = features.table({name: each.support for name, each in known.items()})
    if as_json:
        origins = {name: each.origin for name, each in known.items()}
        plain = {f: {name: v._asdict() for name, v in row.items()} for f, row in rows.items()}
        print(json.dumps({"reports": origins, "features": plain}, indent=2))
        return 0
    spoken = [name for name, each in known.items() if each.support]
    for name, each in known.items():
        status = features.counts(row[name] for row in rows.values()) if each.support else "unverified"
        print(f"{name}: {status}; {each.origin}")
    if spoken:
        states = [(feature, *(row[name].state.value for name in spoken)) for feature, row in rows.items()]
        print("\n" + table(("feature", *spoken), states))
    why = features.reasons(rows)
    if why:
        print("\n" + "\n".join(why))
    return 0


def _row(found: "PlatformCandidate") -> dict[str, Any]:
    """A platform as plain data."""
    from quintet.interface.platform import Unavailable

    row: dict[str, Any] = {"name": found.name, "source": found.source}
    facts = found.result
    if isinstance(facts, Unavailable):
        return {**row, "available": False, "reason": facts.reason, "remedy": facts.remedy}
    plain = {each.name: _plain(getattr(facts, each.name)) for each in dataclasses.fields(facts)}
    return {**row, "available": True, **plain}


def _plain(value: Any) -> Any:
    if isinstance(value, (tuple, frozenset)):
        return sorted(map(_plain, value)) if isinstance(value, frozenset) else [_plain(each) for each in value]
    return value if isinstance(value, (bool, int, str)) or value is None else str(value).removeprefix("torch.")


def _cells(row: dict[str, Any]) -> tuple[str, str, str]:
    if not row["available"]:
        return row["name"], "unavailable", "; ".join(filter(None, (row["reason"], row["remedy"])))
    facts = [f"{row['devices']} device{'s' * (row['devices'] != 1)}", ", ".join(row["dtypes"])]
    facts += [f"fp8 {row['fp8']}"] if row["fp8"] else []
    formats = row["weight_formats"]
    facts += [f"quant {', '.join(formats)}"] if formats else []
    facts += [name.replace("_", " ") for name in ("static_shapes", "spmd", "overlap", "batch_invariant") if row[name]]
    facts += [row["detail"]] if row["detail"] else []
    return row["name"], "available", "; ".join(facts)
