"""KV offloading: tiers of CPU memory and disk."""
