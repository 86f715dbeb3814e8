"""What the kit found: as JSON, as text, as features, and what the command and a starting engine make of it."""

import json
import logging
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from quintet.cli import main as cli
from quintet.cli.commands._crash_reporter import CrashReporter
from quintet.config import EngineConfig
from quintet.conformance import features, kit, report
from quintet.conformance.check import Check, NotSupported, Trial, require
from quintet.conformance.features import FeatureState
from quintet.conformance.harness.subject import Subject
from quintet.conformance.report import ConformanceReport, TrialOutcome, TrialResult
from quintet.engine import platform_support as support
from quintet.engine.platform_support import Evidence, Support
from quintet.engine.startup import prepare
from quintet.interface.platform import CONTRACT_VERSION, Capabilities
from quintet.platforms import SelectedPlatform
from quintet.platforms.null import PLATFORM as NULL

PASSED = TrialResult(
    "ops", "ops.specification", "linear", "4x8", TrialOutcome.PASSED, "", 0.25, ("op/linear", "dtype/float32")
)
LACKING = TrialResult(
    "ops", "ops.specification", "linear", "half", TrialOutcome.UNSUPPORTED, "no half", 0.0, ("dtype/float16",)
)
FAILED = TrialResult(
    "memory", "memory.limit", "too much", "1 TiB", TrialOutcome.FAILED, "Broken: it fit\nsomehow", 1.0, ("sleep",)
)


def made(*results: TrialResult, **changes: Any) -> ConformanceReport:
    fields = {
        "platform": "null", "distribution": "quintet", "version": "0.1.0", "quintet": "0.1.0",
        "contract": CONTRACT_VERSION, "devices": 1, "detail": "does no arithmetic", "emulated": True,
        "machine": {"torch": "2.11"}, "date": "2026-01-02T03:04:05+00:00", "sections": ("memory", "ops"),
    }  # fmt: skip
    return ConformanceReport(**{**fields, **changes}, results=results)


def test_a_report_is_read_as_it_was_written(tmp_path: Path) -> None:
    written = made(PASSED, LACKING, FAILED)
    written.write(tmp_path / "deep" / "null.json")
    assert report.read(tmp_path / "deep" / "null.json") == report.read(str(tmp_path / "deep" / "null.json")) == written
    lines = (tmp_path / "deep" / "null.json").read_text().splitlines()
    assert sum(line.startswith('  {"section"') for line in lines) == 3, "one result to a line"


def broken(change: Callable[[dict[str, Any]], Any]) -> bytes:
    plain = msgspec.to_builtins(made(PASSED, FAILED))
    change(plain)
    return json.dumps(plain).encode()


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"{", "truncated"),
        (b"[]", "Expected `object`"),
        (broken(lambda plain: plain.update(format=2)), "its format is 2"),
        (broken(lambda plain: plain.pop("detail")), "missing required field `detail`"),
        (broken(lambda plain: plain.update(details="x")), "unknown field `details`"),
        (broken(lambda plain: plain.update(devices=0)), r">= 1 - at `\$.devices`"),
        (broken(lambda plain: plain["results"][1].update(outcome="ok")), r"'ok' - at `\$.results\[1\].outcome`"),
        (broken(lambda plain: plain["results"][1].pop("clause")), "missing required field `clause`"),
        (broken(lambda plain: plain["results"][1].update(detail="")), "memory.limit, '1 TiB': failed without a reason"),
        (broken(lambda plain: plain["results"][0].update(section="graphs")), "'graphs', which is not among"),
        (broken(lambda plain: plain["results"][0].update(what="x" * 9999)), "length <="),
    ],
)
def test_a_report_of_another_shape_is_refused(tmp_path: Path, data: bytes, says: str) -> None:
    path = tmp_path / "null.json"
    path.write_bytes(data)
    with pytest.raises(ValueError, match=rf"null.json is no report of `quintet conformance`: .*{says}"):
        report.read(path)


def test_a_report_beyond_all_measure_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made(PASSED).write(tmp_path / "null.json")
    monkeypatch.setattr(report, "MAX_BYTES", 100)
    with pytest.raises(ValueError, match="longer than"):
        report.read(tmp_path / "null.json")


