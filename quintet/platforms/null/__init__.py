"""The null platform: everything but arithmetic."""

from quintet.platforms.null.platform import Null as PLATFORM

__all__ = ["PLATFORM"]
