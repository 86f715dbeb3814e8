"""Print what a bug report needs: versions, the machine, the platforms, the settings. No secrets are in it."""

import argparse
import importlib.metadata
import os
import platform
import sys

from quintet import __version__
from quintet.config import Environment, read_environment

_PACKAGES = (
    "torch", "transformers", "tokenizers", "safetensors", "huggingface_hub", "numpy", "triton", "flashinfer-python",
    "aiter", "intel-extension-for-pytorch", "triton-xpu", "jax", "torchax",
)  # fmt: skip
_NOTES = {"intel-extension-for-pytorch": "not used: it ended with torch 2.8"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """None."""


def run(arguments: argparse.Namespace) -> int:
    """Prints one fact per line."""
    for name, value in [*_software(), *_machine(), *_settings(read_environment())]:
        print(f"{name + ':':22} {value}")
    print()
    from quintet.cli.commands import platforms

    platforms.run(argparse.Namespace(json=False, features=False))
    return 0


def _software() -> list[tuple[str, str]]:
    rows = [("quintet", __version__), ("python", f"{sys.version.split()[0]} ({sys.executable})")]
    for name in _PACKAGES:
        try:
            version = importlib.metadata.version(name)
            rows.append((name, f"{version} ({_NOTES[name]})" if name in _NOTES else version))
        except importlib.metadata.PackageNotFoundError:
            continue
    return rows


def _machine() -> list[tuple[str, str]]:
    import cpuinfo
    import psutil
    import torch

    cpu = cpuinfo.get_cpu_info()
    memory = psutil.virtual_memory()
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    flags = [flag for flag in cpu.get("flags", ()) if flag.startswith(("avx", "amx", "sve", "asimd", "f16c", "fma"))]
    return [
        ("system", platform.platform()),
        ("C library", " ".join(platform.libc_ver())),
        ("processor", f"{cpu.get('brand_raw', platform.processor())}, {usable} of {os.cpu_count()} cores usable"),
        ("instruction sets", " ".join(flags)),
        ("memory", f"{memory.available / 2**30:.1f} of {memory.total / 2**30:.1f} GiB available"),
        ("torch threads", str(torch.get_num_threads())),
        ("torch build", f"{torch.__version__}, {torch.__config__.show().splitlines()[1].strip(' -')}"),
    ]


def _settings(environment: Environment) -> list[tuple[str, str]]:
    return [(name, str(value)) for name, value in environment.variables().items() if value is not None]