def test_the_page_gives_each_failure_with_its_clause() -> None:
    page = str(made(PASSED, LACKING, FAILED))
    assert "null (emulated): quintet 0.1.0, contract" in page
    assert "ops     1 passed, 0 failed, 1 unsupported, 0.2 s" in page
    assert "all     1 passed, 1 failed, 1 unsupported, 1.2 s" in page
    assert "memory.limit: What does not fit is a MemoryError" in page
    assert "tried  too much: 1 TiB\n  came   Broken: it fit\n         somehow" in page
    assert page.endswith("broken: memory.limit")
    assert str(made(PASSED)).endswith("every clause that was tried holds")


# ------------------------------------------------------------------------------------------------ features


def test_supported_is_what_every_trial_passed() -> None:
    lacks_linear = msgspec.structs.replace(LACKING, features=("op/linear",))
    found = features.verdicts(made(PASSED, lacks_linear, FAILED))
    assert found["dtype/float32"].state is FeatureState.SUPPORTED
    assert found["op/linear"] == (FeatureState.UNSUPPORTED, "no half")
    assert found["sleep"].state is FeatureState.UNSUPPORTED
    assert found["sleep"].reason.startswith("memory.limit failed, 1 TiB: Broken: it fit")


def test_a_failure_is_given_before_what_is_lacking() -> None:
    fails = msgspec.structs.replace(FAILED, features=LACKING.features)
    assert "failed" in features.verdicts(made(LACKING, fails))["dtype/float16"].reason


def test_a_misspelt_group_of_features_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown group of features 'familly'; did you mean 'family'"):
        features.verdicts(made(msgspec.structs.replace(PASSED, features=("familly/llama",))))


def test_what_no_report_speaks_of_is_unverified() -> None:
    other = made(msgspec.structs.replace(PASSED, features=("parallel/2", "parallel/10", "op/linear")))
    found = features.table({"a": features.support(made(PASSED)), "b": features.support(other), "c": None})
    assert [*found] == ["dtype/float32", "parallel/2", "parallel/10", "op/linear"], "groups in order, numbers by size"
    assert found["parallel/2"]["a"] == (FeatureState.UNVERIFIED, "its report does not speak of it")
    assert found["parallel/2"]["b"].state is FeatureState.SUPPORTED
    assert {row["c"] for row in found.values()} == {(FeatureState.UNVERIFIED, "no report")}


def test_the_page_of_support_groups_features_and_gives_reasons_once() -> None:
    lacking = msgspec.structs.replace(LACKING, features=("dtype/float16", "dtype/bfloat16"))
    page = features.page({"one": made(PASSED, lacking), "two": None})
    assert "| `one` | does no arithmetic, emulated; torch 2.11; 2026-01-02 | quintet 0.1.0 | 1 | 0 | 1 |" in page
    assert "| `two` | no report: everything is unverified |" in page
    assert "| | `one`, emulated | `two` |" in page
    assert "| float32 | supported | unverified |" in page
    assert "| float16 | unsupported | unverified |" in page
    assert page.count("no half") == 1 and "- one, dtype/bfloat16, dtype/float16: no half" in page
    assert "## Ops" in page and "## Model families" not in page


def test_what_was_shown_of_a_family_stands_on_the_page_of_models() -> None:
    shown = made(msgspec.structs.replace(PASSED, features=("family/llama", "tokens/llama", "bits/llama")))
    assert {"tokens/llama", "bits/llama"} < features.support(shown).supported
    page = features.page({"one": shown})
    assert "## Model families" in page and page.count("| llama | supported |") == 1 and "## \n" not in page


# ------------------------------------------------------------------------------------------------ the command


@pytest.fixture(autouse=True)
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """A cache of the test's own; and the log as it was."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    log = logging.getLogger("quintet")
    level, handlers = log.level, [*log.handlers]
    yield tmp_path / "cache" / "quintet" / "support"
    log.setLevel(level)
    log.handlers[:] = handlers


@pytest.fixture
def checks(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Puts these calls in the place of the kit's own checks: one trial each, of one section."""

    def put(*calls: Callable[[], None]) -> None:
        trials = [Trial(f"call {i}", call, ("graphs",)) for i, call in enumerate(calls)]
        one = Check("probe", "probe.pure", "dummy", lambda subject: iter(trials))
        monkeypatch.setattr(kit, "checks", lambda wanted: [one])

    return put


def nothing() -> None:
    """A trial that holds."""


def lacks() -> None:
    raise NotSupported("no graphs")


def breaks() -> None:
    require(False, "wanted 1, got 2")


def conformance(*words: str) -> int:
    return cli.main(["conformance", "--device", "null", *words])


