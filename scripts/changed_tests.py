"""Runs the tests that reach the files changed since a commit, the nearest first.

python scripts/changed_tests.py [--base COMMIT] [--list] [--nearest 20] [arguments of pytest]

Changed are the files that differ from the base, and those that git does not track yet. The base is where the branch
left origin/main or main; on main itself, with nothing uncommitted, the commit before. Python files reach tests by
imports (scripts/import_graph.py); other files by AREAS and by the strings that name them. Slow tests are left out.
"""

import argparse
import fnmatch
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from scripts import import_graph  # noqa: E402  the path is set first, so that the script runs by itself

CSRC = ("tests/platforms/cpu", "tests/csrc", "tests/ops", "tests/layers")
AREAS = (  # changed file: folders whose tests look at it
    ("csrc/cuda/*", ("tests/platforms/cuda", "tests/platforms/gpu")),
    ("csrc/*", CSRC),
    ("CMakeLists.txt", CSRC),
    ("quintet/_cpu.pyi", CSRC),
    ("examples/vendor-platform/*", ("tests/conformance", "tests/e2e/cli")),
    ("examples/model-family/*", ("tests/e2e/families",)),
    ("examples/machines/*", ("tests/e2e/parallel",)),
    ("quintet/conformance/template/*", ("tests/conformance", "tests/cli/test_new_platform.py")),
    ("quintet/bundled/*", ("tests/e2e/cli",)),
    ("quintet/bundled-vision/*", ("tests/e2e/media/test_bundled_vision.py",)),
    ("quintet/bundled-draft/*", ("tests/e2e/spec_decode/test_bundled_draft.py",)),
    ("*", ("tests/rules",)),  # which read every file
)
XDIST = ("--numprocesses=auto", "--maxprocesses=4", "--dist=loadfile", "--no-loadscope-reorder")  # in this order
NO_TESTS = 5  # pytest's exit code


def git(*words: str, root: Path = ROOT) -> list[str]:
    """The lines of a git command's output; none if it fails."""
    run = subprocess.run(["git", *words], cwd=root, capture_output=True, text=True)
    return run.stdout.splitlines() if run.returncode == 0 else []


def changed_files(base: str = "", root: Path = ROOT) -> list[str]:
    """Paths of the files that differ from the base, deleted ones too. ValueError if there is no such commit."""
    if base and not git("rev-parse", "--verify", "--quiet", f"{base}^{{commit}}", root=root):
        raise ValueError(f"BASE={base} is no commit here; git log shows the commits")
    untracked = git("ls-files", "--others", "--exclude-standard", root=root)
    mains = [name for name in ("origin/main", "main") if git("rev-parse", "--verify", "--quiet", name, root=root)]
    if not base and mains:
        base = git("merge-base", "HEAD", mains[0], root=root)[0]
    found = git("diff", "--name-only", "--no-renames", base or "HEAD", root=root)
    if not found and not untracked:
        found = git("diff", "--name-only", "--no-renames", "HEAD~1", root=root)
    return sorted({*found, *untracked})


def selected(paths: Sequence[str], root: Path = ROOT) -> tuple[list[str], int]:
    """Test files that reach the changed files, nearest first, and the number of all test files."""
    deleted = [path for path in paths if path.endswith(".py") and not (root / path).exists()]
    graph = import_graph.build(root, deleted)
    modules = [name for path in paths if (name := import_graph.dotted(path)) in graph.sources and path.endswith(".py")]
    named = {name for path in paths for name in graph.naming(path)}
    near = [path for path in paths if path in graph.tests]
    near += graph.nearest([*modules, *named], paths)
    near += [test for path in paths for folder in areas(path) for test in sorted(graph.tests) if _below(test, folder)]
    rules = ("tests/rules/",)  # any change reaches them: they come last
    order = sorted(dict.fromkeys(near), key=lambda test: test.startswith(rules) and test not in paths)
    return order, len(graph.tests)


def areas(path: str) -> Iterable[str]:
    """Folders and files of tests that look at a changed file: the first pattern that fits it, and the last."""
    fitting = [folders for pattern, folders in AREAS if fnmatch.fnmatch(path, pattern)]
    return dict.fromkeys([*fitting[0], *fitting[-1]])


def _below(test: str, folder: str) -> bool:
    return test == folder or test.startswith(f"{folder}/")


def run(tests: Sequence[str], words: Sequence[str]) -> int:
    """Runs the tests side by side; pytest's exit code, and 0 if none of them is to run."""
    command = [sys.executable, "-m", "pytest", "-m", "not slow and not sweep", *XDIST, *words, *tests]
    code = subprocess.run(command, cwd=ROOT).returncode
    return 0 if code == NO_TESTS else code


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", default="", help="commit that the files are compared with")
    parser.add_argument("--list", action="store_true", help="print the test files, and run none")
    parser.add_argument("--nearest", type=int, help="run the nearest so many files only")
    args, words = parser.parse_known_args()  # the others are pytest's
    try:
        paths = changed_files(args.base)
    except ValueError as error:
        parser.error(str(error))
    tests, count = selected(paths)
    print(f"{len(tests)} of {count} test files reach the change of {len(paths)} files", file=sys.stderr)
    tests = tests[: args.nearest]
    if args.list:
        print("\n".join(tests))
    sys.exit(0 if args.list or not tests else run(tests, words))


if __name__ == "__main__":
    main()
