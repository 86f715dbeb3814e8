"""Attention layers: multi-head, latent (MLA), relative bias, K/V scales."""
