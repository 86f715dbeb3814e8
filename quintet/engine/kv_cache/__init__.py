"""KV cache: groups of layers, page pool, block tables and prefix caching, state slots, KV events."""
