"""What the CUDA platform says of a machine: its devices, or every reason why there are none, each with what helps."""

import argparse
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from quintet.cli.commands import platforms as platforms_command
from quintet.config import EngineConfig
from quintet.interface.platform import Capabilities, Unavailable
from quintet.platforms.cuda import PLATFORM, facts
from quintet.platforms.cuda.facts import CudaMachine
from quintet.platforms.gpu.facts import GPUFacts, compiler, header
from tests.platforms.gpu.fake_torch import fake_platform

H200 = ("NVIDIA H200", (9, 0), 141 * 2**30)
A100 = ("NVIDIA A100", (8, 0), 80 * 2**30)
T4 = ("Tesla T4", (7, 5), 16 * 2**30)
P100 = ("Tesla P100", (6, 0), 16 * 2**30)


class NVMLError(Exception):
    """As pynvml's."""


@dataclass
class Total:
    total: int


class NVML:
    """The few functions of pynvml that are asked."""

    NVMLError = NVMLError

    def __init__(self, cards: list[Any], cuda: int = 13000, fails: str = "") -> None:
        self._cards, self._cuda, self._fails = cards, cuda, fails
        self.open = 0

    def nvmlInit(self) -> None:
        if self._fails == "init":
            raise NVMLError("NVML Shared Library Not Found")
        self.open += 1

    def nvmlShutdown(self) -> None:
        self.open -= 1

    def nvmlSystemGetCudaDriverVersion(self) -> int:
        return self._cuda

    def nvmlSystemGetDriverVersion(self) -> bytes:
        return b"580.65"

    def nvmlDeviceGetCount(self) -> int:
        if self._fails == "count":
            raise NVMLError("Unknown Error")
        return len(self._cards)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Any:
        return self._cards[index]

    def nvmlDeviceGetName(self, handle: Any) -> str:
        return str(handle[0])

    def nvmlDeviceGetCudaComputeCapability(self, handle: Any) -> Any:
        return handle[1]

    def nvmlDeviceGetMemoryInfo(self, handle: Any) -> Total:
        return Total(handle[2])


def machine(cards: list[Any], **changes: Any) -> CudaMachine:
    nvml = changes.pop("library", None) or NVML(cards, changes.pop("cuda", 13000), changes.pop("fails", ""))
    missing = changes.pop("missing", ())
    settings: dict[str, Any] = {
        "torch_cuda": "13.0", "torch_version": "2.13.0", "is_installed": lambda name: name not in missing,
        "nvml": lambda: nvml, "visible": lambda count: list(range(count)), "driver": Path("/nowhere"),
        "pci": Path("/nowhere"), "compiler": lambda: "/usr/bin/gcc", "header": lambda: Path(__file__),
    }  # fmt: skip
    return CudaMachine(**{**settings, **changes})


def found(*cards: Any, **changes: Any) -> GPUFacts:
    result = facts.facts(machine(list(cards), **changes))
    assert isinstance(result, GPUFacts), result
    return result


def reason(*cards: Any, **changes: Any) -> Unavailable:
    result = facts.facts(machine(list(cards), **changes))
    assert isinstance(result, Unavailable)
    return result


def test_what_is_computed_in_follows_from_the_capability() -> None:
    assert found(H200).dtypes == (torch.bfloat16, torch.float16, torch.float32)
    assert [found(card).fp8 for card in (H200, A100, T4)] == [torch.float8_e4m3fn, None, None]
    assert found(T4).dtypes == (torch.float16, torch.float32)
    assert found(("L4", (8, 9), 2**34)).fp8 == torch.float8_e4m3fn


def test_unequal_devices_have_what_all_have() -> None:
    both = found(H200, T4)
    assert both.names == ("NVIDIA H200", "Tesla T4") and both.memory == T4[2]
    assert both.dtypes == (torch.float16, torch.float32) and both.fp8 is None


def test_hidden_devices_do_not_count() -> None:
    assert found(P100, H200, visible=lambda count: [1]).names == ("NVIDIA H200",)
    hidden = reason(H200, H200, visible=lambda count: [])
    assert hidden.reason == "2 x NVIDIA H200 here, and no device is visible to this process"
    assert "CUDA_VISIBLE_DEVICES" in hidden.remedy and "--gpus all" in hidden.remedy


def test_the_detail_names_device_driver_and_build() -> None:
    assert found(H200, H200).detail == (
        "NVIDIA H200; 141 GiB, compute capability 9.0; driver 580.65 (CUDA 13.0), torch 2.13.0 (CUDA 13.0)"
    )


def gpu_on_the_bus(folder: Path) -> Path:
    slot = folder / "0000:00:01.0"
    slot.mkdir()
    (slot / "vendor").write_text("0x10de\n")
    (slot / "class").write_text("0x030200\n")
    return folder


def test_no_driver_and_no_gpu() -> None:
    assert str(reason(fails="init")) == "no NVIDIA driver and no NVIDIA GPU here; use another device"


def test_a_gpu_without_a_driver(tmp_path: Path) -> None:
    got = reason(fails="init", pci=gpu_on_the_bus(tmp_path))
    assert str(got) == "an NVIDIA GPU is here, and no driver for it; install the NVIDIA driver"


def test_a_driver_that_does_not_answer(tmp_path: Path) -> None:
    got = reason(fails="init", driver=tmp_path)
    assert got.reason == "the NVIDIA driver does not answer: NVML Shared Library Not Found" and got.remedy
    assert "does not say what GPUs" in reason(H200, fails="count").reason


