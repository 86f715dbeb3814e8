"""Static import graph of quintet, its tools and its tests: which test files reach a module, the nearest first.

Imports inside functions count; those under `if TYPE_CHECKING` do not. A module that is loaded by a string counts too:
its dotted name in a literal, a prefix and a name ("quintet.cli.commands." + "serve"), or a package that imports its
modules by their names (model families, platforms). conftest.py counts for every test file below its folder.
"""

import ast
import fnmatch
import heapq
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

FOLDERS = ("quintet", "tools/quintet_tools", "tests", "benchmarks", "scripts", "examples")
IMPORT, BY_NAME = 1, 2  # distance of an import, and of a name in a string
DOTTED = re.compile(r"\b(?:quintet|quintet_tools|tests|scripts|benchmarks)(?:\.\w+)+")
SERVERS = ("tests/e2e/", "tests/reports/servers/", "tests/server/processes/", "tests/server/test_")  # slow to start


@dataclass
class Source:
    """One Python file: its imports and the strings in it."""

    path: str  # below the root
    name: str  # dotted
    package: str  # that its relative names belong to
    imports: list[tuple[str, str]] = field(default_factory=list)  # (module, name in it or "")
    strings: set[str] = field(default_factory=set)
    words: set[str] = field(default_factory=set)  # long ones, of code and comments
    tables: dict[str, str] = field(default_factory=dict)  # name: module, as in a package's lazy names
    by_name: list[str] = field(default_factory=list)  # packages that it imports modules of by their names
    walks: bool = False  # imports every module of a package


def dotted(path: str) -> str:
    """Returns the module's name of a file: tools/quintet_tools/x.py is quintet_tools.x."""
    parts = path.removeprefix("tools/").removesuffix(".py").split("/")
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def read(root: Path, path: str) -> Source:
    name = dotted(path)
    package = name if path.endswith("__init__.py") else name.rpartition(".")[0]
    text = (root / path).read_text(encoding="utf-8")
    source = Source(path, name, package, words=set(re.findall(r"\w{5,}", text)) if is_test(path) else set())
    try:
        tree = ast.parse(text)
    except SyntaxError:
        return source
    calls = set()
    for node in _run(tree):
        match node:
            case ast.Import():
                source.imports += [(alias.name, "") for alias in node.names]
            case ast.ImportFrom():
                above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
                module = ".".join([*above, *([node.module] if node.module else [])])
                source.imports += [(module, alias.name) for alias in node.names]
            case ast.Constant(value=str(text)):
                source.strings.add(text)
            case ast.Dict():
                source.tables |= {
                    key.value: value.value
                    for key, value in zip(node.keys, node.values, strict=True)
                    if isinstance(key, ast.Constant) and isinstance(value, ast.Constant)
                    if isinstance(key.value, str) and isinstance(value.value, str)
                }
            case ast.JoinedStr(values=[ast.FormattedValue(), ast.Constant(value=str(text)), *_]) if text[:1] == ".":
                source.by_name.append(f"{package}{text}".rstrip("."))
            case ast.Call(func=ast.Attribute(attr=attribute) | ast.Name(id=attribute)):
                calls.add(attribute)
    source.walks = {"iter_modules", "import_module"} <= calls
    if "import_module" not in calls:
        source.by_name = []
    return source


def _run(tree: ast.AST) -> Iterator[ast.AST]:
    """The nodes without docstrings and `if TYPE_CHECKING`."""
    for child in ast.iter_child_nodes(tree):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            for other in child.orelse:
                yield from _run(other)
            continue
        if isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant):
            continue
        yield child
        yield from _run(child)


@dataclass
class Graph:
    """The files, and for each module the modules that load it, with their distance."""

    sources: Mapping[str, Source]  # by module
    loaded_by: dict[str, dict[str, int]] = field(default_factory=lambda: defaultdict(dict))

    @cached_property
    def tests(self) -> dict[str, str]:
        """Test files: path, module."""
        return {s.path: s.name for s in self.sources.values() if is_test(s.path)}

    @cached_property
    def breadth(self) -> dict[str, int]:
        """Number of modules that each module loads itself: of two tests the narrower comes first."""
        loads: dict[str, int] = defaultdict(int)
        for loaders in self.loaded_by.values():
            for name in loaders:
                loads[name] += 1
        return loads

    def link(self, loader: str, module: str, distance: int) -> None:
        if loader != module:
            before = self.loaded_by[module].get(loader, distance)
            self.loaded_by[module][loader] = min(before, distance)

    def distances(self, changed: Iterable[str]) -> dict[str, int]:
        """The distance of each module that reaches one of the changed modules."""
        near = dict.fromkeys(changed, 0)
        queue = [(0, name) for name in sorted(near)]
        while queue:
            distance, name = heapq.heappop(queue)
            if distance > near[name]:
                continue
            for loader, more in self.loaded_by.get(name, {}).items():
                if distance + more < near.get(loader, 1 << 30):
                    near[loader] = distance + more
                    heapq.heappush(queue, (distance + more, loader))
        return near

    def nearest(self, changed: Iterable[str], paths: Iterable[str] = ()) -> list[str]:
        """Test files that reach the changed modules, nearest first; `paths` are the changed files."""
        near = self.distances(changed)
        return sorted(
            (path for path, name in self.tests.items() if name in near),
            key=lambda path: (self._rank(path, near[self.tests[path]], paths), self.breadth[self.tests[path]], path),
        )

    def _rank(self, test: str, distance: int, paths: Iterable[str]) -> int:
        """The distance, less where the test's folder mirrors a changed file's, or its name or text has the file's."""
        bonus = 0
        for path in paths:
            home = "tests/" + path.removeprefix("tools/quintet_tools/").removeprefix("quintet/").rpartition("/")[0]
            mirrors = test.startswith(f"{home.rstrip('/')}/")
            stem = path.rpartition("/")[2].partition(".")[0]
            named = len(stem) > 2 and stem in test.rpartition("/")[2]
            bonus = max(bonus, 3 * mirrors + 2 * named + 2 * (stem in self.sources[self.tests[test]].words))
        return distance - bonus + 3 * test.startswith(SERVERS)

    def naming(self, path: str) -> set[str]:
        """Modules that name a file in a string: its path, its name, a pattern, or the parts of its folder."""
        folder, _, name = path.rpartition("/")
        parts = set(folder.split("/")) if folder.count("/") else {name}
        python = path.endswith(".py")  # too many have the same name
        found = set()
        for source in self.sources.values():
            if parts <= source.strings or any(_names(text, path, "" if python else name) for text in source.strings):
                found.add(source.name)
        return found - {dotted(path)}


