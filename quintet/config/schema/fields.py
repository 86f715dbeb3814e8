"""Fields of a configuration and their metadata: the parser of the value, the help text, the flags."""

import dataclasses
from collections.abc import Mapping
from dataclasses import Field, InitVar, field
from typing import Any, ClassVar

from quintet.common.suggestions import refuse_unknown
from quintet.common.value_parsers import Parse, json_object, one_of
from quintet.config.schema.unsupported import unsupported_reason


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
    included), `choices`, `metavar`, `nargs`, `repr`; `nested` and `ours` are explained below.
    """
    shown = more.pop("repr", True)
    metadata = {"parse": parse, "help": help, "group": group, "aliases": aliases, **more}
    return field(default=default, metadata=metadata, repr=shown)


def choice_field(default: str, *choices: str, help: str, group: str, **synonyms: str) -> Any:
    """A field that takes one of these words."""
    return option(default, one_of(*choices, **synonyms), help, group=group, choices=choices)


def setting_fields(cls: type) -> list[Field[Any]]:
    """All that a caller may give: the fields, and what is taken in and not kept (InitVar)."""
    kept = dataclasses.fields(cls)
    every: Mapping[str, Field[Any]] = cls.__dataclass_fields__  # type: ignore[attr-defined]
    return [each for each in every.values() if each in kept or isinstance(each.type, InitVar)]


def normalize_fields(config: Any, within: str = "") -> None:
    """Brings every field of a new configuration to its one true form; it is frozen from there on.

    `within` is the way to it, such as "speculative_config.": errors name the whole way.
    """
    for each in dataclasses.fields(config):
        object.__setattr__(config, each.name, read_field(each, getattr(config, each.name), within))


def read_field(setting: Field[Any], value: Any, within: str = "") -> Any:
    """The value in its one true form; ValueError names the setting."""
    try:
        return setting.metadata["parse"](value)
    except NestedError:
        raise
    except ValueError as error:
        raise ValueError(f"{within}{setting.name} {error}") from None


def apply_init_only(config: Any, taken_in: Mapping[str, Any]) -> None:
    """Sets the fields that settings taken in but not kept map to by `ours`; ValueError if a field has another value."""
    every = {each.name: each for each in setting_fields(type(config))}
    for name, value in taken_in.items():
        wanted = {} if value is None else every[name].metadata["ours"](read_field(every[name], value))
        for target, asked in wanted.items():
            now = getattr(config, target)
            if now not in (asked, every[target].default):
                raise ValueError(f"{name} asks for {target}={asked!r}, and {target}={now!r} is given; give one of them")
            object.__setattr__(config, target, asked)


# --------------------------------------------------------------------------------- a configuration in another's field


class NestedError(ValueError):
    """Error within a field that holds a configuration; the message names the field and the entry itself."""


@dataclasses.dataclass(frozen=True)
class Nested:
    """A small configuration that is one field of another: made from a mapping or its JSON, refuses unknown entries."""

    name: ClassVar[str]  # of the field
    plain: ClassVar[str] = ""  # the entry that a number alone stands for, if there is one

    def __post_init__(self) -> None:
        normalize_fields(self, f"{self.name}.")

    @classmethod
    def entries(cls, value: Any) -> dict[str, Any]:
        """Returns the entries of a mapping, of its JSON or of a Nested, by the names of fields."""
        if isinstance(value, Nested):
            return dataclasses.asdict(value)
        number = isinstance(value, int) and not isinstance(value, bool)
        if cls.plain and (number or (isinstance(value, str) and value.strip().isdigit())):
            return {cls.plain: value}
        try:
            found = json_object(value)
        except ValueError as error:
            raise NestedError(f"{cls.name} {error}") from None
        named = {name.replace("-", "_"): each for name, each in found.items()}
        if len(named) < len(found):
            raise NestedError(f"{cls.name} gives an entry twice, with '-' and with '_'; give it once")
        return named

    @classmethod
    def from_value(cls, value: Any) -> "Nested":
        """Builds it from entries. Unsupported and unknown ones are refused, unless an unsupported one is off."""
        known = {each.name for each in dataclasses.fields(cls)}
        given = cls.entries(value).items()
        asked = {name: each for name, each in given if name in known or not cls._is_turned_off(name, each)}
        for name in asked:
            if reason := unsupported_reason(f"{cls.name}.{name}"):
                raise NestedError(f"{cls.name}.{name} is not there: {reason}")
        try:
            refuse_unknown(f"entry of {cls.name}", asked, known)
            return cls(**asked)
        except ValueError as error:
            raise NestedError(str(error)) from None

    @classmethod
    def _is_turned_off(cls, name: str, value: Any) -> bool:
        """True if the entry is known as unsupported and is turned off: then it changes nothing."""
        off = not any(value.values()) if isinstance(value, Mapping) else not value
        return off and unsupported_reason(f"{cls.name}.{name}") is not None


def nested(cls: type[Nested], default: Nested | None, help: str, *, group: str, **more: Any) -> Any:
    """A field that holds a `cls`. Its entries have flags of their own: `--speculative-config.method`."""

    def parse(value: Any) -> Nested | None:
        if value is None or isinstance(value, cls):
            return default if value is None else value
        return cls.from_value(value)

    return option(default, parse, help, group=group, nested=cls, **more)


def entry_aliases(cls: type) -> dict[str, str]:
    """Returns the aliases of entries of nested configurations: {"spec_method": "speculative_config.method"}."""
    return {
        alias: f"{each.name}.{entry.name}"
        for each in setting_fields(cls)
        if "nested" in each.metadata
        for entry in dataclasses.fields(each.metadata["nested"])
        for alias in entry.metadata["aliases"]
    }


def flatten_nested(cls: type, named: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of cls that hold a configuration, entry by entry: {"speculative_config": {"method": m}} becomes
    {"speculative_config.method": m}, and so does an alias of an entry, {"spec_method": m}. Refuses an entry that is
    given in both ways."""
    holding = {each.name: each.metadata["nested"] for each in setting_fields(cls) if "nested" in each.metadata}
    aliases = entry_aliases(cls)
    flat: dict[str, Any] = {}
    for given, value in named.items():
        name = aliases.get(given, given)
        pieces = {name: value}
        if name in holding and value is not None:
            pieces = {f"{name}.{entry}": each for entry, each in holding[name].entries(value).items()} or {name: {}}
        if twice := flat.keys() & pieces:
            raise ValueError(f"{min(twice)} is given twice")
        flat.update(pieces)
    return flat


def unflatten_nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    """The other way round: entries such as "speculative_config.method" in a mapping for each field."""
    found: dict[str, Any] = {}
    for name, value in flat.items():
        field_name, dot, entry = name.partition(".")
        if dot:
            found[field_name] = {**(found.get(field_name) or {}), entry: value}
        else:
            found.setdefault(name, value)
    return found
