"""Names of modules as quantization configurations list them: exact ones, regular expressions and wildcards.

A pattern comes from an unknown checkpoint, and is tried on every module: what could take long to match is refused.
"""

import functools
import math
import re
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from quintet.interface.weights import StoredTensor, WeightReader

MAX_PATTERN_LENGTH = 2000  # characters of a pattern
MAX_UNBOUNDED = 5  # quantifiers without an end on one way through a pattern: each may try every place of a name
MAX_NAME_LENGTH = 64  # of a name
MAX_WAYS = 8 * math.comb(
    MAX_NAME_LENGTH, MAX_UNBOUNDED
)  # through a pattern: so many quantifiers, or 25 optional characters
TEXT_TOWER = "language_model"  # the part of a path that models with other towers put around the text model's


@dataclass(frozen=True)
class ModuleNames:
    """Names of modules in a list. Exact names are looked up, patterns tried one after the other."""

    exact: frozenset[str] = frozenset()
    patterns: tuple[re.Pattern[str], ...] = ()  # from the beginning of a name

    def has(self, names: Iterable[str]) -> bool:
        """True if one of a module's names is meant."""
        return any(name in self.exact or any(each.match(name) for each in self.patterns) for name in names)

    def has_or_contains(self, names: Iterable[str]) -> bool:
        """The same where an exact name means all that is inside it too."""
        known = list(names)
        inside = (name[: found.start()] for name in known for found in re.finditer(r"\.", name))
        return self.has(known) or any(each in self.exact for each in inside)


def regex_names(names: Iterable[object], where: str) -> ModuleNames:
    """Reads a list in which "re:" begins an expression, matched from a name's beginning. ValueError if invalid."""
    exact, patterns = set(), []
    for name in names:
        if not isinstance(name, str) or not name or len(name) > MAX_PATTERN_LENGTH:
            raise ValueError(f"{where} lists {reprlib.repr(name)}, which is no module's name")
        if name.startswith("re:"):
            patterns.append(compile_pattern(name.removeprefix("re:"), where))
        else:
            exact.add(name)
    return ModuleNames(frozenset(exact), tuple(dict.fromkeys(patterns)))


def wildcard_names(names: Iterable[object], where: str) -> ModuleNames:
    """Reads a list with "*" for any characters, "?" for one and "[ab]" for one of these. ValueError if invalid."""
    exact, patterns = set(), []
    for name in names:
        if not isinstance(name, str) or not name or len(name) > MAX_PATTERN_LENGTH:
            raise ValueError(f"{where} lists {reprlib.repr(name)}, which is no module's name")
        pieces = _WILD.split(name)
        if len(pieces) == 1:
            exact.add(name)
        else:
            patterns.append(compile_pattern("".join(map(_wildcard_regex, pieces)) + r"\Z", where))
    return ModuleNames(frozenset(exact), tuple(dict.fromkeys(patterns)))


_WILD = re.compile(r"(\*+|\?|\[!?[\w\-]+\])")


def _wildcard_regex(piece: str) -> str:
    """A piece of a name with wildcards, as an expression."""
    if piece.startswith("*") or piece == "?":
        return ".*" if piece != "?" else "."
    return piece.replace("[!", "[^") if _WILD.fullmatch(piece) else re.escape(piece)


@dataclass(frozen=True)
class PathParts:
    """Whole parts of paths: "mlp.gate" is in "layers.3.mlp.gate", and not in "layers.3.mlp.gate_proj".

    A model of many experts has tens of thousands of modules: parts are looked up, and patterns alone are tried.
    """

    exact: frozenset[str] = frozenset()
    patterns: tuple[re.Pattern[str], ...] = ()  # anywhere in a name

    def has(self, module: str) -> bool:
        pieces = module.split(".")
        inside = (".".join(pieces[i:j]) for i in range(len(pieces)) for j in range(i + 1, len(pieces) + 1))
        return (bool(self.exact) and any(map(self.exact.__contains__, inside))) or any(
            each.search(module) for each in self.patterns
        )


def path_parts(names: Iterable[str]) -> PathParts:
    """Reads names in which ".*" stands for anything between. ValueError for one that could take long to match."""
    plain = [name.removeprefix("re:").strip("^$").replace("\\.", ".") for name in names]
    patterned = [name for name in plain if ".*" in name or len(name) > MAX_PATTERN_LENGTH]
    return PathParts(frozenset(plain) - {*patterned}, tuple(dict.fromkeys(map(_subpath_regex, patterned))))


def _subpath_regex(name: str) -> re.Pattern[str]:
    pieces = ".*".join(re.escape(piece) for piece in name.split(".*"))
    return compile_pattern(rf"(^|\.){pieces}(\.|$)", "quantization_config")


