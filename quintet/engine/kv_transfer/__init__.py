"""KV connectors: pages loaded from and stored to CPU memory, disk, LMCache and other engines."""
