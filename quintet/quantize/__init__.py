"""Writes quantized checkpoints: GPTQ, AWQ, compressed-tensors and GGUF."""
