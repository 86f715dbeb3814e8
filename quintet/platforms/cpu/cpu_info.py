"""Description of the processor."""

import functools


@functools.cache
def describe() -> str:
    """The instruction set that matters here, as the extension reads it from the processor."""
    try:
        from quintet import _cpu
    except ImportError:
        return "instruction set unknown (the compiled extension is not there; torch works without it)"
    return f"instruction set {_cpu.isa()}"
