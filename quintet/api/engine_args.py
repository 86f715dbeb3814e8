"""EngineArgs: vLLM's way to give an engine its settings, from Python and from a script's command line."""

import argparse
import sys
from typing import TYPE_CHECKING, Any, TypeVar

from quintet.common.suggestions import unknown_name_error
from quintet.config import BUNDLED, EngineConfig, setting_fields
from quintet.config.engine import by_field_name
from quintet.config.schema import flags
from quintet.config.schema.fields import read_field

A = TypeVar("A", bound="EngineArgs")
P = TypeVar("P", argparse.ArgumentParser, flags.Group)


class EngineArgs(EngineConfig):
    """An EngineConfig with fields that may still be set, under vLLM's names too: EngineArgs(model="bundled", seed=1).

    What does not go together is refused when an engine is made of it.
    """

    if not TYPE_CHECKING:  # a checker shall see the fields

        def __init__(self, model=BUNDLED, **kwargs):
            super().__init__(**by_field_name({"model": model, **kwargs}))

        def __setattr__(self, name, value):
            fields = {each.name: each for each in setting_fields(EngineConfig)}
            if name not in fields:
                raise AttributeError(unknown_name_error("engine argument", name, fields))
            object.__setattr__(self, name, read_field(fields[name], value))

    def create_engine_config(self) -> EngineConfig:
        """As it is now, checked as a whole, and fixed."""
        return self.replace()

    @staticmethod
    def add_cli_args(parser: P) -> P:
        """A flag for each setting, into a parser or a group of one; what was parsed has all of them by name."""
        before = len(parser._actions)
        flags.add_arguments(parser, EngineConfig)
        defaults = {each.name: each.default for each in setting_fields(EngineConfig) if "nested" not in each.metadata}
        for action in parser._actions[before:]:
            action.dest = action.dest.partition(".")[2]
            default = defaults.get(action.dest, argparse.SUPPRESS)
            action.default = list(default) if isinstance(default, tuple) else default  # flags add to it
        return parser

    @classmethod
    def from_cli_args(cls: type[A], args: argparse.Namespace) -> A:
        """Returns the EngineArgs of parsed arguments; a script's own arguments are ignored."""
        known = {each.name for each in setting_fields(EngineConfig)}
        return cls(**{name: value for name, value in vars(args).items() if name.partition(".")[0] in known})


class AsyncEngineArgs(EngineArgs):
    """The same, under the name that vLLM has for AsyncLLM's."""


class FlexibleArgumentParser(flags.Parser):
    """argparse's parser as vLLM's scripts use it: `--max_tokens` is `--max-tokens`, and typos name the nearest flag."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        return super().parse_known_args(flags.normalize_argv(sys.argv[1:] if args is None else args), namespace)
