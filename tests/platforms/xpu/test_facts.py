"""What the XPU platform says of a machine: its devices, or every reason why there are none, each with what helps."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from quintet.config import Environment
from quintet.interface.platform import Capabilities, Unavailable
from quintet.platforms.gpu.facts import GPUFacts
from quintet.platforms.xpu import PLATFORM, facts
from quintet.platforms.xpu.facts import XpuMachine

BATTLEMAGE, ALCHEMIST, LUNAR, METEOR, TIGER, MAX = 0xE20B, 0x56A0, 0x64A0, 0x7D55, 0x9A49, 0x0BD5


def device(
    folder: Path, slot: str, number: int, tiles: int = 0, node: int | None = 128, vendor: str = "0x8086"
) -> None:
    """One GPU as the kernel shows it under /sys, and its node under /dev."""
    pci = folder / "sys" / "bus" / "pci" / "devices" / slot
    pci.mkdir(parents=True)
    (pci / "vendor").write_text(f"{vendor}\n")
    (pci / "device").write_text(f"0x{number:04x}\n")
    (pci / "class").write_text("0x030000\n")
    for tile in range(tiles):
        (pci / f"tile{tile}").mkdir()
    if node is not None:
        drm = folder / "sys" / "class" / "drm" / f"renderD{node}"
        drm.mkdir(parents=True)
        (drm / "device").symlink_to(pci)
        (folder / "dev" / "dri").mkdir(parents=True, exist_ok=True)
        (folder / "dev" / "dri" / f"renderD{node}").touch()


def machine(folder: Path, **changes: Any) -> XpuMachine:
    environment = Environment(**{name: changes.pop(name) for name in list(changes) if name.startswith("ze_")})
    settings: dict[str, Any] = {
        "torch_xpu": "20260000", "torch_version": "2.13.0+xpu", "triton": lambda: None, "loads": lambda library: True,
        "opens": lambda node: True, "is_installed": lambda name: False, "environment": lambda: environment,
        "sys": folder / "sys", "dev": folder / "dev",
    }  # fmt: skip
    return XpuMachine(**{**settings, **changes})


def found(folder: Path, **changes: Any) -> GPUFacts:
    result = facts.facts(machine(folder, **changes))
    assert isinstance(result, GPUFacts), result
    return result


def reason(folder: Path, **changes: Any) -> Unavailable:
    result = facts.facts(machine(folder, **changes))
    assert isinstance(result, Unavailable)
    return result


def test_a_gpu_is_named_by_its_family_and_number(tmp_path: Path) -> None:
    device(tmp_path, "0000:03:00.0", BATTLEMAGE)
    got = found(tmp_path)
    assert got.names == ("Intel Arc B (Battlemage) [e20b]",) and got.fp8 is None
    assert got.dtypes == (torch.bfloat16, torch.float16, torch.float32)
    assert got.detail == "Intel Arc B (Battlemage) [e20b]; torch 2.13.0+xpu"


def test_without_matrix_units_float16_is_the_better_half(tmp_path: Path) -> None:
    device(tmp_path, "0000:00:02.0", METEOR)
    assert found(tmp_path).dtypes == (torch.float16, torch.bfloat16, torch.float32)


def test_a_gpu_in_the_processor_does_not_count_beside_one_by_itself(tmp_path: Path) -> None:
    device(tmp_path, "0000:00:02.0", LUNAR, node=128)
    assert found(tmp_path).names == ("Intel Lunar Lake [64a0]",)
    device(tmp_path, "0000:03:00.0", ALCHEMIST, node=129)
    device(tmp_path, "0000:04:00.0", 0x2684, node=130, vendor="0x10de")
    assert found(tmp_path).names == ("Intel Arc A or Flex [56a0]",)
    # Level Zero counts those by themselves first
    assert found(tmp_path, ze_affinity_mask="1").names == ("Intel Lunar Lake [64a0]",)


def test_a_tile_is_a_device_unless_tiles_are_asked_for_as_one(tmp_path: Path) -> None:
    device(tmp_path, "0000:29:00.0", MAX, tiles=2)
    assert len(found(tmp_path).names) == 2
    assert len(found(tmp_path, ze_flat_device_hierarchy="COMPOSITE").names) == 1
    assert len(found(tmp_path, ze_affinity_mask="1").names) == 1
    assert len(found(tmp_path, ze_affinity_mask="0.0,0.1").names) == 2, "sub-devices are Level Zero's to read"


def test_i915_shows_tiles_of_a_max_gpu_as_groups_of_engines(tmp_path: Path) -> None:
    device(tmp_path, "0000:29:00.0", MAX)
    device(tmp_path, "0000:3a:00.0", ALCHEMIST, node=129)
    for slot in ("0000:29:00.0", "0000:3a:00.0"):
        for group in range(2):
            (tmp_path / f"sys/bus/pci/devices/{slot}/drm/card0/gt/gt{group}").mkdir(parents=True)
    assert found(tmp_path).names == (*["Intel Data Center GPU Max [0bd5]"] * 2, "Intel Arc A or Flex [56a0]")


def test_hidden_devices_do_not_count(tmp_path: Path) -> None:
    device(tmp_path, "0000:03:00.0", ALCHEMIST)
    assert str(reason(tmp_path, ze_affinity_mask="3")) == (
        "Intel Arc A or Flex [56a0] here, hidden by ZE_AFFINITY_MASK; unset ZE_AFFINITY_MASK"
    )


def test_no_gpu(tmp_path: Path) -> None:
    assert str(reason(tmp_path)) == "no Intel GPU here; use another device"


def test_a_gpu_without_a_kernel_driver(tmp_path: Path) -> None:
    device(tmp_path, "0000:03:00.0", BATTLEMAGE, node=None)
    assert str(reason(tmp_path)) == "an Intel GPU is here, and no driver (i915 or xe) has it; install a newer kernel"


def test_a_gpu_too_old_for_torch(tmp_path: Path) -> None:
    device(tmp_path, "0000:00:02.0", TIGER)
    assert str(reason(tmp_path)) == "9a49 is an Intel GPU that torch has no kernels for; use another device"
    device(tmp_path, "0000:03:00.0", BATTLEMAGE, node=129)
    assert found(tmp_path).names == ("Intel Arc B (Battlemage) [e20b]",), "another's age does not matter"


def test_a_gpu_of_tomorrow_is_tried(tmp_path: Path) -> None:
    device(tmp_path, "0000:03:00.0", 0xD740)
    assert found(tmp_path).names == ("Intel GPU of a family unknown here [d740]",)
    assert "not sound" in str(facts.ungraphed(found(tmp_path).names, "2.11.0"))


def test_a_container_without_the_node(tmp_path: Path) -> None:
    device(tmp_path, "0000:03:00.0", BATTLEMAGE)
    (tmp_path / "dev" / "dri" / "renderD128").unlink()
    got = reason(tmp_path)
    assert got.reason.endswith("dri/renderD128 is not there") and "--device /dev/dri" in got.remedy


def test_a_container_has_the_devices_that_it_was_given(tmp_path: Path) -> None:
    device(tmp_path, "0000:03:00.0", BATTLEMAGE)
    device(tmp_path, "0000:04:00.0", BATTLEMAGE, node=129)
    (tmp_path / "dev" / "dri" / "renderD128").unlink()
    assert found(tmp_path).names == ("Intel Arc B (Battlemage) [e20b]",)


def test_a_node_that_may_not_be_opened(tmp_path: Path) -> None:
    device(tmp_path, "0000:03:00.0", BATTLEMAGE)
    got = reason(tmp_path, opens=lambda node: False)
    assert "no permission to open" in got.reason and "renderD128" in got.reason and "group render" in got.remedy


def test_all_reasons_are_told_at_once(tmp_path: Path) -> None:
    device(tmp_path, "0000:03:00.0", BATTLEMAGE)
    got = reason(
        tmp_path, opens=lambda node: False, loads=lambda library: False, torch_xpu=None, torch_version="2.13.0+cpu",
        triton=lambda: "triton is not installed",
    )  # fmt: skip
    assert [each.split(" /")[0] for each in got.reason.split("; ")] == [
        "no permission to open",
        "Level Zero's loader (libze_loader.so.1) is missing",
        "Intel's driver (libze_intel_gpu.so.1) is missing",
        "torch 2.13.0+cpu was built without XPU",
        "triton is not installed",
    ]
    assert [step.split()[0] for step in got.remedy.split("; ")] == ["join", "install", "install", "pip", "pip"]
    assert "triton-xpu" in got.remedy


def test_triton_of_another_vendor_does_not_serve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "triton"
    (package / "backends" / "nvidia").mkdir(parents=True)
    (package / "__init__.py").write_text("raise AssertionError('imported')")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "triton", raising=False)
    assert facts.triton() == "triton is installed without Intel's backend"
    (package / "backends" / "intel").mkdir()
    assert facts.triton() is None


def test_a_library_is_found_by_the_linker_or_not() -> None:
    assert facts.loads("libc.so.6") and not facts.loads("libquintet_of_nowhere.so.1")


def test_intels_extension_is_said_to_be_unused(tmp_path: Path) -> None:
    device(tmp_path, "0000:03:00.0", ALCHEMIST)
    asked: list[str] = []
    got = found(tmp_path, is_installed=lambda name: not asked.append(name))
    assert got.detail.endswith("intel-extension-for-pytorch is not used: it ended with torch 2.8")
    assert asked == ["intel_extension_for_pytorch"] and asked[0] not in sys.modules


@pytest.mark.parametrize(
    ("number", "version", "captured"),
    [
        (BATTLEMAGE, "2.11.0+xpu", True),
        (BATTLEMAGE, "2.12.1+xpu", True),
        (BATTLEMAGE, "2.13.0+xpu", False),
        (LUNAR, "2.14.0.dev20260811+xpu", False),
        (ALCHEMIST, "2.13.0+xpu", True),
        (MAX, "2.14.0+xpu", True),
    ],
)
def test_graphs_are_trusted_by_version_and_family(tmp_path: Path, number: int, version: str, captured: bool) -> None:
    device(tmp_path, "0000:03:00.0", number)
    why = facts.ungraphed(found(tmp_path).names, version)
    assert why is None if captured else "#187277" in str(why)


@pytest.mark.slow
def test_discovery_makes_no_context_and_loads_no_triton() -> None:
    code = (
        "import sys, torch; from quintet.platforms import discover; discover();"
        "print(torch.xpu.is_initialized(), 'triton' in sys.modules, 'intel_extension_for_pytorch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False False False\n"


def test_capabilities_are_the_facts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device(tmp_path, "0000:03:00.0", ALCHEMIST)
    result = found(tmp_path)
    monkeypatch.setattr(facts, "facts", lambda: result)
    probed = PLATFORM.probe()
    assert isinstance(probed, Capabilities)
    assert (probed.devices, probed.overlap, probed.static_shapes, probed.fp8) == (1, True, False, None)
    assert "Arc A" in probed.detail and "unverified" in probed.detail


@pytest.mark.skipif(torch.xpu.is_available(), reason="there is a GPU")
def test_on_this_machine_it_says_why_not() -> None:
    probed = PLATFORM.probe()
    assert isinstance(probed, Unavailable) and len(probed.reason) > 10 and probed.remedy
