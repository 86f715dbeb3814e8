"""What a field of a configuration knows of itself: how its value is read, what it is for, which flags set it."""

import dataclasses
from collections.abc import Mapping
from dataclasses import field
from typing import Any, ClassVar, TypeVar

from quintet.names import refuse_unknown
from quintet.settings.lacking import LACKING
from quintet.values import Parse, json_object, one_of


def option(
    default: Any,
    parse: Parse,
    help: str,
    *,
    group: str,
    aliases: tuple[str, ...] = (),
    **more: Any,
) -> Any:
    """A field that knows how to read itself. Flags and checks are generated from this and written nowhere else.

    `aliases` are other names for the field (their flags follow); `more` may hold `flags` (further flags, dashes
    included), `choices`, `metavar`, `repr`.
    """
    shown = more.pop("repr", True)
    metadata = {"parse": parse, "help": help, "group": group, "aliases": aliases, **more}
    return field(default=default, metadata=metadata, repr=shown)


def choice(default: str, *choices: str, help: str, group: str, **synonyms: str) -> Any:
    """A field that takes one of these words."""
    return option(default, one_of(*choices, **synonyms), help, group=group, choices=choices)


def settle(config: Any, within: str = "") -> None:
    """Brings every field of a new configuration to its one true form; it is frozen from there on.

    `within` is the way to it, such as "speculative_config.": errors name the whole way.
    """
    for each in dataclasses.fields(config):
        try:
            value = each.metadata["parse"](getattr(config, each.name))
        except NestedError:
            raise
        except ValueError as error:
            raise ValueError(f"{within}{each.name} {error}") from None
        object.__setattr__(config, each.name, value)


# --------------------------------------------------------------------------------- a configuration in another's field


class NestedError(ValueError):
    """What is wrong within a field that holds a configuration; it names the field and the entry itself."""


@dataclasses.dataclass(frozen=True)
class Nested:
    """A small configuration that is one field of another: made from a mapping or its JSON, refuses unknown entries."""

    name: ClassVar[str]  # of the field

    def __post_init__(self) -> None:
        settle(self, f"{self.name}.")


N = TypeVar("N", bound=Nested)


def nested(cls: type[N], default: N | None, help: str, *, group: str, flags: tuple[str, ...] = ()) -> Any:
    """A field that holds a `cls`. Its entries have flags of their own: `--speculative-config.method`."""

    def parse(value: Any) -> N | None:
        if value is None or isinstance(value, cls):
            return default if value is None else value
        given = json_object(value)
        try:
            return cls(**entries(cls, given))
        except ValueError as error:
            raise NestedError(str(error)) from None

    return option(default, parse, help, group=group, flags=flags, nested=cls)


def entries(cls: type[Nested], given: Mapping[str, Any]) -> dict[str, Any]:
    """Entries by the names of cls's fields; refuses those that are lacking or unknown."""
    known = {each.name for each in dataclasses.fields(cls)}
    named = {name.replace("-", "_"): value for name, value in given.items()}
    for name in named:
        if reason := LACKING.get(f"{cls.name}.{name}"):
            raise ValueError(f"{cls.name}.{name} is not there: {reason}")
    refuse_unknown(f"entry of {cls.name}", named, known)
    return named


def dotted(cls: type, named: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of cls that hold a configuration, entry by entry: {"speculative_config": {"method": m}} becomes
    {"speculative_config.method": m}. Refuses an entry that is given in both ways."""
    holding = {each.name for each in dataclasses.fields(cls) if "nested" in each.metadata}
    flat: dict[str, Any] = {}
    for name, value in named.items():
        pieces = {name: value}
        if name in holding and value is not None:
            mapping = dataclasses.asdict(value) if isinstance(value, Nested) else json_object(value)
            pieces = {f"{name}.{entry.replace('-', '_')}": each for entry, each in mapping.items()}
        if twice := flat.keys() & pieces:
            raise ValueError(f"{min(twice)} is given twice")
        flat.update(pieces)
    return flat


def gathered(flat: Mapping[str, Any]) -> dict[str, Any]:
    """The other way round: entries such as "speculative_config.method" in a mapping for each field."""
    found: dict[str, Any] = {}
    for name, value in flat.items():
        field_name, dot, entry = name.partition(".")
        if dot:
            found[field_name] = {**(found.get(field_name) or {}), entry: value}
        else:
            found.setdefault(name, value)
    return found
