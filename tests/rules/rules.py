"""The rules of the house that no linter expresses; each takes a text and returns what breaks it, as `line what`."""

import ast
import io
import re
import tokenize
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

DEVICES = ("cpu", "cuda", "hip", "mps", "rocm", "tpu", "xpu")
LIBRARIES = ("nccl", "rccl", "xccl", "cudnn", "miopen")
DEVICE_STRING = re.compile(rf"(quintet\.platforms\.)?({'|'.join(DEVICES + LIBRARIES)})(:\d+)?")
# `.cpu` is missing on purpose: tensor.cpu() moves data and asks nothing
DEVICE_NAMES = {f"is_{device}" for device in DEVICES} | set(DEVICES) - {"cpu"} | set(LIBRARIES)

MAX_FILE = 400  # lines
MAX_FUNCTION = 60
MAX_PUBLIC_METHODS = 15

BROAD = re.compile(r"\bexcept\s*:|Exception\b")
ENVIRONMENT = {"environ", "environb", "getenv", "putenv", "unsetenv"}
PICKLES = {"pickle", "cloudpickle", "dill", "marshal", "shelve"}

# A docstring begins with a verb or the noun of the thing, not with a clause that has no subject.
CLAUSE = re.compile(r"(What|Whatever|Who|Whoever|Whom|Whose|Whether|Where|When|How|Which|Of)\b")
WORDS = re.compile(r"\b(nobody|whoever|somebody|elsewhere|said|told)\b", re.IGNORECASE)
MAX_FOLDER = 20  # modules
INDEXES = ("models", "kernels", "commands")  # folders with a module for each family, kernel and command

Function = ast.FunctionDef | ast.AsyncFunctionDef


def device_words(text: str) -> list[str]:
    """A device's name as a whole string, and attributes, names and functions such as `is_cuda`."""
    found = []
    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.Constant(value=str(word)) if DEVICE_STRING.fullmatch(word):
                found.append(f"{node.lineno} {word!r}")
            case ast.Attribute(attr=word) | ast.Name(id=word) if word in DEVICE_NAMES:
                found.append(f"{node.lineno} {word}")
            case ast.FunctionDef(name=word) | ast.AsyncFunctionDef(name=word) if word in DEVICE_NAMES:
                found.append(f"{node.lineno} def {word}")
    return found


def outgrown(text: str) -> list[str]:
    """Files, functions and classes over their limit."""
    found = []
    if (lines := len(text.splitlines())) > MAX_FILE:
        found.append(f"1 the file has {lines} lines; {MAX_FILE} are allowed")
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, Function):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if lines > MAX_FUNCTION:
                found.append(f"{node.lineno} {node.name} has {lines} lines; {MAX_FUNCTION} are allowed")
        if isinstance(node, ast.ClassDef):
            public = [f for f in node.body if isinstance(f, Function) and not f.name.startswith("_")]
            if len(public) > MAX_PUBLIC_METHODS:
                found.append(f"{node.lineno} {node.name} has {len(public)} public methods")
    return found


def code_lines(text: str) -> int:
    """Lines that are neither blank nor comments nor parts of docstrings."""
    blank = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    code: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in blank:
            code.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.Module, ast.ClassDef, *Function.__args__)) and ast.get_docstring(node) is not None:
            code.difference_update(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    return len(code)


def undocumented(text: str) -> list[str]:
    """A module that holds anything opens with a line that says what it owns."""
    tree = ast.parse(text)
    if not tree.body:
        return []
    doc = ast.get_docstring(tree, clean=False)
    if doc is None:
        return ["1 no module docstring"]
    first, *rest = doc.splitlines()
    if not first.strip() or (rest and rest[0].strip()):
        return ["1 the module docstring's first paragraph is not one line"]
    return []


def _broad(kind: ast.expr | None) -> bool:
    return kind is None or (isinstance(kind, ast.Name) and kind.id in {"Exception", "BaseException"})


def _does_nothing(body: list[ast.stmt]) -> bool:
    return all(
        isinstance(s, ast.Pass | ast.Continue) or (isinstance(s, ast.Expr) and isinstance(s.value, ast.Constant))
        for s in body
    )


def swallowed(text: str) -> list[str]:
    """`except Exception: pass` in each of its spellings."""
    if not BROAD.search(text):
        return []
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ExceptHandler) and _broad(node.type) and _does_nothing(node.body):
            found.append(f"{node.lineno} an exception of any kind vanishes")
        if isinstance(node, ast.Call) and any(_broad(a) for a in node.args):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if name == "suppress":
                found.append(f"{node.lineno} an exception of any kind vanishes")
    return found


