"""Images by our rules, without an engine to build them; docker/check.py builds and starts one where buildah is."""

import json
import re
import shutil
import subprocess
import sys
import venv
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from quintet.config import INSIDE
from quintet.platforms import BUILT_IN

ROOT = Path(__file__).parents[2]
DOCKER = ROOT / "docker"
FILES = sorted(DOCKER.glob("Dockerfile.*"))
PLATFORMS = ("cpu", "cuda", "rocm", "tpu", "xpu")
PORT = "8000"
TORCH_INDEX = {"cpu": "cpu", "cuda": "cu130", "rocm": "rocm7.2", "tpu": "cpu", "xpu": "xpu"}
PINNED = re.compile(r'"([a-z]+)(?:\[[a-z]+\])?==([\w.]+)"')
TAG = re.compile(r"[\w./-]+:v?\d[\w.-]*")  # a tag that begins with a version; `latest` is none
DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
SECRET = re.compile(r"(?i)(password|passwd|secret|token|api_?key)\w*=|hf_[A-Za-z]{20}|-----BEGIN")
BUILD = ("cmake", "nanobind", "ninja", "scikit-build-core")


# ------------------------------------------------------------------------------------------------- reading


@dataclass(frozen=True)
class Instruction:
    """One instruction of a Dockerfile; `stage` counts the FROMs up to it."""

    stage: int
    word: str
    rest: str

    @property
    def paths(self) -> list[str]:
        """What a COPY takes from the build context."""
        return [] if "--from=" in self.rest else [w for w in self.rest.split()[:-1] if not w.startswith("--")]


