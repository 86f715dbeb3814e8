"""`--tools FILE`: functions of a Python file, or programs that a JSON, YAML or TOML file names."""

import importlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from quintet.cli.chat.function_tools import read_functions
from quintet.cli.chat.program_tools import program_tool
from quintet.cli.chat.tool import UserTool

MAX_FILE = 2**20  # bytes
MAX_TOOLS = 128


def read_tools(path: str) -> dict[str, UserTool]:
    """By name. ValueError says what is wrong in the file."""
    file = Path(path)
    try:
        size = file.stat().st_size
        if size > MAX_FILE:
            raise ValueError(f"has {size} bytes, and {MAX_FILE} is the most")
        found: Sequence[UserTool] = read_functions(file) if file.suffix == ".py" else _programs(file)
    except (OSError, ValueError) as error:
        raise ValueError(f"--tools {path}: {' '.join(str(error).split())}") from None
    names = [each.name for each in found]
    if not 1 <= len(names) <= MAX_TOOLS or len(set(names)) < len(names):
        raise ValueError(f"--tools {path}: there must be 1 to {MAX_TOOLS} tools, each with a name of its own")
    return {each.name: each for each in found}


def _programs(file: Path) -> list[UserTool]:
    found = _parsed(file)
    entries = found.get("tools") if isinstance(found, dict) else found
    if not isinstance(entries, list):
        raise ValueError('must hold a list of tools, or "tools" with one')
    return [program_tool(each, f"tools[{place}]") for place, each in enumerate(entries)]


def _parsed(file: Path) -> Any:
    text = file.read_text(encoding="utf-8")
    if file.suffix == ".json":
        return json.loads(text)
    if file.suffix in (".yaml", ".yml"):
        import yaml

        try:
            return yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise ValueError(str(error)) from None
    if file.suffix == ".toml":
        try:
            return importlib.import_module("tomllib").loads(text)
        except ModuleNotFoundError:
            raise ValueError("TOML needs Python 3.11; use JSON or YAML") from None
    raise ValueError("must be a .py, .json, .yaml or .toml file")