@functools.lru_cache(4096)
def compile_pattern(pattern: str, where: str) -> re.Pattern[str]:
    """Compiled; ValueError for what is none, or could take long: repeated groups, references, too many choices."""
    wrong = f"{where} has the pattern {reprlib.repr(pattern)}, "
    if len(pattern) > MAX_PATTERN_LENGTH or _ways(pattern) > MAX_WAYS:
        raise ValueError(f"{wrong}which could take long to match; name the modules one by one")
    try:
        return re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(f"{wrong}which is no regular expression: {error}") from None


def _ways(pattern: str) -> int:
    """Ways through a pattern, in a name of MAX_NAME_LENGTH, at most. Too many where a quantifier repeats a group,
    where what a group matched is referred to, and where comments or a verbose mode hide either."""
    plain = re.sub(r"\[\^?\]?(?:\\.|[^\]\\])*\]", "c", re.sub(r"\\[^\d]", "e", pattern), flags=re.DOTALL)
    if re.search(r"\\\d|\(\?P=|\)\??[*+{]", re.sub(r"\)\?(?![*+{])", ")", plain)) or _VERBOSE_OR_COMMENT.search(
        pattern
    ):
        return MAX_WAYS + 1
    groups = [[(0, 1)]]  # that are open, with their alternatives: quantifiers without an end, and ways but for them
    for token in _TOKENS.findall(plain):
        if token.startswith("("):
            groups.append([(0, 1)])
        elif token == "|":
            groups[-1].append((0, 1))
        elif token == ")" and len(groups) > 1:
            groups[-1][-1] = _after(groups.pop(), groups[-1][-1])
        elif token[0] in "*+?{" and token != "{":
            unbounded, ways = groups[-1][-1]
            groups[-1][-1] = (unbounded, 2 * ways) if token[0] == "?" else (unbounded + 1, ways)
    unbounded, ways = functools.reduce(lambda before, each: _after(each, before), groups, (0, 1))
    return math.comb(MAX_NAME_LENGTH, unbounded) * ways if unbounded <= MAX_UNBOUNDED else MAX_WAYS + 1


def _after(alternatives: Sequence[tuple[int, int]], before: tuple[int, int]) -> tuple[int, int]:
    """A group's ways, behind what comes before it."""
    unbounded, ways = (list(each) for each in zip(*alternatives, strict=True))
    return before[0] + max(unbounded), before[1] * sum(ways)


_TOKENS = re.compile(r"\(\?|[()|]|[*+][?+]?|\{\d*,\d*\}[?+]?|\?[?+]?|.", re.DOTALL)
_VERBOSE_OR_COMMENT = re.compile(r"\(\?(#|[aiLmsu]*x)")


@dataclass(frozen=True, eq=False)
class CheckpointModules:
    """The modules of a checkpoint, as its files have them."""

    files: Mapping[str, StoredTensor] = field(default_factory=dict)  # its tensors, by the modules' names

    def names(self, module: str) -> tuple[str, ...]:
        """Returns the names that a configuration may have for a module."""
        return module_aliases(module, self._filed.get(module))

    def is_inside(self, module: str) -> bool:
        """True if it is in the blocks, or held quantized though it is not (a head)."""
        return any(each.isdecimal() for each in module.split(".")) or f"{module}.weight_scale" in self.files

    @functools.cached_property
    def _filed(self) -> Mapping[str, str]:
        """Our names of modules -> their files', where these differ."""
        pairs = ((ours.rpartition(".")[0], each.name.rpartition(".")[0]) for ours, each in self.files.items())
        return {ours: theirs for ours, theirs in pairs if theirs and ours != theirs}


@dataclass(frozen=True, eq=False)
class ListedPlan:
    """A plan by lists of names: what is ignored is in floats, the first that names a module decides, then `rest`."""

    rules: tuple[tuple[ModuleNames, WeightReader | None], ...]
    default: WeightReader | None
    ignored: ModuleNames
    modules: CheckpointModules = CheckpointModules()

    def reader(self, module: str) -> WeightReader | None:
        names = self.modules.names(module)
        if self.ignored.has_or_contains(names):
            return None
        for each, how in self.rules:
            if each.has(names):
                return how
        return self.default if self.modules.is_inside(module) else None


def module_aliases(module: str, filed: str | None = None) -> tuple[str, ...]:
    """The names that a configuration may have for a module: ours, its file's, and those of a model with towers."""
    towered = [f"{TEXT_TOWER}.{module}"]
    if module.startswith("model."):
        towered.append(f"model.{TEXT_TOWER}.{module.removeprefix('model.')}")
    return tuple(dict.fromkeys([module, filed or module, *towered]))
