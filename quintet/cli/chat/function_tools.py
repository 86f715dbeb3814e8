"""The functions of a Python file as tools: annotations become the schema, docstrings say what they are for."""

import contextlib
import importlib.util
import inspect
import json
import re
import sys
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, PydanticUserError, ValidationError, create_model

_ARGUMENTS = re.compile(r"\n\s*(?:Args|Arguments|Parameters):\s*\n", re.I)
_ARGUMENT = re.compile(r"^\s+\*{0,2}(\w+)\s*(?:\([^)]*\))?\s*:\s*(.+)$", re.M)
_SECTION = re.compile(r"\n\s*(?:Returns|Raises|Yields|Examples?):", re.I)


@dataclass(frozen=True)
class FunctionTool:
    """Runs in this process: no time bounds it but Ctrl-C."""

    name: str
    description: str
    function: Callable[..., Any]
    model: type[BaseModel]  # of its arguments

    @property
    def parameters(self) -> dict[str, Any]:
        """The JSON schema of its arguments."""
        schema = self.model.model_json_schema()
        schema.pop("title", None)
        return schema

    def run(self, arguments: dict[str, Any]) -> str:
        """Text as it is, anything else as JSON. What it prints goes where messages go, not among the answers."""
        try:
            given = self.model.model_validate(arguments)
        except ValidationError as error:
            raise ValueError("; ".join(_validation_message(each) for each in error.errors())) from None
        values = {str(field.alias): getattr(given, name) for name, field in self.model.model_fields.items()}
        with contextlib.redirect_stdout(sys.stderr):
            result = self.function(**values)
        return result if isinstance(result, str) else json.dumps(result, ensure_ascii=False, default=str)


def read_functions(path: Path) -> list[FunctionTool]:
    """Runs the file -> a tool for each public function in it. ValueError says what is wrong with one.

    It is code with all the rights of this process: only for a path that the user gives.
    """
    module = _load(path)
    mine = inspect.getmembers(module, inspect.isfunction)
    public = [each for name, each in mine if not name.startswith("_") and each.__module__ == module.__name__]
    return [_tool(each) for each in sorted(public, key=lambda each: each.__code__.co_firstlineno)]


def _load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"quintet_tools_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)  # annotations are looked up there
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[spec.name]
        raise ValueError(f"{path} failed: {type(error).__name__}: {error}") from error
    return module


def _tool(function: Callable[..., Any]) -> FunctionTool:
    name, doc = function.__name__, inspect.getdoc(function)
    if not doc:
        raise ValueError(f"{name}() has no docstring, which tells the model what it is for; or call it _{name}")
    if inspect.iscoroutinefunction(function):
        raise ValueError(f"{name}() is a coroutine; tools are plain functions")
    about, *rest = _ARGUMENTS.split(doc, maxsplit=1)
    meant = dict(_ARGUMENT.findall(_SECTION.split(rest[0])[0])) if rest else {}
    try:
        model = create_model(name, __config__=ConfigDict(extra="forbid"), **_fields(function, meant))
        model.model_json_schema()
    except (PydanticUserError, NameError, TypeError) as error:
        raise ValueError(f"{name}(): its arguments have no JSON schema: {error}") from None
    return FunctionTool(name, _SECTION.split(about)[0].strip(), function, model)


def _fields(function: Callable[..., Any], meant: Mapping[str, str]) -> dict[str, Any]:
    """Numbered, and known by the arguments' names: those may be what a model of pydantic's calls its own, as `json`."""
    name, fields = function.__name__, dict[str, Any]()
    hints = typing.get_type_hints(function, include_extras=True)
    for place, each in enumerate(inspect.signature(function).parameters.values()):
        if each.kind not in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY):
            raise ValueError(f"{name}() takes {each}; tools take named arguments alone")
        if each.name not in hints:
            raise ValueError(f"{name}(): {each.name} has no annotation; say what it is, as in {each.name}: str")
        default = ... if each.default is each.empty else each.default
        about = Field(default, alias=each.name, description=meant.get(each.name))
        fields[f"argument{place}"] = (hints[each.name], about)
    return fields


def _validation_message(error: Any) -> str:
    return f"{'.'.join(map(str, error['loc']))}: {error['msg']}"
