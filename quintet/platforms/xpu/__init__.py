"""The XPU platform: Intel GPUs on the base that GPUs share. Nothing here loads Triton before a device is opened."""

from quintet.platforms.xpu.platform import XPU as PLATFORM

__all__ = ["PLATFORM"]
