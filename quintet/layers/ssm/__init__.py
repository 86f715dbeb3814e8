"""State-space and linear-attention layers: Mamba, delta net, RWKV, lightning attention, short convolution."""
