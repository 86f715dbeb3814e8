"""The TPU platform in tests: on JAX's CPU devices, of which tests/conftest.py asks for eight."""

import functools
import importlib.util
import tempfile
from typing import Any

import pytest

from quintet.config import EngineConfig
from quintet.platforms.tpu import PLATFORM

DEVICES = 8

needs_jax = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("jax", "torchax")), reason="jax or torchax not installed"
)


@functools.cache
def programs() -> tempfile.TemporaryDirectory[str]:
    """Where the tests of one process keep what was compiled; never what the user's own runs left."""
    return tempfile.TemporaryDirectory(prefix="quintet-xla-")


def platform(devices: int = 1, **settings: Any) -> Any:
    """The platform on so many devices."""
    config = EngineConfig(tensor_parallel_size=devices, compilation_cache_dir=programs().name, **settings)
    settled, _ = PLATFORM.configure(config)
    return PLATFORM(settled)


def compilations() -> list[str]:
    """Grows by one with each program that JAX compiles from now on."""
    import jax

    compiled: list[str] = []

    def note(event: str, seconds: float, **_: Any) -> None:
        if "backend_compile" in event:
            compiled.append(event)

    jax.monitoring.register_event_duration_secs_listener(note)
    return compiled
