"""Help of a command: its common flags, one group, flags by name, or all (vLLM's --help=TOPIC)."""

import argparse
import re
from collections.abc import Collection, Iterable, Sequence

from quintet.common.suggestions import nearest_name

ALL, GROUPS = "all", "listgroup"


class HelpFormatter(argparse.HelpFormatter):
    """Flags on the left, what they do on the right."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=34)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        """Both spellings of a switch as one word."""
        if isinstance(action, argparse.BooleanOptionalAction):
            return ", ".join(flag.replace("--", "--[no-]", 1) for flag in action.option_strings if "--no-" not in flag)
        return super()._format_action_invocation(action)


def topic_of(words: Iterable[str]) -> str | None:
    """Returns the topic of the first help flag among the words: "" for --help itself; None if there is none."""
    for word in words:
        if word in ("-h", "--help"):
            return ""
        if word == "--help-all":
            return ALL
        if word.startswith("--help="):
            return word.partition("=")[2]
    return None


class CommandHelp:
    """Help texts of one parser. `common`: the flags that plain --help shows, in this order; none: it shows all."""

    def __init__(self, parser: argparse.ArgumentParser, common: Sequence[str]) -> None:
        self._parser = parser
        self._common = [parser._option_string_actions[flag] for flag in common]
        self._groups: dict[str, list[argparse.Action]] = {}
        for group in parser._action_groups:
            flags = [each for each in group._group_actions if each.option_strings and each.help != argparse.SUPPRESS]
            if flags:
                self._groups.setdefault(group.title or "options", []).extend(flags)

    def text(self, topic: str) -> str:
        """Returns the help about a topic: "" for the common flags, a group, a flag or part of one, listgroup, all.

        ValueError names the nearest topic.
        """
        wanted = topic.lower().strip().lstrip("-").replace("_", "-")
        if not wanted and self._common:
            return self._short()
        if wanted in ("", ALL, "page"):
            return self._parser.format_help()
        if wanted == GROUPS:
            return self._list_groups()
        title = {_plain(each): each for each in self._groups}.get(_plain(wanted))
        if title is not None:
            return self._section(title, self._groups[title])
        actions = {id(each): each for group in self._groups.values() for each in group}.values()
        exact = [each for each in actions if any(flag.lstrip("-") == wanted for flag in each.option_strings)]
        found = exact or [each for each in actions if any(wanted in flag for flag in each.option_strings)]
        if not found:
            flags = [flag.lstrip("-") for each in actions for flag in each.option_strings]
            near = nearest_name(wanted, [*self._groups, *flags])
            known = f"did you mean {near!r}?" if near else f"groups are {', '.join(self._groups)}"
            raise ValueError(f"--help={topic[:80]}: no group or flag is called so; {known}")
        return self._section("flags", found)

    def _short(self) -> str:
        formatter = self._parser._get_formatter()
        formatter.add_usage(self._parser.usage, (), ())
        formatter.add_text(self._parser.description)
        for title, actions in (("arguments", self._positionals()), ("common flags", self._common)):
            formatter.start_section(title)
            formatter.add_arguments(actions)
            formatter.end_section()
        num = sum(map(len, self._groups.values())) - len(self._common)
        return (
            f"{formatter.format_help()}\n{num} more flags: --help=GROUP shows a group ({', '.join(self._groups)}),\n"
            "--help=FLAG one flag, --help-all all of them.\n"
        )

    def _positionals(self) -> list[argparse.Action]:
        return [each for each in self._parser._actions if not each.option_strings]

    def _section(self, title: str, actions: Collection[argparse.Action]) -> str:
        formatter = self._parser._get_formatter()
        formatter.start_section(title)
        formatter.add_arguments(actions)
        formatter.end_section()
        return formatter.format_help()

    def _list_groups(self) -> str:
        width = max(map(len, self._groups))
        lines = [f"  {title:{width}}  {len(flags)} flags" for title, flags in self._groups.items()]
        return "\n".join(["groups of flags, for --help=GROUP:", *lines, ""])


def _plain(title: str) -> str:
    """Returns a group's title as it is compared: ModelConfig and model-config are "model"."""
    return re.sub("[^a-z0-9]", "", title.lower().removesuffix("config"))
