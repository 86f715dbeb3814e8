"""The TPU platform: the same torch models, traced into JAX. Nothing here loads JAX before a device is opened."""

from quintet.platforms.tpu.platform import TPU as PLATFORM

__all__ = ["PLATFORM"]
