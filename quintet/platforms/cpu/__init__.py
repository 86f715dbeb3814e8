"""The CPU platform: torch providers today."""

from quintet.platforms.cpu.platform import CPU as PLATFORM

__all__ = ["PLATFORM"]
