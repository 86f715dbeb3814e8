"""Discovery, choice, and the contract's own defences."""

from importlib import import_module
from importlib.metadata import EntryPoint
from typing import Any

import pytest
import torch
from torch import Tensor

from quintet import platforms
from quintet.common.distribution import install_hint
from quintet.config import EngineConfig
from quintet.interface.platform import CONTRACT_VERSION, Capabilities, Platform, Unavailable
from quintet.ops import Op, bind
from quintet.platforms import UnavailableError, choose, discover
from quintet.platforms.null import PLATFORM as NULL


class Acme(NULL):  # type: ignore[misc, valid-type]
    """A vendor's platform, for these tests."""

    name = "acme"
    contract = CONTRACT_VERSION

    @classmethod
    def probe(cls) -> Capabilities | Unavailable:
        return Capabilities(devices=1, dtypes=(torch.float32,))


class Broken(Acme):
    """One whose probe raises."""

    @classmethod
    def probe(cls) -> Capabilities | Unavailable:
        raise OSError("driver 3 is too old")


def plug(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    point = EntryPoint(name, value, platforms.GROUP)
    monkeypatch.setattr(platforms, "entry_points", lambda group: [point])


def test_the_built_in_names_are_all_listed() -> None:
    assert [found.name for found in discover()][-6:] == list(platforms.BUILT_IN)


def test_auto_takes_the_first_available_and_says_what_it_passed_over() -> None:
    chosen = choose("auto")
    assert chosen.platform.name != "null"
    assert all(f.name in chosen.reason for f in discover() if not f.available and f.name != chosen.platform.name)


def test_one_that_is_not_available_says_why_and_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    plug(monkeypatch, "acme", f"{__name__}:Broken")
    with pytest.raises(UnavailableError, match="'acme' is not available: its probe failed, OSError: driver 3"):
        choose("acme")


def test_an_unknown_device_names_the_nearest() -> None:
    with pytest.raises(UnavailableError, match="did you mean 'cuda'"):
        choose("cuba")


def test_one_that_is_asked_for_by_name_is_the_only_one_that_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    plug(monkeypatch, "acme", "quintet.not_there:Acme")  # to import it would fail
    probed: list[str] = []
    probe = platforms._probe

    def noted(found: platforms.PlatformCandidate) -> platforms.PlatformCandidate:
        probed.append(found.name)
        return probe(found)

    monkeypatch.setattr(platforms, "_probe", noted)
    assert choose("null").platform.name == "null"
    assert probed == ["null"]


def test_a_stand_in_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    plug(monkeypatch, "acme", f"{__name__}:Acme")
    monkeypatch.setattr(Acme, "probe", classmethod(lambda cls: Capabilities(1, (torch.float32,), auto_select=False)))
    assert choose("auto").platform is not Acme
    assert choose("acme").platform is Acme


def test_an_installed_platform_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    plug(monkeypatch, "acme", f"{__name__}:Acme")
    assert choose("auto").platform is Acme
    assert choose("acme").reason == "asked for by name"


@pytest.mark.parametrize(
    ("value", "why"), [("no_such_module:X", "ModuleNotFoundError"), ("json:loads", "not a subclass"), ("json:X", "X")]
)
def test_a_package_that_cannot_be_loaded_takes_nobody_down(
    monkeypatch: pytest.MonkeyPatch, value: str, why: str
) -> None:
    plug(monkeypatch, "acme", value)
    found = {each.name: each for each in discover()}
    assert not found["acme"].available and why in str(found["acme"].result)
    assert choose("auto").platform.name != "acme"


def test_a_built_in_that_cannot_be_imported_takes_nobody_down(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str) -> Any:
        if name.endswith(".null"):
            raise ImportError("libnull.so is missing")
        return import_module(name)

    monkeypatch.setattr(platforms.importlib, "import_module", refuse)
    found = {each.name: each for each in discover()}
    assert str(found["null"].result) == f"ImportError: libnull.so is missing; {install_hint('null')}"
    assert choose("auto").platform.name != "null"


def test_a_hook_that_nothing_calls_is_refused() -> None:
    with pytest.raises(TypeError, match="supports_v1 is not in the Platform contract"):
        type("Bad", (Platform,), {"supports_v1": lambda self: True})


def test_a_method_with_other_parameters_is_refused() -> None:
    with pytest.raises(TypeError, match="open takes .*; the Platform contract says"):
        type("Bad", (Platform,), {"open": lambda self, rank, flags: None})
    with pytest.raises(TypeError, match="probe takes"):
        type("Bad", (Platform,), {"probe": classmethod(lambda cls, verbose: None)})


def test_a_platform_must_have_every_method() -> None:
    with pytest.raises(TypeError, match="abstract"):
        type("Half", (Platform,), {"name": "half"})()


@pytest.fixture
def op() -> Any:
    def twice(x: Tensor) -> Tensor:
        return x * 2

    made = Op(twice)
    yield made
    del Op.registry["twice"]


def test_a_provider_with_another_signature_is_refused(op: Op) -> None:
    with pytest.raises(TypeError, match=r"provider 'bad' takes \['x', 'y'\]"):
        op.provide("bad")(lambda x, y: x)


def test_a_providers_name_is_one_modules(op: Op) -> None:
    """Whoever is loaded last would win otherwise, and one platform serve another's function."""

    def other(x: Tensor) -> Tensor:
        return x + x

    op.provide("fast")(lambda x: x + x)
    with pytest.raises(ValueError, match="provider 'fast' is .*test_choice's; choose another name"):
        op.provide("fast")(other)


def test_an_op_is_defined_once(op: Op) -> None:
    with pytest.raises(ValueError, match="twice is defined twice"):
        Op(op.reference)


def test_bind_takes_the_first_that_probes_well_and_tells_of_the_others(op: Op) -> None:
    op.provide("fast", probe=lambda: "needs a newer chip")(lambda x: x + x)
    op.provide("good")(lambda x: x + x)
    ops = bind({"twice": ("absent", "fast", "good")})
    choice = next(c for c in ops.choices if c.op == "twice")
    assert choice.provider == "good"
    assert choice.rejected == (("absent", "not registered"), ("fast", "needs a newer chip"))
    assert ops.twice is op.providers["good"]


def test_an_op_is_probed_when_somebody_first_asks_for_it_and_once(op: Op) -> None:
    probed = []
    op.provide("good", probe=lambda: probed.append(1))(lambda x: x + x)  # type: ignore[func-returns-value]
    ops = bind({"twice": ("good",)})
    assert not probed and not ops.bound
    assert ops.take("twice") is ops and [each.op for each in ops.bound] == ["twice"]
    assert ops.twice is ops.twice is op.providers["good"] and len(ops.choices) > 20 and len(probed) == 1


def test_bind_falls_back_to_the_specification_and_refuses_unknown_ops(op: Op) -> None:
    ops = bind({"twice": ("absent",)})
    assert ops.twice is op.reference
    with pytest.raises(ValueError, match="no_such_op"):
        bind({"no_such_op": ("fast",)})
    with pytest.raises(AttributeError, match="no op 'thrice'"):
        ops.thrice  # noqa: B018


def test_a_provider_that_was_asked_for_serves_or_every_reason_is_given(op: Op) -> None:
    op.provide("fast", probe=lambda: "needs a newer chip")(lambda x: x + x)
    op.provide("good")(lambda x: x + x)
    order = {"twice": ("fast", "good")}
    for name in ("good", "reference"):
        assert bind(order, {"twice": name}).choice("twice").provider == name
    there = r"there are fast \(needs a newer chip\), good \(serves\), reference \(serves\)"
    for name in ("fast", "flash_attn"):
        with pytest.raises(ValueError, match=f"'{name}' was asked for, and does not serve twice .*; {there}"):
            bind(order, {"twice": name})
    with pytest.raises(ValueError, match="has one way to serve twice; leave it out"):
        bind({}, {"twice": "reference"})


def test_two_bindings_do_not_disturb_each_other(op: Op) -> None:
    op.provide("good")(lambda x: x + x)
    first, second = bind({"twice": ("good",)}), bind({})
    assert first.twice is not second.twice
    assert torch.equal(first.twice(torch.ones(2)), second.twice(torch.ones(2)))


# ------------------------------------------------------------------------------------------- ops by a weight's form


@pytest.fixture
def formed() -> Any:
    def doubled(x: Tensor) -> Tensor:
        return x * 2

    made = Op.of_kinds("int8", "int4")(doubled)
    yield made
    for name in ("doubled", "doubled:int8", "doubled:int4"):
        del Op.registry[name]


def test_a_form_has_providers_of_its_own(formed: Op) -> None:
    formed.provide("fast")(lambda x: x + x)
    quick = formed.provide("quick", kinds=("int8",))(lambda x: x + x)
    ops = bind({"doubled": ("quick", "fast")})
    assert ops.doubled is formed.providers["fast"]
    assert getattr(ops.take("doubled:int8"), "doubled:int8") is quick
    assert getattr(ops, "doubled:int4") is formed.reference
    said = {each.op: (each.provider, each.rejected) for each in ops.bound}
    assert said["doubled:int8"] == ("quick", ())
    assert said["doubled:int4"] == ("reference", (("quick", "not registered"), ("fast", "not registered")))


def test_a_form_may_have_an_order_of_its_own(formed: Op) -> None:
    for name in ("one", "other"):
        formed.provide(name, kinds=("int8", "int4"))(formed.reference)
    ops = bind({"doubled": ("one",), "doubled:int4": ("other", "one")})
    assert ops.choice("doubled:int8").provider == "one" and ops.choice("doubled:int4").provider == "other"


def test_a_provider_for_a_form_that_is_not_there_is_refused(formed: Op) -> None:
    with pytest.raises(ValueError, match=r"doubled has no kinds \['int3'\]; it has int8, int4"):
        formed.provide("fast", kinds=("int8", "int3"))
    assert "fast" not in formed.kinds["int8"].providers


def test_the_null_platform_has_one_device() -> None:
    """As its probe says: the kit's trial `more devices than there are`."""
    with pytest.raises(ValueError, match="tensor_parallel_size must be 1 on this platform: it has one device"):
        NULL.configure(EngineConfig(tensor_parallel_size=2))
