"""What the ROCm platform says of a machine: its devices, or every reason why there are none, each with what helps."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from quintet.config import EngineConfig, Environment, read_environment
from quintet.interface.platform import Capabilities, Unavailable
from quintet.platforms import UnavailableError, choose
from quintet.platforms.gpu.facts import GPUFacts
from quintet.platforms.gpu.platform import UNVERIFIED
from quintet.platforms.rocm import PLATFORM, facts
from quintet.platforms.rocm.facts import RocmMachine

GIB = 2**30
MI300 = ("AMD Instinct MI300X", 90402, 192 * GIB)
MI250 = ("AMD Instinct MI250X", 90010, 64 * GIB)
MI350 = ("AMD Instinct MI350X", 90500, 288 * GIB)
RX7900 = ("", 110000, 24 * GIB)
RX9070 = ("AMD Radeon RX 9070 XT", 120001, 16 * GIB)
IGPU = ("", 100306, 2 * GIB)


class Disk:
    """A made-up /sys and /dev, as the kernel's driver amdgpu fills them."""

    def __init__(self, root: Path, *cards: Any) -> None:
        self.sys, self.dev, self._root = root / "sys", root / "dev", root
        self._node("0", {"cpu_cores_count": 64, "simd_count": 0, "gfx_target_version": 0})
        self.dev.mkdir(parents=True, exist_ok=True)
        for place, (name, version, memory) in enumerate(cards):
            self._card(place, name, version, memory)
        if cards:
            self._write(self.dev / "kfd", "")

    def _card(self, place: int, name: str, version: int, memory: int) -> None:
        minor = 128 + place
        said = {"simd_count": 304, "gfx_target_version": version, "drm_render_minor": minor, "unique_id": 171 + place}
        self._node(str(place + 1), said)
        bank = self.nodes / str(place + 1) / "mem_banks" / "0" / "properties"
        self._write(bank, f"heap_type 1\nsize_in_bytes {memory}\nflags 0\n")
        self._write(self.sys / "class" / "drm" / f"renderD{minor}" / "device" / "product_name", f"{name}\n")
        self._write(self.dev / "dri" / f"renderD{minor}", "")

    @property
    def nodes(self) -> Path:
        return self.sys / "class" / "kfd" / "kfd" / "topology" / "nodes"

    def _node(self, name: str, said: dict[str, int]) -> None:
        self._write(self.nodes / name / "properties", "".join(f"{key} {value}\n" for key, value in said.items()))

    def _write(self, path: Path, text: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def on_the_bus(self, vendor: str, kind: str) -> None:
        device = self.sys / "bus" / "pci" / "devices" / f"0000:00:0{len(list(self.sys.glob('bus/pci/devices/*')))}.0"
        self._write(device / "vendor", f"{vendor}\n")
        self._write(device / "class", f"{kind}\n")


def machine(disk: Disk, **changes: Any) -> RocmMachine:
    missing, visible = changes.pop("missing", ()), changes.pop("visible", {})
    settings: dict[str, Any] = {
        "torch_hip": "7.2.1", "torch_version": "2.13.0+rocm7.2", "is_installed": lambda name: name not in missing,
        "environment": lambda: Environment(**visible), "sys": disk.sys, "dev": disk.dev,
        "compiler": lambda: "/usr/bin/gcc",
    }  # fmt: skip
    return RocmMachine(**{**settings, **changes})


Ask = Callable[..., Any]


@pytest.fixture
def ask(tmp_path: Path) -> Ask:
    """What is said of a machine with these cards."""
    return lambda *cards, **changes: facts.facts(machine(Disk(tmp_path, *cards), **changes))


def found(said: GPUFacts | Unavailable) -> GPUFacts:
    assert isinstance(said, GPUFacts), said
    return said


def reason(said: GPUFacts | Unavailable) -> Unavailable:
    assert isinstance(said, Unavailable)
    return said


@pytest.mark.parametrize(
    ("card", "arch", "fp8"),
    [
        (MI250, "gfx90a", None), (MI300, "gfx942", torch.float8_e4m3fnuz), (MI350, "gfx950", torch.float8_e4m3fn),
        (RX7900, "gfx1100", None), (RX9070, "gfx1201", torch.float8_e4m3fn),
    ],
)  # fmt: skip
def test_the_8_bit_type_follows_from_the_architecture(card: Any, arch: str, fp8: Any, ask: Ask) -> None:
    got = found(ask(card))
    assert got.fp8 == fp8 and arch in got.detail and got.memory == card[2]
    assert got.dtypes == (torch.bfloat16, torch.float16, torch.float32)


def test_without_a_compiler_it_says_how_slowly_it_runs(ask: Ask) -> None:
    assert "no C compiler" in found(ask(MI300, compiler=lambda: None)).warning


def test_the_detail_names_device_memory_and_build(ask: Ask) -> None:
    got = found(ask(MI300, MI300))
    assert got.detail == "AMD Instinct MI300X; 192 GiB, gfx942; torch 2.13.0+rocm7.2 (HIP 7.2.1)"
    assert got.names == ("AMD Instinct MI300X",) * 2


def test_a_card_without_a_product_name_is_called_by_its_architecture(ask: Ask) -> None:
    assert found(ask(RX7900)).names == ("AMD gfx1100",)


def test_unequal_devices_have_what_all_have(ask: Ask) -> None:
    both = found(ask(MI300, MI350))
    assert both.fp8 is None and both.memory == MI300[2] and "gfx942, gfx950" in both.detail


def test_a_hidden_device_does_not_count(ask: Ask) -> None:
    """A processor's own GPU, which no kernel is compiled for, beside a card."""
    assert "AMD gfx1036 is gfx1036, and kernels are compiled for gfx90a, " in reason(ask(IGPU, RX7900)).reason
    for visible in (
        {"rocr_visible_devices": "1"},
        {"hip_visible_devices": "1"},
        {"cuda_visible_devices": "1"},
        {"rocr_visible_devices": "GPU-00000000000000AC"},
        {"rocr_visible_devices": "1,0", "hip_visible_devices": "0"},
        {"hip_visible_devices": "1", "cuda_visible_devices": "0"},
        {"hip_visible_devices": "1,7,0"},
    ):
        assert found(ask(IGPU, RX7900, visible=visible)).names == ("AMD gfx1100",), visible


def test_the_order_is_the_lists(ask: Ask) -> None:
    assert found(ask(MI300, MI250, visible={"hip_visible_devices": "1,0"})).names == (MI250[0], MI300[0])


def test_no_visible_device_says_which_variables(ask: Ask) -> None:
    got = reason(ask(MI300, visible={"hip_visible_devices": "-1"}))
    assert got.reason == "1 x AMD Instinct MI300X here, and no device is visible to this process"
    assert "HIP_VISIBLE_DEVICES" in got.remedy


def test_no_driver_and_no_gpu(tmp_path: Path) -> None:
    nothing = machine(Disk(tmp_path / "disk"), sys=tmp_path, dev=tmp_path)
    assert str(facts.facts(nothing)) == "no AMD GPU driver and no AMD GPU here; use another device"


@pytest.mark.parametrize(
    ("vendor", "kind", "here"),
    [
        ("0x1002", "0x030000", True), ("0x1002", "0x120000", True), ("0x1002", "0x060400", False),
        ("0x10de", "0x030000", False),
    ],
)  # fmt: skip
def test_a_gpu_without_a_driver_differs_from_a_bridge(tmp_path: Path, vendor: str, kind: str, here: bool) -> None:
    disk = Disk(tmp_path / "a")
    disk.on_the_bus(vendor, kind)
    (tmp_path / "sys").mkdir()
    (tmp_path / "sys" / "bus").symlink_to(disk.sys / "bus")
    got = reason(facts.facts(machine(disk, sys=tmp_path / "sys")))
    assert got.reason.startswith("an AMD GPU is here, and no driver" if here else "no AMD GPU driver and no AMD GPU")


def test_a_container_that_was_given_no_devices(tmp_path: Path) -> None:
    disk = Disk(tmp_path, MI300)
    (disk.dev / "kfd").unlink()
    got = reason(facts.facts(machine(disk)))
    assert got.reason == f"1 x AMD Instinct MI300X here, and no {disk.dev}/kfd"
    assert "--device /dev/kfd --device /dev/dri" in got.remedy


def test_a_node_that_the_kernel_hides_is_no_device(tmp_path: Path) -> None:
    """Reading the properties of a GPU that a container was not given fails; the file is there."""
    disk = Disk(tmp_path, MI300, MI300)
    hidden = disk.nodes / "1" / "properties"
    hidden.unlink()
    hidden.mkdir()
    assert len(found(facts.facts(machine(disk))).names) == 1


def test_no_permission_names_every_file_and_the_groups(tmp_path: Path) -> None:
    disk = Disk(tmp_path, MI300, MI300)
    got = reason(facts.facts(machine(disk, usable=lambda path: False)))
    dri = disk.dev / "dri"
    files = f"{disk.dev}/kfd and {dri}/renderD128 and {dri}/renderD129"
    assert got.reason == f"no permission to open {files}"
    assert "render and video" in got.remedy
    one = reason(facts.facts(machine(disk, usable=lambda path: path.name != "renderD129")))
    assert one.reason == f"no permission to open {dri}/renderD129"


def test_a_driver_that_shows_no_gpu(tmp_path: Path) -> None:
    assert "shows no GPU that computes" in reason(facts.facts(machine(Disk(tmp_path)))).reason


def test_all_reasons_are_told_at_once(tmp_path: Path) -> None:
    disk = Disk(tmp_path, IGPU)
    got = reason(
        facts.facts(
            machine(disk, torch_hip=None, torch_version="2.13.0", missing=("triton",), usable=lambda path: False)
        )
    )
    said = got.reason.split("; ")
    assert said[0].startswith("no permission to open") and said[1:3] == [
        "torch 2.13.0 was built without HIP",
        "triton is not installed",
    ]
    assert said[3].startswith("AMD gfx1036 is gfx1036") and len(said) == 4
    remedies = got.remedy.split("; ")
    assert [each.split()[0] for each in remedies] == ["add", "pip", "it", "hide"], "each once, in the reasons' order"


def test_the_environment_is_read_by_its_one_reader() -> None:
    given = {"ROCR_VISIBLE_DEVICES": "1", "HIP_VISIBLE_DEVICES": "2", "CUDA_VISIBLE_DEVICES": "3"}
    read = read_environment(given)
    assert (read.rocr_visible_devices, read.hip_visible_devices, read.cuda_visible_devices) == ("1", "2", "3")
    card = facts.RocmCard("AMD", "gfx942", 1, "GPU-1", "renderD128")
    assert facts.visible([card], read_environment({"ROCR_VISIBLE_DEVICES": ""})) == [], "ROCr hides all then"
    assert facts.visible([card], read_environment({})) == [card]


@pytest.mark.slow
def test_probing_wakes_nothing_and_loads_no_triton() -> None:
    code = (
        "import sys, torch; from quintet.platforms.rocm import PLATFORM; PLATFORM.probe();"
        "print(torch.cuda.is_initialized(), 'triton' in sys.modules, 'aiter' in sys.modules, 'amdsmi' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False False False False\n"


def test_capabilities_are_the_facts(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    said = ask(MI300, MI300)
    monkeypatch.setattr(facts, "facts", lambda: said)
    probed = PLATFORM.probe()
    assert isinstance(probed, Capabilities)
    assert (probed.devices, probed.fp8, probed.overlap, probed.sleep) == (2, torch.float8_e4m3fnuz, True, True)
    assert "MI300X" in probed.detail and "unverified" in probed.detail
    config, reasons = PLATFORM.configure(EngineConfig(tensor_parallel_size=2))
    assert config == EngineConfig(tensor_parallel_size=2) and reasons == [UNVERIFIED]
    with pytest.raises(ValueError, match="tensor_parallel_size 3 needs as many devices, 2 here; lower it"):
        PLATFORM.configure(EngineConfig(tensor_parallel_size=3))


@pytest.mark.parametrize("cards", [(RX7900,), (MI300, RX7900)], ids=len)
def test_rdna_runs_eagerly_unless_captures_are_asked_for(cards: Any, ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    said = ask(*cards)
    monkeypatch.setattr(facts, "facts", lambda: said)
    config, reasons = PLATFORM.configure(EngineConfig())
    assert config.enforce_eager and "reported to crash on gfx1100 (vllm #34154)" in reasons[-1]
    for asked in ({"capture_ahead": True}, {"capture_sizes": (1, 2)}, {"max_capture_size": 512}):
        config, reasons = PLATFORM.configure(EngineConfig.from_kwargs(**asked))
        assert not config.enforce_eager and reasons[0] == UNVERIFIED and "crash" not in str(reasons)


@pytest.mark.skipif(torch.version.hip is not None, reason="torch is built for ROCm")
def test_it_is_found_by_name_and_says_why_it_is_not_available() -> None:
    with pytest.raises(UnavailableError, match="device 'rocm' is not available: .*was built without HIP"):
        choose("rocm")
