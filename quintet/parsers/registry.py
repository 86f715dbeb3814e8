"""Parsers by name: ours, registered ones, and those of installed packages; and those that fit a checkpoint."""

import importlib.metadata
import importlib.util
import sys
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Generic, TypeVar

from quintet.parsers.formats import ReasoningParser, ToolParser
from quintet.parsers.reasoning_formats import REASONING_FORMATS
from quintet.parsers.response_template import parsers_of
from quintet.parsers.tool_formats import TOOL_FORMATS

P = TypeVar("P", ToolParser, ReasoningParser)

FROM_CHECKPOINT = ("beam", "hf")  # names of what the tokenizer's response_template describes


class Registry(Generic[P]):
    """One kind of parser. An installed package's is loaded when its name is first asked for, and no other."""

    def __init__(self, kind: type[P], what: str, group: str, formats: dict[str, P]) -> None:
        self._kind: type[P] = kind
        self._what, self._group = what, group
        self._parsers: dict[str, P] = {}
        self._names: dict[str, str] = {}  # also the aliases -> the parser's own name
        for name, parser in formats.items():
            self.add(name, parser)

    def add(self, name: str, parser: P) -> None:
        """ValueError if the name, or an alias of the parser's, is another one's."""
        for each in (name, *parser.aliases):
            if each in FROM_CHECKPOINT or self._parsers.get(self._names.get(each, ""), parser) != parser:
                raise ValueError(f"a {self._what} parser is already named {each!r}; give the new one another name")
        self._parsers[name] = parser
        self._names |= dict.fromkeys((name, *parser.aliases), name)

    def check(self, name: str) -> None:
        """ValueError if there is no parser of this name for any checkpoint."""
        if name not in FROM_CHECKPOINT:
            self.get(name)

    def get(self, name: str, response_template: Mapping[str, Any] | None = None) -> P:
        """Returns the parser with this name or alias, or the one that the checkpoint's response_template describes.
        ValueError if there is none."""
        if name in FROM_CHECKPOINT:
            return self._described(name, response_template)
        if name not in self._names:
            self._load(name)
        if name not in self._names:
            raise ValueError(f"no {self._what} parser is named {name!r}; there are {', '.join(self.names())}")
        return self._parsers[self._names[name]]

    def names(self) -> list[str]:
        """All that `get` takes, aliases and installed packages' too."""
        return sorted({*self._names, *FROM_CHECKPOINT, *importlib.metadata.entry_points(group=self._group).names})

    def items(self) -> list[tuple[str, P]]:
        """Each parser once, by its own name."""
        return list(self._parsers.items())

    def _described(self, name: str, template: Mapping[str, Any] | None) -> P:
        if template is None:
            why = "reads response_template of tokenizer_config.json, which this checkpoint does not have"
            raise ValueError(f"the {self._what} parser {name!r} {why}; name another parser, or none")
        for parser in parsers_of(template):
            if isinstance(parser, self._kind):
                return parser
        raise ValueError(f"the tokenizer's response_template has no {self._what}; name another parser, or none")

    def _load(self, name: str) -> None:
        for entry in importlib.metadata.entry_points(group=self._group, name=name):
            parser = entry.load()
            if not isinstance(parser, self._kind):
                raise ValueError(f"entry point {entry.value!r} of {self._group} must be a {self._kind.__name__}")
            self.add(name, parser)


TOOL_PARSERS = Registry(ToolParser, "tool", "quintet.tool_parsers", TOOL_FORMATS)
REASONING_PARSERS = Registry(ReasoningParser, "reasoning", "quintet.reasoning_parsers", REASONING_FORMATS)


def detect(
    template: str, model_type: str | None = None, special_tokens: Collection[str] = ()
) -> tuple[str | None, str | None]:
    """(name of the tool parser, name of the reasoning parser), each None where nothing speaks for one.

    A parser fits if the template has the texts that it writes; of several that fit, one of the model's family, else
    the one with the most telling signs. Without a template its special tokens stand for it.
    """
    text = template or "\n".join(special_tokens)
    return _fitting(TOOL_PARSERS, text, model_type or ""), _fitting(REASONING_PARSERS, text, model_type or "")


def _fitting(registry: Registry[P], text: str, model_type: str) -> str | None:
    fitting = [
        (name, parser)
        for name, parser in registry.items()
        if any(all(sign in text for sign in signs) for signs in parser.signs)
    ]
    of_family = [name for name, parser in fitting if model_type.startswith(parser.families)]
    return next(iter(of_family or [name for name, _ in fitting]), None)


def register(name: str, parser: ToolParser | ReasoningParser) -> None:
    """Makes a parser known by its name, and by its aliases. ValueError if one of them is taken."""
    if isinstance(parser, ToolParser):
        TOOL_PARSERS.add(name, parser)
    elif isinstance(parser, ReasoningParser):
        REASONING_PARSERS.add(name, parser)
    else:
        raise ValueError(f"parser {name!r} must be a ToolParser or a ReasoningParser, not {type(parser).__name__}")


_loaded: dict[Path, list[str]] = {}  # a file is run once, though it registers parsers of both kinds


def load_plugin(path: str | Path) -> list[str]:
    """Runs a Python file, which registers parsers -> their names.

    It is code with all the rights of this process: only for a path that the operator has given, never a caller.
    ValueError if it is no file, fails or registers nothing.
    """
    file = Path(path).resolve()
    if file in _loaded:
        return _loaded[file]
    if file.suffix != ".py" or not file.is_file():
        raise ValueError(f"parser plug-in {str(path)!r} must be a Python file; give the path of one")
    before = {*TOOL_PARSERS.names(), *REASONING_PARSERS.names()}
    spec = importlib.util.spec_from_file_location(f"quintet_parser_plugin_{file.stem}", file)
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)  # dataclasses look for their module there
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[spec.name]
        raise ValueError(f"parser plug-in {str(path)!r} failed: {type(error).__name__}: {error}") from error
    names = {*TOOL_PARSERS.names(), *REASONING_PARSERS.names()} - before
    if not names:
        raise ValueError(f"parser plug-in {str(path)!r} registered no parser; call quintet.parsers.register in it")
    _loaded[file] = sorted(names)
    return _loaded[file]