def instructions(text: str) -> list[Instruction]:
    """Comments go, continued lines join."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    found: list[Instruction] = []
    for line in "\n".join(lines).replace("\\\n", " ").splitlines():
        if line.strip():
            word, _, rest = line.strip().partition(" ")
            stage = (found[-1].stage if found else 0) + (word == "FROM")
            found.append(Instruction(stage, word, " ".join(rest.split())))
    return found


def ignored(path: str, patterns: Sequence[str]) -> bool:
    """Whether .dockerignore keeps a path out: the last pattern that fits it, or a folder above it, decides."""
    parts = path.split("/")
    folders = ["/".join(parts[:end]) for end in range(1, len(parts) + 1)]
    out = False
    for pattern in patterns:
        expression = _expression(pattern.removeprefix("!").strip("/"))
        if any(expression.fullmatch(folder) for folder in folders):
            out = not pattern.startswith("!")
    return out


def _expression(pattern: str) -> re.Pattern[str]:
    signs = {"**/": "(.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    pieces = re.split(r"(\*\*/|\*\*|\*|\?|\[[^]]*\])", pattern)
    return re.compile("".join(signs.get(p) or (p if p.startswith("[") else re.escape(p)) for p in pieces))


def patterns() -> list[str]:
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    return [line for line in lines if line and not line.startswith("#")]


# -------------------------------------------------------------------------------------------------- linting


def faults(text: str) -> list[str]:
    """What is wrong with a Dockerfile, by our rules."""
    found = instructions(text)
    last = [i for i in found if i.stage == max(j.stage for j in found)]
    return [*_stages(found), *_words(found), *_user(last), *_service(last)]


def _stages(found: Sequence[Instruction]) -> Iterator[str]:
    given = dict(i.rest.split("=", 1) for i in found if i.word == "ARG" and i.stage == 0)
    froms = [i.rest.split() for i in found if i.word == "FROM"]
    names = {words[2] for words in froms if len(words) == 3}
    for image in (re.sub(r"\$\{(\w+)\}", lambda name: given.get(name[1], ""), words[0]) for words in froms):
        tag, _, digest = image.partition("@")
        if image not in names and not (TAG.fullmatch(tag) and DIGEST.fullmatch(digest)):
            yield f"FROM {image} is not pinned to a version and its digest"
    if len(froms) < 2:
        yield "one stage: compilers would stay in the image"


def _words(found: Sequence[Instruction]) -> Iterator[str]:
    for instruction in found:
        if instruction.word == "ADD":
            yield "ADD fetches and unpacks; COPY does neither"
        if instruction.word in ("ENV", "ARG", "RUN", "LABEL") and SECRET.search(instruction.rest):
            yield f"{instruction.word} holds what looks like a secret"
        if "apt-get install" in instruction.rest and "rm -rf /var/lib/apt/lists" not in instruction.rest:
            yield "apt's lists stay in the layer"
        if re.search(r"curl|wget", instruction.rest):
            yield "what is fetched is not pinned"


def _user(last: Sequence[Instruction]) -> Iterator[str]:
    users = [i.rest for i in last if i.word == "USER"]
    if not users or not re.fullmatch(r"[1-9]\d*:[1-9]\d*", users[-1]):
        yield "it does not end as a user with a fixed id that is not root's"
    after = [i.word for i in last[max((n for n, i in enumerate(last) if i.word == "USER"), default=0) :]]
    if {"RUN", "COPY"} & set(after):
        yield "something is made after USER"


def _service(last: Sequence[Instruction]) -> Iterator[str]:
    words = {i.word: i.rest for i in last}
    health = words.get("HEALTHCHECK", "")
    if f"127.0.0.1:{PORT}/health" not in health:
        yield f"HEALTHCHECK does not ask /health on port {PORT}"
    if words.get("EXPOSE") != PORT:
        yield f"EXPOSE is not {PORT}"
    if words.get("ENTRYPOINT") != '["quintet"]' or words.get("CMD") != '["serve", "--host", "0.0.0.0"]':
        yield "it does not serve"


# ---------------------------------------------------------------------------------------------------- files


def test_every_platform_has_an_image() -> None:
    assert [file.suffix[1:] for file in FILES] == list(PLATFORMS)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_it_keeps_the_rules(file: Path) -> None:
    assert faults(file.read_text()) == []


@pytest.mark.parametrize(
    ("old", "new", "fault"),
    [
        ("python:3.12.13-slim-bookworm", "python:latest", "pinned"),
        ("python:3.12.13-slim-bookworm", "python", "pinned"),
        ("@sha256:4766", "@sha256:", "pinned"),
        ("ARG BASE=python:3.12.13-slim-bookworm", "ARG OTHER=python:3.12.13-slim-bookworm", "pinned"),
        ("FROM ${BASE}\n", "", "one stage"),
        ("USER 10001:10001\n", "", "root"),
        ("USER 10001:10001\n", "USER root\n", "root"),
        ("WORKDIR /home/quintet", "RUN true", "after USER"),
        ("COPY csrc csrc", "ADD https://example.org/csrc.tar.gz csrc", "ADD"),
        ("PYTHONUNBUFFERED=1", "HF_TOKEN=abc", "secret"),
        (" && rm -rf /var/lib/apt/lists/*", "", "apt"),
        ("HEALTHCHECK", "LABEL", "HEALTHCHECK"),
        ("EXPOSE 8000", "EXPOSE 80", "EXPOSE"),
        ('"0.0.0.0"', '"localhost"', "serve"),
    ],
)
def test_a_broken_rule_is_seen(old: str, new: str, fault: str) -> None:
    text = (DOCKER / "Dockerfile.cpu").read_text()
    assert old in text
    assert any(fault in found for found in faults(text.replace(old, new)))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_every_path_that_is_copied_exists_and_reaches_the_engine(file: Path) -> None:
    paths = [path for i in instructions(file.read_text()) if i.word == "COPY" for path in i.paths]
    assert {"pyproject.toml", "csrc", "quintet"} <= set(paths)
    assert [path for path in paths if not (ROOT / path).exists() or ignored(path, patterns())] == []


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_its_pins_are_those_that_the_tests_run_with(file: Path) -> None:
    constraints = (ROOT / "constraints-dev.txt").read_text()
    pins = PINNED.findall(file.read_text())
    assert pins and all(f"\n{name}=={version}\n" in constraints for name, version in pins)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_torch_comes_from_the_index_of_its_platform(file: Path) -> None:
    text = file.read_text()
    (index,) = re.findall(r"ARG TORCH_INDEX=https://download\.pytorch\.org/whl/(\S+)", text)
    assert index == TORCH_INDEX[file.suffix[1:]] and '--index-url ${TORCH_INDEX} "torch==' in text


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_extras_exist_and_the_device_is_a_platform(file: Path) -> None:
    text, platform = file.read_text(), file.suffix[1:]
    (extras,) = re.findall(r'"\$\(echo /wheels/\*\.whl\)\[([\w,]+)\]"', text)
    declared = re.findall(r"(?m)^(\w+) = \[", (ROOT / "pyproject.toml").read_text().split("optional-dependencies")[1])
    assert set(extras.split(",")) <= set(declared)
    devices = re.findall(r"QUINTET_DEVICE=(\w+)", text)
    assert devices == ([] if platform == "tpu" else [platform]) and platform in BUILT_IN


def test_flashinfer_has_compiled_kernels_of_its_version_and_of_torchs_cuda() -> None:
    """Without the package that load() looks for, and without nvcc, the image would never use it."""
    text = (DOCKER / "Dockerfile.cuda").read_text()
    pins = dict(re.findall(r'"(flashinfer-[a-z-]+)==([\d.]+)', text))
    assert (
        set(pins) == {"flashinfer-python", "flashinfer-cubin", "flashinfer-jit-cache"} and len(set(pins.values())) == 1
    )
    assert f'+{TORCH_INDEX["cuda"]}"' in text and f"flashinfer.ai/whl/{TORCH_INDEX['cuda']}" in text


@pytest.mark.parametrize("name", ["cpu", "tpu"])
def test_what_torch_needs_to_run_stays_in_small_images(name: str, tmp_path: Path) -> None:
    """The RUN that leaves torch's headers and tests behind, on files of the same names."""
    inside = tmp_path / "lib" / "python3.12" / "site-packages" / "torch"
    kept = ("__init__.py", "lib/libtorch.so", "lib/libgomp.so.1", "bin/torch_shm_manager")
    gone = ("include/c.h", "share/cmake/x", "test/cpp", "bin/protoc", "bin/test_api", "lib/libx.a")
    for each in (*kept, *gone):
        (inside / each).parent.mkdir(parents=True, exist_ok=True)
        (inside / each).touch()
    (run,) = [i.rest for i in instructions((DOCKER / f"Dockerfile.{name}").read_text()) if "shm_manager" in i.rest]
    command = run[run.index("cd /opt/quintet") :].replace("/opt/quintet", str(tmp_path))
    subprocess.run(["/bin/sh", "-euc", command], check=True)
    assert sorted(str(p.relative_to(inside)) for p in inside.rglob("*") if p.is_file()) == sorted(kept)


