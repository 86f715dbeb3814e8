"""Rendezvous and authenticated TCP connections between ranks of several machines."""

import gc


def cleanup_dist_env_and_memory(shutdown_ray: bool = False) -> None:
    """vLLM's call after `del llm`: frees an engine that is referred to by cycles alone. Its ranks end with it."""
    gc.collect()
