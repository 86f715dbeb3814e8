"""Docstrings and signatures for help() and editors, made from the `--help` texts of a dataclass's fields."""

import dataclasses
import inspect
import textwrap
from collections.abc import Callable, Iterable
from dataclasses import Field, InitVar
from typing import Any, TypeVar

from quintet.config.schema.fields import setting_fields

T = TypeVar("T", bound=type)
C = TypeVar("C", bound=Callable[..., None])


def documented(cls: T) -> T:
    """Adds the class's fields and their help texts to its docstring."""
    cls.__doc__ = f"{cls.__doc__}\n\n{_field_docs(setting_fields(cls))}"
    return cls


def accepts_fields_of(config: type) -> Callable[[C], C]:
    """Decorates a function that passes its **kwargs to `config`: adds them to its signature and docstring by name."""

    def decorate(call: C) -> C:
        signature = inspect.signature(call)
        own = [each for each in signature.parameters.values() if each.kind is not inspect.Parameter.VAR_KEYWORD]
        named = {each.name for each in own}
        added = [each for each in setting_fields(config) if each.name not in named]
        shown = [
            inspect.Parameter(each.name, inspect.Parameter.KEYWORD_ONLY, default=_default(each), annotation=_type(each))
            for each in added
        ]
        call.__signature__ = signature.replace(parameters=[*own, *shown])  # type: ignore[attr-defined]
        call.__doc__ = f"{call.__doc__}\n\n{_field_docs(added)}"
        return call

    return decorate


def _field_docs(fields: Iterable[Field[Any]]) -> str:
    lines = [f"{each.name}: {each.metadata['help']} [{_default(each)!r}]" for each in fields]
    wrapped = (textwrap.fill(line, 110, initial_indent=" " * 4, subsequent_indent=" " * 8) for line in lines)
    return "\n".join(["    Fields, and in brackets what holds if one is not given:", "", *wrapped, "    "])


def _default(field: Field[Any]) -> Any:
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def _type(field: Field[Any]) -> Any:
    return field.type.type if isinstance(field.type, InitVar) else field.type
