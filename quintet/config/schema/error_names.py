"""Rewrites errors to name settings as the caller typed them: as flags, keys of a file or aliases."""

import contextlib
import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from quintet.config.schema.fields import setting_fields

# What may follow a name as its value; a JSON object within another is as deep as messages go.
_VALUE = r"'[^']*'|\"[^\"]*\"|\{(?:[^{}]|\{[^{}]*\})*\}|\[[^\]]*\]|\([^)]*\)|-?\w+(?:\.\w+)*"
# A name that is an English word is one of ours where a value follows, and in "use device", "port must be".
_USED = r"(?:(?<=use )|(?<=set )|(?<=give ))(?P<used>{names})(?=[,;.]|$| to )|^(?P<first>{names})(?= must | entry )"


class Spelling(NamedTuple):
    """Spelling of a setting as it was typed, or would be."""

    word: str  # "--max-model-len", "-tp", "max_model_len"
    file: str = ""  # where it is a key of one
    switch: bool = False  # --x and --no-x

    def with_value(self, value: str) -> str:
        """`value` as Python writes it."""
        if self.file:
            return f"{self.word}: {_as_json(value)}"
        if not self.word.startswith("-"):
            return f"{self.word}={value}"
        if value == "None":
            return f"no {self.word}"
        if self.switch and value in ("True", "False"):
            return self.word if value == "True" else self.word.replace("--", "--no-", 1)
        return f"{self.word} {_as_shell_word(value)}"


def _is_quoted(text: str, message: str) -> bool:
    if repr(text) in message or "/" not in text[:-1] or message.startswith(text):
        return repr(text) in message
    return re.search(rf"(?<![\w./~-]){re.escape(text)}", message) is not None  # not the middle of a longer path


def _as_json(value: str) -> str:
    return re.sub(
        r"\b(None|True|False)\b", lambda found: {"None": "null"}.get(found[0], found[0].lower()), value
    ).replace("'", '"')


def _as_shell_word(value: str) -> str:
    """Formats a value for a shell."""
    if value.startswith("{"):
        return f"'{_as_json(value)}'"
    if value.startswith("("):
        return " ".join(re.split(r"[(),\s]+", value)).strip()
    return value[1:-1] if value[0] in "'\"" else value


@dataclasses.dataclass(frozen=True)
class NameTranslation:
    """Spellings of settings as they were typed."""

    spelled: Mapping[str, Spelling] = dataclasses.field(default_factory=dict)  # by name, or "x_config.entry"
    texts: Mapping[str, Sequence[str]] = dataclasses.field(default_factory=dict)  # what was typed to each

    def __call__(self, message: str) -> str:
        """The message, with settings as they were spelled; that of a file's key begins with the file."""
        if not self.spelled:
            return message
        files: list[str] = []

        def reworded(found: re.Match[str]) -> str:
            groups = found.groupdict()
            spelling = self._of(next(filter(None, map(groups.get, ("name", "plain", "used", "first")))))
            if spelling.file and spelling.file not in files:
                files.append(spelling.file)
            value = groups["value"] or groups["plain_value"]
            return spelling.word if value is None else spelling.with_value(value)

        text = self._pattern().sub(reworded, message)
        text = text if files else self._add_flag_name(text)
        text = re.sub(r"^(argument (?:\S+/)?(\S+?)(?:/\S+)?: )\2 ", r"\1", text)  # argparse has named it already
        return "".join(f"{file}: " for file in files if file not in text) + text

    def _add_flag_name(self, message: str) -> str:
        """Puts the flag in front of a message that quotes the flag's text without its name."""
        if any(re.search(rf"(?<![\w-]){re.escape(word)}(?![\w-])", message) for word in self.texts):
            return message
        owners = [word for word, texts in self.texts.items() if any(_is_quoted(each, message) for each in texts)]
        return f"{', '.join(owners)}: {message}" if owners else message

    def with_more(self, spelled: Mapping[str, Spelling], texts: Mapping[str, Sequence[str]]) -> "NameTranslation":
        """Returns this wording with more spellings; for a setting in both, the new one counts."""
        return NameTranslation({**self.spelled, **spelled}, {**self.texts, **texts})

    def _of(self, name: str) -> Spelling:
        if name in self.spelled:
            return self.spelled[name]
        field, _, entry = name.partition(".")
        whole = self.spelled[field]
        return whole._replace(word=f"{whole.word}.{entry}", switch=False)

    def _pattern(self) -> re.Pattern[str]:
        names = sorted(map(re.escape, self.spelled), key=len, reverse=True)
        plain = "|".join(name for name in names if "_" not in name) or "(?!)"
        nested = {rf"{name.split('.')[0]}\.\w+" for name in self.spelled if "." in name}
        long = "|".join([*sorted(nested), *(name for name in names if "_" in name)])
        return re.compile(
            rf"(?<![\w.'\"/{{-])(?:(?P<name>{long or '(?!)'})(?![\w'\"/]|\.\w)(?:=(?P<value>{_VALUE}))?"
            rf"|(?P<plain>{plain})=(?P<plain_value>{_VALUE})|{_USED.format(names=plain)})"
        )


@contextlib.contextmanager
def keywords(kwargs: Mapping[str, object], config: type) -> Iterator[None]:
    """Makes a ValueError from the block name a setting by the keyword that the caller used."""
    given = {
        each.name: alias for each in setting_fields(config) for alias in each.metadata["aliases"] if alias in kwargs
    }
    try:
        yield
    except ValueError as error:
        if given and len(error.args) == 1:
            error.args = (NameTranslation({name: Spelling(alias) for name, alias in given.items()})(str(error)),)
        raise
