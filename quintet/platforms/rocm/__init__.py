"""The ROCm platform: AMD GPUs on the base that GPUs share. Nothing here loads Triton before a device is opened."""

from quintet.platforms.rocm.platform import ROCm as PLATFORM

__all__ = ["PLATFORM"]
