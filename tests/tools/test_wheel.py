"""`make wheel`: which interpreters build, which wheel each installs, and what a wheel must have."""

import zipfile
from pathlib import Path

import pytest

from scripts import wheel

WHEELS = [
    "quintet_llm-1-cp310-cp310-linux.whl",
    "quintet_llm-1-cp311-cp311-linux.whl",
    "quintet_llm-1-cp312-abi3-linux.whl",
]


def test_one_wheel_serves_the_stable_abi() -> None:
    versions = {"a": (3, 10), "b": (3, 13), "c": (3, 11), "d": (3, 12)}
    assert wheel.builders(versions) == ["a", "c", "b"]
    assert [wheel.wheel_for(version, WHEELS) for version in versions.values()] == [
        WHEELS[0], WHEELS[2], WHEELS[1], WHEELS[2],
    ]  # fmt: skip
    with pytest.raises(LookupError, match=r"no wheel for Python 3\.9 among quintet_llm-1-cp310"):
        wheel.wheel_for((3, 9), WHEELS)


def packed(path: Path, *names: str) -> Path:
    with zipfile.ZipFile(path, "w") as file:
        for name in names:
            file.writestr(name, b"")
    return path


WHOLE = (
    "quintet/_cpu.abi3.so", "quintet/bundled/model.safetensors", "quintet/bundled-embed/model.safetensors",
    "quintet/bundled-vision/model.safetensors", "quintet/bundled-draft/model.safetensors",
    "quintet/server/page/index.html", "quintet_llm-1.dist-info/METADATA",
)  # fmt: skip


@pytest.mark.parametrize(
    ("names", "why"),
    [
        (WHOLE[1:], r"lacks quintet/_cpu \(was there a C\+\+ compiler"),
        (WHOLE[:1] + WHOLE[2:], "lacks quintet/bundled/model.safetensors"),
        ((*WHOLE, "tests/__init__.py"), r"has besides \['tests'\]"),
    ],
)
def test_a_wheel_that_lacks_something_is_refused(names: tuple[str, ...], why: str, tmp_path: Path) -> None:
    wheel.contents(packed(tmp_path / "whole.whl", *WHOLE))
    with pytest.raises(ValueError, match=why):
        wheel.contents(packed(tmp_path / "quintet_llm-1.whl", *names))


def test_a_python_that_is_not_there_is_named() -> None:
    with pytest.raises(FileNotFoundError, match=r"no interpreter 'python9\.9' on PATH; give another with --python"):
        wheel.version_of("python9.9")
