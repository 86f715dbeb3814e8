"""The package quintet-llm-tools: reference checkpoints and the simulation, which quintet's wheel does not bring."""

import importlib.util

MODULE = "quintet_tools"
MISSING = "quintet-llm-tools is not installed: pip install quintet-llm-tools (from a checkout: pip install ./tools)"


def has_tools() -> bool:
    return importlib.util.find_spec(MODULE) is not None
