"""Loads one module with a fault in it, in every Python process of a virtual environment; sources stay as they are.

A line in the environment's site-packages calls install() when an interpreter starts, so that processes which tests
start have the fault as well, whatever their flags and their environment variables are.
"""

import importlib.abc
import importlib.util
import json
import sys
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import CodeType


class Faulty(SourceFileLoader):
    """Loads a module's source with one of its faults."""

    def __init__(self, name: str, file: str, number: int) -> None:
        super().__init__(name, file)
        self._number = number

    def get_code(self, fullname: str) -> CodeType:
        spec = importlib.util.spec_from_file_location("_python_faults", Path(__file__).with_name("python_faults.py"))
        assert spec is not None and spec.loader is not None
        faults = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(faults)
        code: CodeType = faults.broken(Path(self.path).read_text(encoding="utf-8"), self._number, self.path)
        return code


class Instead(importlib.abc.MetaPathFinder):
    """Finds one module in the place of the installed one: a source with a fault, or another compiled file."""

    def __init__(self, module: str, file: str, number: int | None) -> None:
        self._module, self._file, self._number = module, file, number

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if name != self._module:
            return None
        if self._number is None:
            return importlib.util.spec_from_file_location(name, self._file)
        package = [str(Path(self._file).parent)] if self._file.endswith("__init__.py") else None
        loader = Faulty(name, self._file, self._number)
        return importlib.util.spec_from_file_location(
            name, self._file, loader=loader, submodule_search_locations=package
        )


def install(plan: str) -> None:
    """Reads the file that names the module, the file to load and the fault's number; without one does nothing."""
    if Path(plan).exists():
        fault = json.loads(Path(plan).read_text(encoding="utf-8"))
        sys.meta_path.insert(0, Instead(fault["module"], fault["file"], fault.get("number")))