@pytest.mark.parametrize(
    ("path", "out"),
    [
        (".git/config", True),
        (".venv/bin/python", True),
        (".env", True),
        ("docs/structure.md", True),
        ("build/cp312/_cpu.so", True),
        ("quintet/_cpu.abi3.so", True),
        ("quintet/engine/__pycache__/engine.cpython-312.pyc", True),
        ("quintet/engine/engine.py", False),
        ("quintet/bundled/model.safetensors", False),
        ("quintet/bundled-embed/model.safetensors", False),
        ("quintet/bundled-vision/model.safetensors", False),
        ("quintet/bundled-draft/model.safetensors", False),
        ("quintet/server/page/index.html", False),
        ("csrc/cpu/attention/attention.cpp", False),
        ("pyproject.toml", False),
    ],
)
def test_the_engine_sees_what_the_build_needs_and_no_more(path: str, out: bool) -> None:
    assert ignored(path, patterns()) is out


# -------------------------------------------------------------------------------------------------- compose


@pytest.fixture
def compose() -> dict[str, Any]:
    return dict(yaml.safe_load((DOCKER / "compose.cpu.yaml").read_text()))


def test_compose_gives_little_away(compose: dict[str, Any]) -> None:
    for service in compose["services"].values():
        assert service["read_only"] is True
        assert service["cap_drop"] == ["ALL"]
        assert "no-new-privileges:true" in service["security_opt"]
        assert service["mem_limit"] == service["memswap_limit"]
        assert all(port.startswith("127.0.0.1:") for port in service["ports"])
        named = {volume.split(":")[0] for volume in service["volumes"]} - {"./prometheus.yml"}
        assert named <= compose["volumes"].keys()
    assert TAG.fullmatch(compose["services"]["prometheus"]["image"])


