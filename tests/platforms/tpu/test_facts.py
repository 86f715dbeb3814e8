"""What the platform says of its devices, without starting anybody's runtime."""

import subprocess
import sys
from pathlib import Path

import pytest

from quintet.common.distribution import install_hint
from quintet.config import EngineConfig
from quintet.interface.platform import Capabilities, Unavailable
from quintet.platforms import choose
from quintet.platforms.tpu import PLATFORM, facts
from quintet.platforms.tpu.facts import TPUFacts
from tests.helpers.platforms.tpu import needs_jax


def bus(folder: Path, *ids: tuple[str, str]) -> Path:
    """A PCI bus with these (vendor, device) pairs."""
    for number, (vendor, device) in enumerate(ids):
        slot = folder / f"0000:00:{number:02x}.0"
        slot.mkdir()
        (slot / "vendor").write_text(vendor + "\n")
        (slot / "device").write_text(device + "\n")
    return folder


def test_chips_are_read_from_the_bus(tmp_path: Path) -> None:
    pci = bus(tmp_path, ("0x1ae0", "0x0063"), ("0x8086", "0x0063"), ("0x1ae0", "0x0063"), ("0x1ae0", "0xabcd"))
    assert facts.chips(pci) == ["TPU v5e", "TPU v5e"]


@pytest.fixture
def everything(monkeypatch: pytest.MonkeyPatch) -> None:
    """All packages are there, and JAX may open what it likes."""
    monkeypatch.setattr(facts.importlib.util, "find_spec", lambda name: name)  # type: ignore[attr-defined]
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)


def test_a_machine_with_chips_has_as_many_devices(tmp_path: Path, everything: None) -> None:
    found = facts.facts(bus(tmp_path, *[("0x1ae0", "0x006f")] * 4))
    assert isinstance(found, TPUFacts)
    assert (found.chips, found.devices) == (4, 4) and found.detail.startswith("TPU v6e; jax ")


def test_chips_without_their_runtime_say_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(facts.importlib.util, "find_spec", lambda name: None if name == "libtpu" else name)  # type: ignore[attr-defined]
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    found = facts.facts(bus(tmp_path, ("0x1ae0", "0x0062")))
    assert str(found) == "1 x TPU v5p here, but libtpu is not installed; pip install 'jax[tpu]'"


def test_without_jax_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(facts.importlib.util, "find_spec", lambda name: None)  # type: ignore[attr-defined]
    assert facts.facts() == Unavailable("jax and torchax not installed", install_hint("tpu"))


def test_hidden_chips_leave_the_processor(tmp_path: Path, everything: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.setenv("XLA_FLAGS", "--xla_foo=1 --xla_force_host_platform_device_count=3")
    found = facts.facts(bus(tmp_path, ("0x1ae0", "0x0062")))
    assert isinstance(found, TPUFacts) and (found.chips, found.devices) == (0, 3)


@needs_jax
def test_stand_ins_are_chosen_by_name_alone() -> None:
    probed = PLATFORM.probe()
    assert isinstance(probed, Capabilities) and not probed.auto_select and "stand in" in probed.detail
    assert choose("auto").platform is not PLATFORM
    assert choose("tpu").platform is PLATFORM


@pytest.mark.slow
def test_discovery_loads_no_jax() -> None:
    code = (
        "import sys; from quintet.platforms import discover; discover(); print({'jax', 'torchax'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


@needs_jax
def test_more_devices_than_there_are_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=2")
    with pytest.raises(ValueError, match="tensor_parallel_size 3 needs as many devices, 2 here; XLA_FLAGS="):
        PLATFORM.configure(EngineConfig(tensor_parallel_size=3))


@needs_jax
def test_what_was_left_open_is_settled_with_reasons() -> None:
    config, reasons = PLATFORM.configure(EngineConfig(enforce_eager=True))
    assert 0 < (config.kv_cache_memory_bytes or 0) <= 2**29 and config.compilation_cache_dir.endswith("quintet/xla")
    assert [reason.split("=")[0].split(":")[0] for reason in reasons] == [
        "enforce_eager",
        "compilation_cache_dir",
        "kv_cache_memory_bytes",
    ]
    settled, _ = PLATFORM.configure(EngineConfig(num_pages=8, compilation_cache_dir="none"))
    assert settled == EngineConfig(num_pages=8, compilation_cache_dir="none")
