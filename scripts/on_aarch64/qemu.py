"""Builds the kernels for aarch64 on another machine and tries them in QEMU.

python scripts/on_aarch64/qemu.py                    the C++ tests
python scripts/on_aarch64/qemu.py --python [TESTS]   the specification tests too (tests/platforms/cpu), or those named

It needs aarch64-linux-gnu-g++ and qemu-aarch64-static (Debian: g++-aarch64-linux-gnu and qemu-user-static). --python
takes an interpreter from Debian's packages (`dpkg --add-architecture arm64` first) and aarch64 wheels from the package
index, some 150 MB. QEMU has all instructions of ARMv8.6, and is 20 to 50 times slower than what it stands for.
"""

import argparse
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build" / "aarch64"
COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64-static"
LIBRARIES = Path("/usr/aarch64-linux-gnu")  # of the cross compiler
DEBIAN = """
    libc6 libpython3.11-stdlib libpython3.11-minimal python3.11-minimal libpython3.11-dev zlib1g libexpat1 libssl3
    libffi8 liblzma5 libbz2-1.0 libsqlite3-0 libuuid1 libstdc++6 libgcc-s1 libgomp1 libncursesw6 libtinfo6 libreadline8
    libcrypt1 libnsl2 libtirpc3
"""
TORCH = "2.9.1"  # the newest whose aarch64 wheel needs no CUDA
WHEELS = """
    httptools hypothesis markupsafe msgspec numpy psutil pydantic_core pyyaml pyzmq regex rpds-py safetensors tokenizers
    uvloop
"""
MARKS = "not slow and not sweep"
PLUGINS = ["pytest_timeout", "pytest_asyncio.plugin", "_hypothesis_pytestplugin"]
SPECIFICATION = ["tests/platforms/cpu"]


def missing() -> list[str]:
    """Programs that are not installed."""
    return [program for program in (COMPILER, EMULATOR) if shutil.which(program) is None]


def run(*command: str | Path, **options: object) -> int:
    print("+", *command, flush=True)
    return subprocess.run(command, check=False, **options).returncode  # type: ignore[call-overload, no-any-return]


def built(name: str, *options: str) -> Path | None:
    """The folder of a build; None: it failed."""
    folder, tools = BUILD / name, Path(sys.executable).parent
    BUILD.mkdir(parents=True, exist_ok=True)
    cross = BUILD / "cross.cmake"
    names = {"CMAKE_SYSTEM_NAME": "Linux", "CMAKE_SYSTEM_PROCESSOR": "aarch64", "CMAKE_CXX_COMPILER": COMPILER}
    cross.write_text("".join(f"set({key} {value})\n" for key, value in names.items()), encoding="utf-8")
    configure = ["-S", str(ROOT), "-B", str(folder), "-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={tools / 'ninja'}"]
    configure += [f"-DCMAKE_TOOLCHAIN_FILE={cross}", "-DCMAKE_BUILD_TYPE=Release", *options]
    failed = run(tools / "cmake", *configure) or run(tools / "cmake", "--build", folder)
    return None if failed else folder


def cpp_tests() -> bool:
    folder = built("tests", "-DQUINTET_TESTS=ON")
    return folder is not None and run(EMULATOR, "-L", LIBRARIES, folder / "quintet_tests") == 0


def python_tests(tests: Sequence[str]) -> bool:
    root, site = BUILD / "root", BUILD / "site"
    if not (root / "usr/bin/python3.11").exists() or not (site / "torch").exists():
        bring(root, site)
    folder = built(
        "extension",
        "-DQUINTET_EXTENSION=ON",
        f"-DPython_EXECUTABLE={sys.executable}",
        f"-DPython_INCLUDE_DIR={root / 'usr/include/python3.11'}",
        "-DSKBUILD_SABI_COMPONENT=Development.SABIModule",
        f"-DCMAKE_CXX_FLAGS=-I{root / 'usr/include'}",
    )
    if folder is None:
        return False
    tree = BUILD / "tree"  # the sources beside the other extension
    shutil.rmtree(tree, ignore_errors=True)
    shutil.copytree(ROOT / "quintet", tree / "quintet", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    for name in ("tests", "pyproject.toml", "tools", "scripts", "examples", "docs"):
        (tree / name).symlink_to(ROOT / name)
    shutil.copy(next(folder.glob("_cpu*.so")), tree / "quintet" / "_cpu.abi3.so")
    path = os.pathsep.join(map(str, (tree, site, sysconfig.get_path("purelib"))))
    environment = {**os.environ, "PYTHONPATH": path, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    plugins = [word for plugin in PLUGINS for word in ("-p", plugin)]
    python = [EMULATOR, "-L", root, root / "usr/bin/python3.11"]
    pytest = [
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        *plugins,
        "--timeout=3600",
        "-m",
        "not slow and not sweep",
    ]
    return run(*python, *pytest, f"--rootdir={tree}", *tests, cwd=tree, env=environment) == 0


def bring(root: Path, site: Path) -> None:
    """Unpacks an aarch64 Python from Debian's packages, and wheels of what is compiled; the rest comes from .venv."""
    packages, wheels = BUILD / "packages", BUILD / "wheels"
    for folder in (root, site, packages, wheels):
        folder.mkdir(parents=True, exist_ok=True)
    subprocess.run(
        ["apt-get", "download", "-qq", *(f"{each}:arm64" for each in DEBIAN.split())], cwd=packages, check=True
    )
    for package in packages.glob("*.deb"):
        subprocess.run(["dpkg-deb", "-x", package, root], check=True)
    pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:", "--python-version=3.11"]
    pip += [f"--platform=manylinux{kind}_aarch64" for kind in ("2014", "_2_17", "_2_28")]
    pip += [f"--abi={abi}" for abi in ("cp311", "abi3", "none")]
    wanted = [f"torch=={TORCH}", *(f"{each}=={version(each)}" for each in WHEELS.split())]
    subprocess.run([*pip, *wanted], cwd=wheels, check=True)
    for wheel in wheels.glob("*.whl"):
        shutil.unpack_archive(wheel, site, "zip")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", nargs="*", metavar="TESTS", help="the specification tests as well, or these")
    args = parser.parse_args()
    if programs := missing():
        sys.exit(
            f"not installed: {', '.join(programs)}; on Debian: apt-get install g++-aarch64-linux-gnu qemu-user-static"
        )
    passed = cpp_tests() and (args.python is None or python_tests(args.python or SPECIFICATION))
    sys.exit(not passed)


if __name__ == "__main__":
    main()
