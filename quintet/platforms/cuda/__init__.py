"""The CUDA platform: NVIDIA GPUs on the base that GPUs share. Nothing here loads Triton before a device is opened."""

from quintet.platforms.cuda.platform import CUDA as PLATFORM

__all__ = ["PLATFORM"]
