"""KV transfer between engines (disaggregated prefill): producers, consumers, and their transports."""
