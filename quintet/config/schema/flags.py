"""Command line flags generated from dataclasses, and a parser that answers a typo with the nearest flag."""

import argparse
import dataclasses
import json
import sys
import types
import typing
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass
from typing import Any, NoReturn, TypeVar

from quintet.common.suggestions import nearest_name
from quintet.common.value_parsers import boolean, integer
from quintet.config import flatten_nested, setting_fields, unflatten_nested, unsupported_reason
from quintet.config.schema.error_names import NameTranslation
from quintet.config.schema.help import CommandHelp, HelpFormatter, topic_of
from quintet.config.schema.typed_flags import find_typed_flags, name_translation
from quintet.config.schema.unsupported import FLAGS

T = TypeVar("T")
Read = Callable[[str], Any]
Group = argparse._ArgumentGroup


class Parser(argparse.ArgumentParser):
    """No abbreviations; `--max_tokens` is `--max-tokens`; an unknown flag is an error that names the nearest."""

    def __init__(self, common: Sequence[str] = (), **options: Any) -> None:
        """`common`: the flags that --help shows; if empty, all."""
        options.setdefault("formatter_class", HelpFormatter)
        super().__init__(allow_abbrev=False, **options)
        self.common = common
        self.typed_flags: dict[str, str] = {}  # destination -> flag
        self._own_usage = options.get("usage") is None

    def format_help(self) -> str:
        """Usage with positionals alone: fifty flags in a usage line are no help."""
        if self._own_usage:
            names = [_usage_name(each) for each in self._positionals._group_actions if not each.option_strings]
            self.usage = " ".join(["%(prog)s", *names, "[--flags]"])
        return super().format_help()

    def _print_topic(self, topic: str) -> NoReturn:
        self.format_help()  # settles the usage
        try:
            text = CommandHelp(self, self.common).text(topic)
        except ValueError as error:
            self.error(str(error))
        print(text, end="")
        raise SystemExit(0)

    def parse(self, argv: Sequence[str]) -> argparse.Namespace:
        """Prompts and flags may be mixed. Exits with 2 on what it does not know."""
        words = normalize_argv(argv)
        self.typed_flags = find_typed_flags(self._option_string_actions, argv, words)
        end = words.index("--") if "--" in words else len(words)
        if (topic := topic_of(words[:end])) is not None:
            self._print_topic(topic)
        if foreign := [word for word in words[:end] if word in FLAGS and word not in self._option_string_actions]:
            self.error("\n".join(_unknown_flag_error(flag, ()) for flag in foreign))
        namespace, extra = self.parse_known_intermixed_args(words[:end])
        flags = [word.split("=")[0] for word in extra if word.startswith("-") and word != "-"]
        if flags:
            known = [flag for flag in self._option_string_actions if flag.startswith("--")]
            self.error("\n".join(_unknown_flag_error(flag, known) for flag in flags))
        for word in extra + words[end + 1 :]:
            self._place(namespace, word)
        namespace.words, namespace.after_dashes, namespace.typed = words[:end], words[end + 1 :], self.typed_flags
        namespace.wording = self.name_translation(namespace)
        return namespace

    def name_translation(self, given: argparse.Namespace | None = None) -> NameTranslation:
        """Returns the wording of error messages about typed flags."""
        return name_translation(self._option_string_actions, self.typed_flags, given)

    def _place(self, namespace: argparse.Namespace, word: str) -> None:
        """Gives a word from behind "--" to the positional that has room for it; argparse loses these."""
        for action in self._get_positional_actions():
            if action.nargs == "*":
                setattr(namespace, action.dest, [*getattr(namespace, action.dest), word])
                return
            if getattr(namespace, action.dest) is None:
                setattr(namespace, action.dest, word)
                return
        several = "; `--models FOLDER` or a YAML file serves several models" if self.prog == "quintet serve" else ""
        self.error(f"unexpected argument {word!r}{several}")

    def _as_typed(self, message: str) -> str:
        """argparse names all the flags that set the same."""
        for dest, flag in self.typed_flags.items():
            names = next("/".join(a.option_strings) for a in self._option_string_actions.values() if a.dest == dest)
            message = message.replace(f"argument {names}: ", f"argument {flag}: ", 1)
        return message

    def error(self, message: str) -> NoReturn:
        message = self._as_typed(self.name_translation()(message))
        print(f"{self.prog}: error: {message}\n`{self.prog} --help` lists what there is.", file=sys.stderr)
        raise SystemExit(2)


def _usage_name(action: argparse.Action) -> str:
    name = str(action.metavar or action.dest)
    if action.nargs is None:
        return name
    return f"[{name} ...]" if action.nargs == "*" else f"[{name}]"