def _imports(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom) and node.module and not node.level:
        return [f"{node.module}.{alias.name}" for alias in node.names]
    return []


def environment_or_pickle(text: str) -> list[str]:
    """What ruff bans everywhere else and cannot ban in platforms/, where its one list of banned names is off."""
    found = []
    for node in ast.walk(ast.parse(text)):
        names = _imports(node)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            names = [f"{node.value.id}.{node.attr}"]
        for name in names:
            head, _, tail = name.partition(".")
            if (head == "os" and tail in ENVIRONMENT) or head in PICKLES or name in {"torch.load", "torch.save"}:
                found.append(f"{getattr(node, 'lineno', 0)} {name}")
    return found


def from_root(text: str) -> list[str]:
    """`from quintet import LLM` inside the package: an import upward that the contracts leave to this rule.

    Modules and the compiled `_cpu` are lower-case; what the package offers is not.
    """
    if "from quintet import" not in text:
        return []
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and node.module == "quintet":
            found += [f"{node.lineno} {a.name} from quintet" for a in node.names if not a.name.islower()]
    return found


def mocked(text: str) -> list[str]:
    """Tests build real objects: a mock agrees with whatever it is asked."""
    if "mock" not in text:
        return []
    found = []
    for node in ast.walk(ast.parse(text)):
        if any(name.startswith("unittest.mock") or name == "mock" for name in _imports(node)):
            found.append(f"{getattr(node, 'lineno', 0)} unittest.mock")
    return found


PATH = re.compile(r"[\w.-]+/([\w.<>*-]+/)*[\w.<>*-]*")
SUFFIXES = (".py", ".cpp", ".h", ".md", ".toml", ".txt", ".yaml", ".json", "/")


def named_paths(markdown: str) -> list[str]:
    """The files and folders that a page names in backticks; a name without a folder (a checkpoint's
    `config.json`) and a pattern (`platforms/<x>/`) are none."""
    spans = re.findall(r"`([^`\n]+)`", markdown)
    return [s for s in spans if PATH.fullmatch(s) and s.endswith(SUFFIXES) and not set(s) & set("<>*")]


def clause_openings(text: str) -> list[str]:
    """Docstrings that begin with a relative clause ("What ...", "Whether ...") in place of a verb or a noun."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.Module, ast.ClassDef, *Function.__args__)) and (doc := ast.get_docstring(node)):
            if CLAUSE.match(doc):
                found.append(f"{node.body[0].lineno} {doc.splitlines()[0]!r}")
    return found


def crowded(modules: Iterable[Path]) -> list[str]:
    """Folders that hold more modules than one reads at a glance."""
    counts = Counter(path.parent for path in modules if path.parent.name not in INDEXES)
    return [
        f"{folder}: {count} modules; {MAX_FOLDER} are allowed" for folder, count in counts.items() if count > MAX_FOLDER
    ]


def house_words(text: str) -> list[str]:
    """Comments, docstrings and messages of Python that say "said", "told", "nobody" ... for what has a field's term."""
    found = []
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        prose = token.type in (tokenize.COMMENT, tokenize.STRING) and re.sub(r"\{[^{}]*\}", "", token.string)
        if prose and " " in prose and (word := WORDS.search(prose)):
            found.append(f"{token.start[0] + prose[: word.start()].count(chr(10))} {word.group()}")
    return found


def house_words_of_page(text: str) -> list[str]:
    """The same words in a document, outside its code blocks and quoted code."""
    prose = re.sub(r"^```.*?^```|`[^`]*`", lambda code: "\n" * code.group().count("\n"), text, flags=re.M | re.S)
    return [
        f"{number} {word.group()}" for number, line in enumerate(prose.splitlines(), 1) if (word := WORDS.search(line))
    ]
