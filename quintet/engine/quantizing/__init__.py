"""Writes quantized checkpoints: `quintet quantize`."""