# vLLM's short ways to the entries of a configuration
_STEMS = {
    "-O.": "--compilation-config.",
    "-cc.": "--compilation-config.",
    "-ac.": "--attention-config.",
    "-sc.": "--speculative-config.",
}


def normalize_argv(argv: Sequence[str]) -> list[str]:
    """Underscores in a flag's name become dashes, short stems long; what follows "=" or "--" stays as it is."""
    end = list(argv).index("--") if "--" in argv else len(argv)
    return [_with_dashes(word) if at < end else word for at, word in enumerate(argv)]


def _with_dashes(word: str) -> str:
    stem = next((stem for stem in _STEMS if word.startswith(stem)), None)
    if stem:
        word = _STEMS[stem] + word[len(stem) :]
    if not word.startswith("--"):
        return word
    name, equals, value = word.partition("=")
    return name.replace("_", "-") + equals + value


def _unknown_flag_error(flag: str, known: Collection[str]) -> str:
    advice = FLAGS.get(flag) or unsupported_reason(flag.lstrip("-").rstrip("+").replace("-", "_"))
    if advice:
        return f"there is no {flag}: {advice}"
    names = {each.lstrip("-"): each for each in known}  # two dashes alike would make short names alike
    match = names.get(nearest_name(flag.lstrip("-"), names) or "")
    return f"unknown flag {flag!r}" + (f"; did you mean {match!r}?" if match else "")


# ------------------------------------------------------------------------------------------------ dataclass to flags


@dataclass(frozen=True)
class _ArgumentType:
    """Parsing of a field from the command line."""

    read: Read
    metavar: str = "TEXT"
    many: bool = False  # the flag may be repeated, each adds one
    truth: bool = False  # --x and --no-x


def add_arguments(
    parser: argparse.ArgumentParser | Group,
    cls: type,
    exclude: Collection[str] = (),
    group: str | None = None,
    defaults: Mapping[str, Any] | None = None,
) -> None:
    """A flag for each field. What is not given stays out of the namespace.

    A field's metadata may hold help, group, aliases, flags, choices, metavar, parse; its type settles the rest.
    `defaults` are those of the command where they are not the dataclass's: the help shows them.
    """
    hints = typing.get_type_hints(cls)
    groups: dict[str, Any] = {}
    for each in _fields(cls):
        if each.name in exclude:
            continue
        title = group or each.metadata.get("group", "options")
        if title not in groups:
            groups[title] = parser if isinstance(parser, Group) else parser.add_argument_group(title)
        default = (defaults or {}).get(each.name, _default(each))
        _add(groups[title], cls, each, (_argument_type(hints[each.name]), default))


def _fields(cls: type) -> list[Field[Any]]:
    return [each for each in setting_fields(cls) if each.init and each.metadata.get("cli", True)]


def names_of(cls: type) -> list[str]:
    """Returns the fields that have flags."""
    return [each.name for each in _fields(cls)]


def flags_of(each: Field[Any]) -> list[str]:
    """A field's flags: its name, its aliases, and the short ones it lists."""
    names = (each.name, *each.metadata.get("aliases", ()))
    return [*each.metadata.get("flags", ()), *("--" + name.replace("_", "-") for name in names)]


def _default(each: Field[Any]) -> Any:
    return each.default_factory() if each.default_factory is not MISSING else each.default


def _add(target: Any, cls: type, each: Field[Any], how: tuple[_ArgumentType, Any]) -> None:
    shape, default = how
    if "nested" in each.metadata:
        _add_nested(target, cls, each)
        return
    text = _help(each, shape, default)
    options: dict[str, Any] = {"dest": _dest(cls, each.name), "default": argparse.SUPPRESS, "help": text}
    if shape.truth:
        target.add_argument(*flags_of(each), action=argparse.BooleanOptionalAction, **options)
        return
    choices = each.metadata.get("choices")
    metavar = each.metadata.get("metavar") or ("{" + ",".join(map(str, choices)) + "}" if choices else shape.metavar)
    if nargs := each.metadata.get("nargs"):
        options |= {"action": "extend", "nargs": nargs}
    elif shape.many:
        options["action"] = "append"
    target.add_argument(*flags_of(each), type=_checked(each, shape), metavar=metavar, **options)


