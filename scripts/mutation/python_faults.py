"""Faults in Python: a comparison off by one or turned round, a sum for a difference, a number that is one more."""

import ast
from collections.abc import Callable, Iterator
from types import CodeType

SWAPS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.And: ast.Or, ast.Or: ast.And,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult, ast.Mod: ast.Mult,
}  # fmt: skip


def faults(tree: ast.Module) -> list[tuple[int, str, Callable[[], None]]]:
    """(line, what, what makes it so) for each fault that there is room for, in the order of the file."""
    return sorted((each for node in _code(tree) for each in _of(node)), key=lambda each: each[:2])


def _code(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes that are run; not types, nor what a module or class declares."""
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list", "type_params", "defaults", "kw_defaults"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield child
                yield from _code(child)


def _of(node: ast.AST) -> Iterator[tuple[int, str, Callable[[], None]]]:
    line = getattr(node, "lineno", 0)
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in SWAPS:
        new = SWAPS[type(node.ops[0])]()
        yield line, _swap(node.ops[0], new), lambda: node.ops.__setitem__(0, new)  # type: ignore[arg-type]
    elif isinstance(node, ast.BinOp | ast.AugAssign | ast.BoolOp) and type(node.op) in SWAPS:
        yield line, _swap(node.op, other := SWAPS[type(node.op)]()), lambda: setattr(node, "op", other)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield line, "not -> not not", lambda: setattr(node, "operand", ast.UnaryOp(ast.Not(), node.operand))
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield line, f"{node.value} -> {not node.value}", lambda: setattr(node, "value", not node.value)
    elif isinstance(node, ast.Constant) and isinstance(node.value, int):
        yield line, f"{node.value} -> {node.value + 1}", lambda: setattr(node, "value", node.value + 1)


def _swap(old: ast.AST, new: ast.AST) -> str:
    return f"{type(old).__name__} -> {type(new).__name__}"


def broken(source: str, number: int, name: str) -> CodeType:
    """The source with one of its faults, compiled."""
    tree = ast.parse(source)
    faults(tree)[number][2]()
    return compile(ast.fix_missing_locations(tree), name, "exec")
