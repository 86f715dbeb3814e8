"""Prints the signatures that a platform is written against: the contract, its plain data, and the ops.

tests/conformance/contract_snapshot.txt holds what this printed last; after a change that is meant, and written down in
docs/contract-changes.md: python scripts/contract.py > tests/conformance/contract_snapshot.txt
"""

import ast
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "quintet"
MODULES = ("interface/platform.py", "interface/stage_channel.py", "interface/types.py", "interface/weights.py")
SPECIAL = ("__call__", "__init__", "__new__")  # methods that count although their names are not public
Function = ast.FunctionDef | ast.AsyncFunctionDef


def snapshot() -> str:
    """One signature to a line."""
    lines = []
    for module in MODULES:
        lines += [f"# quintet/{module}", *_members(_tree(PACKAGE / module).body, ""), ""]
    lines.append("# quintet/ops")
    for path in sorted((PACKAGE / "ops").rglob("*.py")):
        for node in _tree(path).body:
            marks = _decorators(node) if isinstance(node, Function) else []
            if isinstance(node, Function) and marks and marks[0].startswith("Op"):
                lines.append("".join(f"@{each} " for each in marks if each != "Op") + _signature(node))
    return "\n".join(lines) + "\n"


def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def _members(body: list[ast.stmt], indent: str) -> Iterator[str]:
    """What is public of a module or class, in the order of the file."""
    for node in body:
        match node:
            case ast.ClassDef() if _public(node.name):
                bases = ", ".join(map(ast.unparse, node.bases))
                yield from (f"{indent}@{each}" for each in _decorators(node))
                yield f"{indent}class {node.name}({bases})"
                yield from _members(node.body, indent + "    ")
            case ast.FunctionDef() | ast.AsyncFunctionDef() if _public(node.name) or node.name in SPECIAL:
                marks = "".join(f"@{each} " for each in _decorators(node))
                yield f"{indent}{marks}{_signature(node)}"
            case ast.AnnAssign(target=ast.Name(id=name)) if _public(name):
                yield indent + ast.unparse(node)
            case ast.Assign(targets=[ast.Name(id=name)]) if _public(name):
                yield indent + ast.unparse(node)


def _public(name: str) -> bool:
    return not name.startswith("_")


def _decorators(node: ast.ClassDef | Function) -> list[str]:
    return [ast.unparse(each) for each in node.decorator_list]


def _signature(node: Function) -> str:
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    return f"{node.name}({ast.unparse(node.args)}){returns}"


if __name__ == "__main__":
    print(snapshot(), end="")
