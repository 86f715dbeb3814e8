"""Merges LoRA adapters into checkpoints."""