def is_test(path: str) -> bool:
    return path.startswith("tests/") and path.rpartition("/")[2].startswith("test_") and path.endswith(".py")


def _names(text: str, path: str, name: str) -> bool:
    if "*" in text:
        return "/" in text and " " not in text and fnmatch.fnmatch(path, text)
    return text == path or bool(name) and (text == name or text.endswith(f"/{name}"))


def build(root: Path, deleted: Iterable[str] = ()) -> Graph:
    """Reads the files below the root. Files that are gone still stand for the modules that others import."""
    files = [p for folder in FOLDERS for p in sorted((root / folder).rglob("*.py"))]
    paths = [p.relative_to(root).as_posix() for p in files if "checkpoints" not in p.parent.parts or "tests" in p.parts]
    paths += [p.relative_to(root).as_posix() for p in files if "quintet_tools" in p.parts]
    sources = {source.name: source for source in (read(root, path) for path in dict.fromkeys(paths))}
    for path in deleted:
        sources.setdefault(dotted(path), Source(path, dotted(path), dotted(path).rpartition(".")[0]))
    graph = Graph(sources)
    families = {
        f"{package}.{word}": package
        for source in sources.values()
        if source.path.endswith("__init__.py")
        for package in source.by_name
        for word in _children(sources, package)
    }
    for source in sources.values():
        _link_imports(graph, source)
        _link_strings(graph, source)
    for name, package in families.items():
        _link_users(graph, name, package)
    for path, name in graph.tests.items():
        for folder in [*Path(path).parents][:-1]:
            if (conftest := dotted(f"{folder.as_posix()}/conftest.py")) in sources:
                graph.link(name, conftest, IMPORT)
    return graph


def _children(sources: Mapping[str, Source], package: str) -> list[str]:
    return [name.rpartition(".")[2] for name in sources if name.rpartition(".")[0] == package]


def _link_imports(graph: Graph, source: Source) -> None:
    for module, name in source.imports:
        if name and f"{module}.{name}" in graph.sources:
            target = f"{module}.{name}"
        else:
            home = graph.sources[module].tables.get(name, "") if name and module in graph.sources else ""
            target = home if home in graph.sources else _known(graph.sources, module)
        if not target:
            continue
        graph.link(source.name, target, IMPORT)
        for above in _above(graph.sources, target):
            graph.link(source.name, above, IMPORT)
        if source.walks and graph.sources[target].path.endswith("__init__.py"):
            for word in _children(graph.sources, target):
                graph.link(source.name, f"{target}.{word}", BY_NAME)


def _link_strings(graph: Graph, source: Source) -> None:
    lazy = set(source.tables.values()) if source.path.endswith("__init__.py") else set()
    prefixes = [text[:-1] for text in source.strings if text.endswith(".") and text[:-1] in graph.sources]
    for text in source.strings - lazy:
        for match in DOTTED.finditer(text):
            if target := _known(graph.sources, match.group()):
                graph.link(source.name, target, BY_NAME)
        for package in [*prefixes, *source.by_name]:
            if f"{package}.{text}" in graph.sources:
                graph.link(source.name, f"{package}.{text}", BY_NAME)


def _link_users(graph: Graph, name: str, package: str) -> None:
    """Tests and tools that name a module which its package loads by that name, unless the package names it itself."""
    if package in graph.loaded_by[name]:
        return
    word = name.rpartition(".")[2]
    names = {word, *(alias for alias, home in graph.sources[package].tables.items() if home == word)}
    for source in graph.sources.values():
        if names & source.strings and not source.path.startswith("quintet/"):
            graph.link(source.name, name, BY_NAME)


def _known(sources: Mapping[str, Source], name: str) -> str:
    """The longest beginning of a dotted name that is a module here; "" for a bare package's name."""
    while name and name not in sources:
        name = name.rpartition(".")[0]
    return name


def _above(sources: Mapping[str, Source], name: str) -> Iterator[str]:
    while name := name.rpartition(".")[0]:
        if name in sources:
            yield name