def test_a_driver_too_old_for_torch() -> None:
    got = reason(A100, cuda=12040)
    assert got.reason == "driver 580.65 serves CUDA up to 12.4, too old for torch 2.13.0 (CUDA 13.0)"
    assert got.remedy.endswith("--index-url https://download.pytorch.org/whl/cu126")
    assert "cu128" in reason(A100, cuda=12090).remedy
    assert found(A100, cuda=13000, torch_cuda="13.2"), "within a major version an older driver serves"


def test_torch_without_cuda_and_the_build_that_fits_the_driver() -> None:
    got = reason(H200, torch_cuda=None, torch_version="2.13.0+cpu")
    assert got.reason == "torch 2.13.0+cpu was built without CUDA" and got.remedy.endswith("whl/cu130")


def test_libraries_that_are_missing(tmp_path: Path) -> None:
    assert str(reason(H200, missing=("triton",))) == "triton is not installed; pip install triton"
    got = reason(H200, missing=("pynvml",), driver=tmp_path)
    assert str(got) == "nvidia-ml-py is not installed, so the GPUs cannot be asked; pip install nvidia-ml-py"


def test_all_reasons_are_told_at_once(tmp_path: Path) -> None:
    got = reason(
        missing=("pynvml", "triton"), torch_cuda=None, torch_version="2.13.0+cpu", pci=gpu_on_the_bus(tmp_path)
    )
    assert got.reason == (
        "an NVIDIA GPU is here, and no driver for it; nvidia-ml-py is not installed; "
        "torch 2.13.0+cpu was built without CUDA; triton is not installed"
    )
    assert [step.split()[0] for step in got.remedy.split("; ")] == ["install", "pip", "pip", "pip"]


def test_a_gpu_too_old_for_our_kernels() -> None:
    got = reason(P100)
    assert "Tesla P100 has compute capability 6.0, and 7.5 is the least" in got.reason and got.remedy


def test_without_a_compiler_or_python_h_it_runs_and_says_how_slowly(tmp_path: Path) -> None:
    assert found(H200).warning == ""
    lacking = found(H200, compiler=lambda: None, header=lambda: tmp_path / "Python.h").warning
    assert f"no C compiler and no {tmp_path}/Python.h" in lacking and "10 times slower" in lacking
    assert lacking.endswith("; apt-get install gcc python3-dev")
    assert found(H200, compiler=lambda: None).warning.endswith("; apt-get install gcc")
    assert found(H200, header=lambda: tmp_path / "Python.h").warning.endswith("; apt-get install python3-dev")


def test_the_compiler_is_the_one_that_triton_would_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert compiler() is None
    for name in ("clang", "gcc", "mine"):  # the later before the earlier
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o755)
        if name == "mine":
            monkeypatch.setenv("CC", "mine")
        assert compiler() == str(tmp_path / name)
    monkeypatch.setenv("CC", "nothing-of-that-name")
    assert compiler() is None, "Triton asks for no other"
    assert header().name == "Python.h" and header().parent.name.startswith("python3")


def test_what_it_lacks_is_in_the_table_of_platforms_and_in_the_log(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    result = facts.facts(machine([H200], compiler=lambda: None))
    monkeypatch.setattr(facts, "facts", lambda: result)
    assert isinstance(result, GPUFacts)
    platforms_command.run(argparse.Namespace(json=False, features=False))
    assert result.warning in capsys.readouterr().out
    assert result.warning in PLATFORM.configure(EngineConfig())[1]
    gpu = type(fake_platform())
    monkeypatch.setattr(gpu, "_facts", staticmethod(lambda: result))
    made = gpu()
    for rank in (0, 1):
        made.open(rank)
    assert [record.message for record in caplog.records].count(result.warning) == 1


@pytest.mark.parametrize("fails", ["", "count"])
def test_the_library_is_let_go(fails: str) -> None:
    library = NVML([H200], fails=fails)
    facts.facts(machine([], library=library))
    assert library.open == 0


def test_discovery_makes_no_context_and_loads_no_triton() -> None:
    code = (
        "import sys, torch; from quintet.platforms import discover; discover();"
        "print(torch.cuda.is_initialized(), 'triton' in sys.modules, 'flashinfer' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False False False\n"


def use(monkeypatch: pytest.MonkeyPatch, *cards: Any) -> None:
    result = facts.facts(machine(list(cards)))
    monkeypatch.setattr(facts, "facts", lambda: result)


def test_capabilities_are_the_facts(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, H200, H200)
    probed = PLATFORM.probe()
    assert isinstance(probed, Capabilities)
    assert (probed.devices, probed.overlap, probed.static_shapes, probed.spmd) == (2, True, False, False)
    kinds = {"int8", "int4", "w8a8", "w4a8", "fp8", "fp8a8", "table4", "table8"}
    assert probed.weight_formats == {*kinds, "mins", "order", "grouped"} and not probed.batch_invariant
    assert "NVIDIA H200" in probed.detail and "unverified" in probed.detail


def test_it_says_that_it_is_unverified_and_refuses_ranks_without_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, H200, H200)
    config, reasons = PLATFORM.configure(EngineConfig(tensor_parallel_size=2))
    assert config == EngineConfig(tensor_parallel_size=2) and "unverified" in reasons[0]
    with pytest.raises(ValueError, match="tensor_parallel_size 3 needs as many devices, 2 here; lower it"):
        PLATFORM.configure(EngineConfig(tensor_parallel_size=3))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_on_this_machine_it_says_why_not() -> None:
    probed = PLATFORM.probe()
    assert isinstance(probed, Unavailable) and len(probed.reason) > 10 and probed.remedy
