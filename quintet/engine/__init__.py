"""The engine: scheduler, KV cache, executor, sampling, parallelism. It takes token ids, and knows no device."""
