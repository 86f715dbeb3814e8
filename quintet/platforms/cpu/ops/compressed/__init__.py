"""Attention to a window and to compressed entries, in torch on host memory."""

from quintet.platforms.cpu.ops.compressed import torch_compressed  # noqa: F401