def test_compose_and_image_agree(compose: dict[str, Any]) -> None:
    service = compose["services"]["quintet"]
    assert (DOCKER / service["build"]["context"] / service["build"]["dockerfile"]).is_file()
    found = {i.word: i.rest for i in instructions((DOCKER / "Dockerfile.cpu").read_text())}
    assert service["command"] == json.loads(found["CMD"])
    assert service["ports"] == [f"127.0.0.1:{PORT}:{PORT}"]
    assert service["volumes"] == [f"cache:{found['VOLUME']}"]


def test_prometheus_asks_the_service(compose: dict[str, Any]) -> None:
    (job,) = yaml.safe_load((DOCKER / "prometheus.yml").read_text())["scrape_configs"]
    (target,) = job["static_configs"][0]["targets"]
    host, _, port = target.partition(":")
    assert (host in compose["services"], port, job["metrics_path"]) == (True, PORT, "/metrics")


# --------------------------------------------------------------------------------------------------- the wheel


def context(target: Path) -> None:
    """Copies what the build stage copies, as the engine would: through .dockerignore."""
    excluded = patterns()

    def unwanted(folder: str, names: list[str]) -> list[str]:
        inside = Path(folder).relative_to(ROOT)
        return [name for name in names if ignored((inside / name).as_posix(), excluded)]

    copies = [i for i in instructions((DOCKER / "Dockerfile.cpu").read_text()) if i.word == "COPY"]
    for path in [path for copy in copies for path in copy.paths]:
        if (ROOT / path).is_dir():
            shutil.copytree(ROOT / path, target / path, ignore=unwanted)
        else:
            shutil.copy(ROOT / path, target / path)


@pytest.mark.sweep  # a minute on two cores: all of the extension is compiled. Nothing else notices a file that the
@pytest.mark.timeout(300)  # wheel or the image's context lacks.
def test_the_build_stage_makes_a_wheel_that_runs(tmp_path: Path) -> None:
    """The RUN that builds, in a clean environment without a network; those that download cannot run here."""
    source, wheels, home = tmp_path / "src", tmp_path / "wheels", tmp_path / "venv"
    source.mkdir()
    context(source)
    runs = [i.rest for i in instructions((DOCKER / "Dockerfile.cpu").read_text()) if i.word == "RUN"]
    (build,) = [run for run in runs if run.startswith("pip wheel")]
    assert any(run.endswith(" ".join(BUILD)) for run in runs)  # which this environment has, too
    clean = {"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin", "HOME": str(tmp_path), "PIP_NO_INDEX": "1"}
    clean["SKBUILD_CMAKE_BUILD_TYPE"] = "None"
    command = build.replace("pip ", f"{sys.executable} -m pip ", 1).replace("/wheels", str(wheels))
    subprocess.run(["/bin/sh", "-euc", command], cwd=source, env=clean, check=True)

    (wheel,) = wheels.glob("*.whl")
    packed = zipfile.ZipFile(wheel).namelist()
    wanted = [p for p in (source / "quintet").rglob("*") if p.is_file()]
    assert {p.relative_to(source).as_posix() for p in wanted} <= set(packed)
    models = {f"quintet/{name}/model.safetensors" for name in INSIDE}
    assert {*models, "quintet/bundled-embed/1_Pooling/config.json", "quintet/server/page/index.html"} <= set(packed)
    assert any(re.fullmatch(r"quintet/_cpu\..*so", name) for name in packed)
    assert {name.split("/")[0] for name in packed if ".dist-info/" not in name} == {"quintet"}

    venv.create(home, with_pip=False)
    install = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        str(home / "bin" / "python"),
        "install",
        "--no-deps",
        str(wheel),
    ]
    subprocess.run(install, env=clean, check=True)
    shown = subprocess.run(["quintet", "--version"], env={"PATH": str(home / "bin")}, capture_output=True, check=True)
    loads = subprocess.run([home / "bin" / "python", "-c", "import quintet._cpu"], cwd=tmp_path, check=False)
    assert shown.stdout.startswith(b"quintet ") and loads.returncode == 0