def _add_nested(target: Any, cls: type, each: Field[Any]) -> None:
    """`--x-config JSON`, and a flag for each entry, `--x-config.entry`: one line of help names them all."""
    names, dest, holds = flags_of(each), _dest(cls, each.name), each.metadata["nested"]
    entries = dataclasses.fields(holds)
    help_text = f"{each.metadata['help']}; each entry has a flag: .{', .'.join(entry.name for entry in entries)}"
    unset: dict[str, Any] = {"default": argparse.SUPPRESS}
    target.add_argument(*names, type=_read(holds.entries), metavar="JSON", dest=dest, help=help_text, **unset)
    for entry in entries:
        # a switch may stand alone, or bring its word
        alone = {"nargs": "?", "const": True} if isinstance(entry.default, bool) else {}
        words = [f"{name}.{entry.name.replace('_', '-')}" for name in names if name.startswith("--")]
        words += [f"--{alias.replace('_', '-')}" for alias in entry.metadata["aliases"]]
        options = {"type": _read(entry.metadata["parse"]), "dest": f"{dest}.{entry.name}", **alone, **unset}
        target.add_argument(*words, help=argparse.SUPPRESS, **options)


def _dest(cls: type, name: str) -> str:
    return f"{cls.__name__}.{name}"  # two dataclasses may share a name


def _help(each: Field[Any], shape: _ArgumentType, default: Any) -> str:
    text = str(each.metadata.get("help", "")) + (
        "; may be repeated" if shape.many and not each.metadata.get("nargs") else ""
    )
    if isinstance(default, bool):
        text += " (default: yes)" if default else ""
    elif default not in (None, MISSING, (), [], ""):
        text += f" (default: {default})"
    return text.replace("%", "%%")


def _checked(each: Field[Any], shape: _ArgumentType) -> Read:
    """Reads the word by the field's type, then by the field's own check; argparse shows what either says.

    One entry of a list is checked when the dataclass is made, for the check is the list's.
    """
    check = each.metadata.get("parse") if not shape.many else None
    if each.metadata.get("words"):  # the check reads the word itself
        return _read(check or shape.read)
    return _read(lambda word: check(shape.read(word)) if check else shape.read(word))


def _read(read: Read) -> Read:
    """Such that argparse shows what it says."""

    def parse(word: str) -> Any:
        try:
            return read(word)
        except (ValueError, TypeError) as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return parse


def _argument_type(hint: Any) -> _ArgumentType:
    """Returns the parsing of a type: bool, int, float, str, mapping, list, and unions. Any is text, one or several."""
    if hint is Any:
        return _ArgumentType(str, many=True)
    kinds = {typing.get_origin(each) or each: each for each in _members(hint)}
    for kind in (list, tuple):
        if kind in kinds:
            element = typing.get_args(kinds[kind])[0]
            return _ArgumentType(integer, "N", many=True) if element is int else _ArgumentType(str, many=True)
    if dict in kinds or any(map(dataclasses.is_dataclass, kinds)):
        return _ArgumentType(_json, "JSON")
    if str in kinds:  # whatever else it may be, the field's own check reads the word
        return _ArgumentType(str)
    if bool in kinds:
        return _ArgumentType(str, truth=True)
    if float in kinds:
        return _ArgumentType(_number, "X")
    return _ArgumentType(integer, "N")


def _members(hint: Any) -> tuple[Any, ...]:
    hint = hint.type if isinstance(hint, dataclasses.InitVar) else hint
    union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    return typing.get_args(hint) if union else (hint,)


def read_setting(cls: type, name: str, word: str) -> Any:
    """Returns the value that a word has for a field, read as its flag reads it. ValueError says what was wanted."""
    each = next(each for each in _fields(cls) if each.name == name)
    shape = _argument_type(typing.get_type_hints(cls)[name])
    try:
        value = boolean(word) if shape.truth else _checked(each, shape)(word)
    except (ValueError, argparse.ArgumentTypeError) as error:
        raise ValueError(f"{name} {error}") from None
    return [value] if shape.many else value


def _number(word: str) -> float:
    try:
        return float(word)
    except ValueError:
        raise ValueError(f"must be a number, not {word!r}") from None


def _json(word: str) -> Any:
    try:
        return json.loads(word)
    except json.JSONDecodeError as error:
        raise ValueError(f"must be a JSON object such as '{{\"key\": 1}}': {error}") from None


# ------------------------------------------------------------------------------------------------ flags to dataclass


def given_settings(namespace: argparse.Namespace, cls: type) -> dict[str, Any]:
    """The fields that the user set, by name; entries of a configuration within by theirs, "x_config.entry"."""
    prefix = _dest(cls, "")
    return flatten_nested(
        cls, {name[len(prefix) :]: value for name, value in vars(namespace).items() if name.startswith(prefix)}
    )


def from_arguments(namespace: argparse.Namespace, cls: type[T], **defaults: Any) -> T:
    """The dataclass, checked by itself; `defaults` stand in for flags that were not given."""
    return cls(**unflatten_nested({**defaults, **given_settings(namespace, cls)}))
