"""The CPU platform: our own kernels where they are compiled, torch for the rest."""

from quintet.platforms.cpu.platform import CPU as PLATFORM

__all__ = ["PLATFORM"]
