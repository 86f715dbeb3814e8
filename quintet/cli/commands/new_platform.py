"""Write an installable package with a platform of your own: it runs at once, and is then replaced part by part."""

import argparse
import keyword
import shlex
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, metadata
from pathlib import Path

from quintet import __version__, conformance
from quintet.common.distribution import DISTRIBUTION, checkout, install_hint
from quintet.common.value_parsers import text
from quintet.config import option
from quintet.config.schema import flags

MAX_NAME = 30  # characters of a name
_FILES = {  # template -> where it goes
    "pyproject.toml": "pyproject.toml",
    "README.md": "README.md",
    "gitignore": ".gitignore",
    "workflow.yml": ".github/workflows/conformance.yml",
    "init.py": "@module@/__init__.py",
    **{each: f"@module@/{each}" for each in ("platform.py", "device.py", "attention.py", "ops.py")},
    "test_conformance.py": "tests/test_conformance.py",
}


@dataclass(frozen=True)
class PlatformDestination:
    """Destination of the package."""

    path: str = option(".", text, "folder to put the package's folder into", group="package", metavar="DIR")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("NAME", nargs="?", help="of the platform: what --device will take, such as tinyvec")
    flags.add_arguments(parser, PlatformDestination)


def run(arguments: argparse.Namespace) -> int:
    """Refuses a name that would not work, and to write over anything."""
    name, where = arguments.NAME or "", Path(flags.from_arguments(arguments, PlatformDestination).path)
    check_name(name)
    folder = where / f"quintet-{name}"
    if folder.exists():
        raise ValueError(f"{folder} is there already, and nothing is written over; remove it, or give another --path")
    for path, content in package(name).items():
        _write(folder, path, content)
    print(
        f"{folder} is there. It computes on the host, so try it before replacing anything:\n"
        f"  pip install -e {folder}\n"
        f"  quintet conformance --device {name} --section probe\n"
        f'  quintet generate --device {name} --max-tokens 20 "Once upon a time"\n'
        f"{guide()} goes on from there."
    )
    return 0


def check_name(name: str) -> None:
    """ValueError if a platform cannot have this name, or another one has it."""
    from quintet.platforms import BUILT_IN, discover

    good = name.isascii() and name.isidentifier() and name == name.lower() and not name.startswith("_")
    if not good or keyword.iskeyword(name) or len(name) > MAX_NAME:
        raise ValueError(
            f"{name!r} is no name for a platform: lower-case letters, digits and underscores, {MAX_NAME} at most, a "
            "letter "
            "first, and no word of Python's, as in tinyvec"
        )
    taken = {"auto": "a word of --device", **dict.fromkeys(BUILT_IN, "a part of quintet")}
    taken.update({found.name: f"installed here by {found.source}" for found in discover() if found.name not in taken})
    if name in taken:
        raise ValueError(f"{name!r} is taken: it is {taken[name]}; choose another name")


def guide() -> str:
    """Returns the place of docs/vendors.md: on the site that the package names, or in quintet's source."""
    try:
        addresses = metadata(DISTRIBUTION).get_all("Project-URL") or []
    except PackageNotFoundError:  # run from a checkout
        addresses = []
    found = [url for label, _, url in (each.partition(", ") for each in addresses) if label == "Documentation"]
    return f"{found[0].rstrip('/')}/vendors.html" if found else "docs/vendors.md, in quintet's source,"


def _install_command() -> str:
    """Returns the command that installs the engine; from a checkout also the models of the conformance kit, which the
    index then need not have."""
    source = checkout()
    if source is None:
        return install_hint()
    folder = Path(source).resolve()
    return f"pip install {shlex.quote(str(folder))} {shlex.quote(str(folder / 'tools'))}"


def package(name: str) -> dict[str, str]:
    """Path -> content of every file."""
    from quintet.interface.platform import CONTRACT_VERSION

    title = "".join(word.capitalize() for word in name.split("_"))
    values = {
        "name": name,
        "module": f"quintet_{name}",
        "Title": title,
        "quintet": __version__,
        "contract": str(CONTRACT_VERSION),
        "guide": guide(),
        "install": _install_command(),
    }
    home = Path(conformance.__file__).with_name("template")
    texts = {path: (home / f"{each}.txt").read_text(encoding="utf-8") for each, path in _FILES.items()}
    return {_fill_template(path, values): _fill_template(content, values) for path, content in texts.items()}


def _fill_template(content: str, values: dict[str, str]) -> str:
    for name, value in values.items():
        content = content.replace(f"@{name}@", value)
    return content


def _write(folder: Path, path: str, content: str) -> None:
    target = folder / path
    target.parent.mkdir(parents=True, exist_ok=True)
    with target.open("x", encoding="utf-8") as file:
        file.write(content)