def test_all_passed_is_zero_and_the_report_is_kept(
    checks: Callable[..., None], home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checks(nothing, nothing)
    assert conformance("--json", str(tmp_path / "r.json"), "--support", str(tmp_path / "s.json")) == 0
    said = capsys.readouterr()
    assert said.out.rstrip().endswith("every clause that was tried holds")
    *counts, seconds, unit = said.err.split()
    assert counts == ["probe", "2", "passed,", "0", "failed,", "0", "unsupported,"]
    assert float(seconds) >= 0 and unit == "s"
    assert [result.what for result in report.read(tmp_path / "r.json").results] == ["call 0", "call 1"]
    assert support.read(home / "null.json").supported == {"graphs"}
    assert support.read(tmp_path / "s.json") == support.read(home / "null.json")


def test_one_failure_is_one_and_shown_at_once(checks: Callable[..., None], capsys: pytest.CaptureFixture[str]) -> None:
    checks(nothing, breaks, lacks)
    assert conformance() == 1
    said = capsys.readouterr()
    for text in (said.out, said.err):
        assert "probe.pure: Probing opens no device" in text and "dummy: call 1" in text
        assert "came   wanted 1, got 2" in text and "1 passed, 1 failed, 1 unsupported" in text


def test_what_the_platform_lacks_is_no_failure(checks: Callable[..., None], home: Path) -> None:
    checks(lacks)
    assert conformance() == 0
    assert support.read(home / "null.json").unsupported == {"graphs": "no graphs"}


def test_a_part_of_the_kit_is_not_kept(checks: Callable[..., None], home: Path) -> None:
    checks(nothing)
    assert conformance("--section", "probe") == 0
    assert not home.exists()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--device", "cuba"], "did you mean 'cuda'"),
        (["--device", "xpu"], "is not available"),
        (["--device", "null", "--section", "prob"], "did you mean 'probe'"),
        (["--device", "null", "--section", "probe", "--support", "x.json"], "--support needs every trial"),
        (["--device", "null", "--quick", "--support", "x.json"], "drop --quick"),
        (["--device", "null", "--family", "llama", "--support", "x.json"], "drop --family"),
        (["--device", "null", "--json", "."], "cannot be written"),
    ],
)
def test_what_cannot_run_is_two_with_the_reason(
    words: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["conformance", *words]) == 2
    assert says in capsys.readouterr().err


