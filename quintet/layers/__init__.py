"""Layers that models are built of: decoder, linear, attention, MoE, SSM, norms, rotary embeddings, quantization."""
