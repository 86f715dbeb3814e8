"""Puts small faults into one file, one at a time, and tells which of them its tests do not notice.

python scripts/mutants.py quintet/engine/scheduler.py tests/engine/test_scheduler.py [--faults 20] [--seed 0]

A fault is a comparison that is off by one or turned round, a sum for a difference, an "or" for an "and", a number that
is one more, a condition that lost its "not". The file stays as it is: the tests run in a process that reads another
source in its place. What processes of their own do, they do without the fault. Tests that hang have noticed it.
"""

import argparse
import ast
import importlib.abc
import importlib.util
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import CodeType

ROOT = Path(__file__).resolve().parent.parent
SWAPS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.And: ast.Or, ast.Or: ast.And,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult, ast.Mod: ast.Mult,
}  # fmt: skip
PATIENCE = 10  # times what the tests take without a fault, and that many seconds more


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


class Faulty(SourceFileLoader):
    """Loads a module's source with one of its faults."""

    def __init__(self, name: str, file: Path, number: int) -> None:
        super().__init__(name, str(file))
        self._number = number

    def get_code(self, fullname: str) -> CodeType:
        return broken(Path(self.path).read_text(encoding="utf-8"), self._number, self.path)


class Instead(importlib.abc.MetaPathFinder):
    """Finds that one module in the place of what is installed."""

    def __init__(self, loader: Faulty) -> None:
        self._loader = loader

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if name != self._loader.name:
            return None
        return importlib.util.spec_from_file_location(name, self._loader.path, loader=self._loader)


def _run_one(file: Path, number: int, tests: Sequence[str]) -> int:
    """pytest's exit code with that fault."""
    import pytest

    module = ".".join(file.relative_to(ROOT).with_suffix("").parts)
    sys.meta_path.insert(0, Instead(Faulty(module, file, number)))
    return int(pytest.main(["-x", "-q", "-p", "no:cacheprovider", *tests]))


def _try(arguments: Sequence[str], seconds: float | None = None) -> bool:
    """Whether the tests pass."""
    command = [sys.executable, __file__, *arguments]
    try:
        run = subprocess.run(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=seconds)
    except subprocess.TimeoutExpired:
        return False
    return run.returncode == 0


def survivors(file: Path, tests: Sequence[str], wanted: int, seed: int) -> list[str]:
    """FILE:LINE and what was changed there, of the faults that no test noticed; says how it goes."""
    found = faults(ast.parse(file.read_text(encoding="utf-8")))
    chosen = sorted(random.Random(seed).sample(range(len(found)), min(wanted, len(found))))
    start = time.monotonic()
    if subprocess.run([sys.executable, "-m", "pytest", "-x", "-q", *tests], cwd=ROOT).returncode:
        raise SystemExit("the tests fail without a fault; mend that first")
    seconds, unseen = PATIENCE * (time.monotonic() - start + 1), []
    for number in chosen:
        line, what, _ = found[number]
        passed = _try([str(file), *tests, "--only", str(number)], seconds)
        where = f"{file.relative_to(ROOT)}:{line}: {what}"
        print(f"{'NOT SEEN' if passed else 'caught  '} {where}", flush=True)
        if passed:
            unseen.append(where)
    print(f"{len(chosen) - len(unseen)} of {len(chosen)} faults were caught, of {len(found)} that there is room for")
    return unseen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="the file that gets the faults")
    parser.add_argument("tests", nargs="+", help="what pytest is told to run")
    parser.add_argument("--faults", type=int, default=20, help="how many, drawn from all (20)")
    parser.add_argument("--seed", type=int, default=0, help="of the draw (0)")
    parser.add_argument("--only", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    file = args.file.resolve()
    if not file.is_file() or not file.is_relative_to(ROOT):
        parser.error(f"{args.file} is no file of this repository")
    if args.only is not None:
        sys.exit(_run_one(file, args.only, args.tests))
    sys.exit(bool(survivors(file, args.tests, args.faults, args.seed)))


if __name__ == "__main__":
    main()