def test_a_quick_run_takes_some_of_each_check_and_vouches_for_nothing(
    checks: Callable[..., None], home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checks(*[nothing] * 10)
    assert conformance("--quick", "--json", str(tmp_path / "r.json")) == 0
    assert "null (emulated), some trials of each check: " in capsys.readouterr().out
    found = report.read(tmp_path / "r.json")
    assert found.quick and [result.what for result in found.results] == ["call 0", "call 3", "call 6", "call 9"]
    assert not home.exists()


def test_a_run_of_one_family_takes_its_trials_alone_and_is_kept_beside_the_table(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trials = [Trial(name, nothing, (name,)) for name in ("family/a", "family/b", "bits/a", "graphs")]
    one = Check("probe", "probe.pure", "dummy", lambda subject: iter(trials))
    monkeypatch.setattr(kit, "checks", lambda wanted: [one])
    assert conformance("--family", "a", "--json", str(tmp_path / "r.json")) == 0
    assert [result.what for result in report.read(tmp_path / "r.json").results] == ["family/a", "bits/a"]
    assert [each.name for each in home.iterdir()] == ["null.a.json"]
    assert support.read(home / "null.a.json").supported == {"family/a", "bits/a"}
    assert conformance("--family", "c") == 2


def test_unsupported_trials_are_listed_by_reason(
    checks: Callable[..., None], home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def lacking() -> None:
        raise NotSupported("no sleep: Capabilities.sleep is False")

    def refused() -> None:
        raise NotSupported("no slopes", "Platform.mixer")

    checks(lacking, nothing, lacking, refused)
    assert conformance() == 0
    out = capsys.readouterr().out
    assert "     2  probe.pure: no sleep: Capabilities.sleep is False\n" in out
    assert "     1  probe.pure: no slopes (Platform.mixer)\n" in out


def test_a_quick_run_leaves_out_no_check() -> None:
    """And so no clause that the kit proves."""
    subject = Subject("cpu")
    assert all(kit.TrialSelection(quick=True).of(each.trials(subject)) for each in kit.checks())


def test_on_a_terminal_the_trial_of_the_moment_is_shown(
    checks: Callable[..., None], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    checks(nothing, breaks)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert conformance() == 1
    shown = capsys.readouterr().err
    assert "\rprobe         0 trials, now dummy: call 0\x1b[K" in shown
    assert "\rprobe         1 trials, now dummy: call 1\x1b[K" in shown
    assert shown.index("came   wanted 1, got 2") < shown.rindex("probe         1 passed, 1 failed")


DIES = """
import os, signal
from quintet.cli.commands._crash_reporter import CrashReporter
with CrashReporter() as witness:
    witness.set_line("it died in the first\\ntrial")
    witness.set_line("it died in the second trial")
    {end}
"""


@pytest.mark.parametrize(
    ("end", "said"),
    [
        ("os.kill(os.getpid(), signal.SIGSEGV)", "it died in the second trial\n"),
        ("os.kill(os.getpid(), signal.SIGKILL)", "it died in the second trial\n"),
        ("os._exit(3)", "it died in the second trial\n"),
        ("pass", ""),
    ],
)
def test_a_process_that_dies_is_survived_by_the_name_of_its_trial(end: str, said: str) -> None:
    """Standard error ends when the last who holds it has: the witness has spoken by then."""
    done = subprocess.run([sys.executable, "-c", DIES.format(end=end)], capture_output=True, text=True)
    assert done.stderr == said and bool(done.returncode) == bool(said)


def test_the_command_names_the_trial_that_it_died_in(
    checks: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    monkeypatch.setattr(CrashReporter, "set_line", lambda self, line: told.append(line))
    checks(nothing, nothing)
    assert conformance() == 0
    names = [f"quintet conformance: the process died in section probe, trial dummy: call {i}" for i in range(2)]
    assert told == [*names, ""], "and of a run that ended nothing is said"


def test_the_list_names_every_clause(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["conformance", "--list"]) == 0
    said = capsys.readouterr().out
    assert all(section in said for section in kit.section_names())
    assert "  memory.limit " in said and "remedy" in said


def test_platforms_shows_what_was_proven_here(checks: Callable[..., None], capsys: pytest.CaptureFixture[str]) -> None:
    checks(nothing)
    assert conformance() == 0
    capsys.readouterr()
    assert cli.main(["platforms", "--features"]) == 0
    said = capsys.readouterr().out
    assert "null: 1 supported, 0 unsupported" in said and "of this machine" in said
    assert cli.main(["platforms", "--features", "--json"]) == 0
    plain = json.loads(capsys.readouterr().out)
    assert plain["features"]["graphs"]["null"] == {"state": "supported", "reason": ""}
    assert "not available here" in plain["reports"]["rocm"]


# ------------------------------------------------------------------------------------------------ at start-up

FACTS = Capabilities(1, (torch.float32,), auto_select=False, detail="does no arithmetic")
CHOSEN = SelectedPlatform(NULL, FACTS, "a test")
TABLE = Support(
    "null", "quintet", "0.1.0", "0.1.0", CONTRACT_VERSION, FACTS.detail, True, "2026-01-02",
    frozenset({"family/llama"}), {"kv/int8": "no such kernel"},
)  # fmt: skip


def test_the_table_of_this_machine_comes_before_the_packages(home: Path) -> None:
    assert support.support_evidence(CHOSEN).support is None
    TABLE.write(home / "null.json")
    assert support.support_evidence(CHOSEN) == Evidence(TABLE, "of this machine, 2026-01-02")
    elsewhere = SelectedPlatform(NULL, replace(FACTS, detail="another processor"), "a test")
    assert support.support_evidence(elsewhere).support is None
    newer = replace(CHOSEN, source="acme", version="2.0")
    assert support.support_evidence(newer).support is None, "it was found with another version of the package"


def test_a_package_brings_its_table_and_an_emulation_does_not_speak_for_a_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = tmp_path / "vendor.py"
    TABLE.write(tmp_path / support.SUPPORT_FILE)
    monkeypatch.setattr(support.sys.modules[NULL.__module__], "__file__", str(module))
    shipped = support.support_evidence(CHOSEN)
    assert shipped.support == TABLE and "shipped with the package" in shipped.origin
    real = SelectedPlatform(NULL, replace(FACTS, auto_select=True), "a test")
    assert support.support_evidence(real).support is None and "emulation" in support.support_evidence(real).origin


@pytest.mark.parametrize(
    ("own", "shipped", "speaks"),
    [
        ("2026-01-02", "2026-01-03T00:00:00+00:00", "shipped"),
        ("2026-01-03T00:00:01+00:00", "2026-01-03", "own"),
        ("2026-01-03T01:00:00+02:00", "2026-01-03T00:00:00+00:00", "shipped"),  # an hour before, whatever its letters
    ],
)
def test_of_two_tables_the_newer_speaks(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own: str, shipped: str, speaks: str
) -> None:
    """One that the kit left here before an upgrade does not hide what the new package brings."""
    tables = {"own": replace(TABLE, date=own), "shipped": replace(TABLE, date=shipped, supported=frozenset({"graphs"}))}
    tables["own"].write(home / "null.json")
    tables["shipped"].write(tmp_path / support.SUPPORT_FILE)
    monkeypatch.setattr(support.sys.modules[NULL.__module__], "__file__", str(tmp_path / "vendor.py"))
    assert support.support_evidence(CHOSEN).support == tables[speaks]
    real = SelectedPlatform(
        NULL, replace(FACTS, auto_select=True), "a test"
    )  # of which an emulation says nothing, how new it is
    assert support.support_evidence(real).support == tables["own"]


def test_a_family_that_was_tried_alone_adds_to_the_other_table(home: Path) -> None:
    alone = replace(TABLE, supported=frozenset({"family/x", "kv/int8"}), unsupported={"bits/x": "they sway"})
    alone.write(support.local_table_path("null", "x"))
    replace(alone, detail="another processor").write(support.local_table_path("null", "y"))
    only = support.support_evidence(CHOSEN)
    assert only.support == alone and only.origin.startswith("families that were tried alone; of all else, no report")
    TABLE.write(home / "null.json")
    both = support.support_evidence(CHOSEN)
    assert both.support is not None and both.origin == "of this machine, 2026-01-02"
    assert both.support.supported == {"family/llama", "family/x"}
    assert both.support.unsupported == {"kv/int8": "no such kernel", "bits/x": "they sway"}


def test_the_table_of_a_family_stays_in_its_folder() -> None:
    assert support.local_table_path("null", "../x").parent == support.local_table_path("null").parent


def test_doubts_name_what_is_unverified_and_give_reasons() -> None:
    known = Evidence(TABLE, "a test")
    assert known.unproven_features("null", ["family/llama"]) == ""
    assert known.unproven_features("null", ["family/llama", "scheme/int4", "kv/int8"]) == (
        "unsupported on null: kv/int8: no such kernel; unverified on null: scheme/int4; "
        "run `quintet conformance --device null`"
    )
    assert known.unproven_features("null", ["family/x"]).endswith("run `quintet conformance --device null --family x`")
    assert known.unproven_features("null", ["backend/x", "dtype/y"]) == (
        "unverified on null: backend/x, dtype/y; run `quintet conformance --device null`; "
        "`quintet try MODEL` compares a small copy with transformers"
    )
    assert known.unproven_features("null", ["backend/x"]) == (
        "unverified on null: backend/x; `quintet try MODEL` compares a small copy with transformers"
    )


@pytest.mark.parametrize(
    "text",
    [
        *("{", "[]", "{}", '{"format": 9}'),
        *(TABLE.text().replace(*words) for words in (('"date"', '"dat"'), ('"null"', "1"), ("2026-01-02", "lately"))),
    ],
)
def test_a_broken_table_costs_a_line_and_no_engine(home: Path, text: str, caplog: pytest.LogCaptureFixture) -> None:
    home.mkdir(parents=True)
    (home / "null.json").write_text(text)
    assert support.support_evidence(CHOSEN).support is None
    assert "null.json is no table of support" in caplog.text


def doubts(device: str) -> str:
    """Of the bundled model, when it starts there."""
    prepared = prepare(EngineConfig(device=device, max_model_len=64, num_pages=16))
    prepared.ranks.close()
    return prepared.unproven_features


def test_an_engine_that_starts_says_what_nobody_proved(home: Path) -> None:
    assert doubts("null").startswith("unverified on null: family/llama, dtype/bfloat16; run `quintet conformance")
    proven = frozenset({"family/llama", "dtype/bfloat16"})
    replace(TABLE, detail=NULL.probe().detail, supported=proven).write(home / "null.json")
    assert doubts("null") == ""


def test_what_the_shipped_reports_prove_starts_in_silence() -> None:
    assert doubts("cpu") == ""
