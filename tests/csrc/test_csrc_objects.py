"""The compiled objects: the baseline runs on any processor of the architecture; none acts when it is loaded."""

import os
import platform
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
WIDE = re.compile(r"%[yz]mm\d|%k[0-7]\b|%tmm\d|\tv[a-z]\w*[ \t]")  # AVX and later: VEX names begin with v
ISA_SETS = ("quintet_avx2", "quintet_avx2_vnni", "quintet_avx512", "quintet_avx512_bf16")


def listings() -> list[Path]:
    """objects.txt of the newest build."""
    return sorted((ROOT / "build").glob("*/objects.txt"), key=lambda f: f.stat().st_mtime)[-1:]


@pytest.fixture(scope="module")
def objects() -> list[tuple[str, Path]]:
    if not listings():
        pytest.skip("no build folder: quintet was not built from this checkout, or without a compiler")
    if not shutil.which("objdump"):
        pytest.skip("objdump (binutils) is missing")
    lines = listings()[0].read_text(encoding="utf-8").splitlines()
    pairs = [(line.split(maxsplit=1)[0], Path(line.split(maxsplit=1)[1])) for line in lines if line.endswith(".o")]
    if not all(path.is_file() for _, path in pairs):
        pytest.skip("the objects of the last build are gone")
    return pairs


def objdump(path: Path, *flags: str) -> str:
    return subprocess.run(["objdump", *flags, path], capture_output=True, text=True, check=True).stdout


def wide_instructions(path: Path) -> list[str]:
    return [line for line in objdump(path, "-d", "--no-show-raw-insn").splitlines() if WIDE.search(line)]


x86 = pytest.mark.skipif(platform.machine() not in {"x86_64", "AMD64"}, reason="looks for AVX, which is x86's")


@x86
def test_baseline_objects_hold_no_wide_instruction(objects: list[tuple[str, Path]]) -> None:
    baseline = [path for name, path in objects if name == "quintet_baseline"]
    assert len(baseline) >= 6
    assert {path.name: found[:3] for path in baseline if (found := wide_instructions(path))} == {}


@x86
def test_isa_objects_hold_what_they_are_for(objects: list[tuple[str, Path]]) -> None:
    """Shows, too, that the search above finds something."""
    text: dict[str, str] = {}
    for name, path in objects:
        if name in ISA_SETS:
            text[name] = "\n".join([text.get(name, ""), *wide_instructions(path)])
    assert "vfmadd" in text["quintet_avx2"] and "%ymm" in text["quintet_avx2"] and "%zmm" not in text["quintet_avx2"]
    if "quintet_avx2_vnni" in text:  # GCC before 11 has none, nor a build for this processor alone where it has AVX-512
        assert "vpdpbusd" in text["quintet_avx2_vnni"] and "%zmm" not in text["quintet_avx2_vnni"]
    assert "vfmadd" in text["quintet_avx512"] and "%zmm" in text["quintet_avx512"]


@x86
def test_isa_objects_share_no_inline_function(objects: list[tuple[str, Path]]) -> None:
    """The linker keeps one copy of a weak symbol; the baseline must not get theirs."""
    for name, path in objects:
        if name in ISA_SETS:
            symbols = objdump(path, "-t").splitlines()
            assert [s for s in symbols if re.search(r"^[0-9a-f]+ +[wu]", s)] == [], path


def test_nothing_runs_when_the_module_is_loaded(objects: list[tuple[str, Path]]) -> None:
    for _, path in objects:
        headers = objdump(path, "-h")
        assert ".init_array" not in headers and ".ctors" not in headers, f"{path} has a global constructor"


@pytest.mark.sweep  # a minute or two each on two cores; .ci/run runs them where csrc/ has changed
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("sanitizers", ["address,undefined", "thread"])
def test_sources_are_clean_under_sanitizers(sanitizers: str, tmp_path: Path) -> None:
    compiler = shutil.which(os.environ.get("CXX", "c++"))
    cmake = pytest.importorskip("cmake", reason="cmake is no part of this environment")
    if not compiler:
        pytest.skip("there is no C++ compiler")
    binary = Path(cmake.CMAKE_BIN_DIR) / "cmake"
    configure = [binary, "-S", ROOT, "-B", tmp_path, f"-DCMAKE_CXX_COMPILER={compiler}", "-DQUINTET_TESTS=ON"]
    subprocess.run([*configure, f"-DQUINTET_SANITIZE={sanitizers}"], check=True, capture_output=True)
    build = subprocess.run([binary, "--build", tmp_path, "-j2"], capture_output=True, text=True)
    if build.returncode and ("cannot find" in build.stderr or "libtsan" in build.stderr):
        pytest.skip(f"this compiler has no runtime for {sanitizers}")
    assert build.returncode == 0, build.stdout + build.stderr
    run = subprocess.run([tmp_path / "quintet_tests"], capture_output=True, text=True)
    if "unexpected memory mapping" in run.stderr:
        pytest.skip("this kernel's address randomisation is more than this thread sanitizer allows")
    assert run.returncode == 0, run.stdout + run.stderr
