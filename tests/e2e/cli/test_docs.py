"""The code of README.md and of the documentation runs: Python as it stands, `quintet ...` as it would be typed."""

import importlib
import io
import json
import re
import runpy
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from PIL import Image

from quintet.cli import main as cli
from quintet.config.schema.flags import Parser
from tests.helpers.servers.serving import Server

ROOT = Path(__file__).parents[3]
PAGES = (
    "README.md",
    "CONTRIBUTING.md",
    "docs/*.md",
    "docs/*/*.md",
    "examples/*/README.md",
    "quintet/bundled/README.md",
)
SHOWS = {"README.md": 3, "docs/images.md": 2, "docs/python.md": 6}  # page -> lines that show what is printed
SERVED = "http://127.0.0.1:8000"  # where the pages say that the server is
EMBEDDED = "http://127.0.0.1:8001"  # and the one of `quintet serve bundled-embed`
INSTEAD = {  # what is downloaded, or takes long -> what is tried in its place
    "Qwen/Qwen3-0.6B": "bundled",
    "./my-llama": "bundled",
    "./my-w4a16": "bundled",
    "./qwen3-0.6b-Q4_K_M.gguf": "bundled",
    "--max-model-len 8K": "--max-model-len 1K",
    "--num-prompts 200 --request-rate 10 --input-len 128 --output-len 128": (
        "--num-prompts 4 --warmup 1 --input-len 8 --output-len 8"
    ),
}
ELSEWHERE = {  # words of a line that is parsed here, and run there
    "quintet serve": "the first such line of README.md is the server of the other tests here",
    "quintet pull": "tests/cli/test_models_on_this_machine.py, with a hub that is not there",
    "quintet rm": "the same",
    "quintet ps": "tests/cli/test_models_commands.py, with a server of several models",
    "quintet transcribe": "tests/cli/test_transcribe.py: it needs a Whisper model",
    "quintet verify": "tests/verification/test_verify.py: it starts two engines, and transformers",
    "quintet stop": "tests/cli/test_models_commands.py, as well",
    "quintet router": "tests/router/test_command.py, with servers of its own",
    "new-platform tinyvec": "tests/cli/test_new_platform.py, which installs what is written",
    "--device tinyvec": "tests/cli/test_new_platform.py; the whole kit takes minutes, see tests/e2e/cli/test_vendor.py",
    "--family stranger": "tests/e2e/families/test_model_family_example.py, where the package is on the path",
    "--model ./my-stranger": "the same tests: a checkpoint that they write",
    "--device acme": "tests/e2e/cli/test_vendor.py, where the package is installed",
    "https://store.example": "tests/clients/test_url_files.py: there is no such store",
    "--lora-path": "tests/cli/test_lora_path.py, with an adapter that it writes",
    "--tools mine.py": "tests/e2e/cli/test_cli.py, which answers what is asked",
    "conformance/reports/": "tests/contract/test_kit.py, section by section: it takes minutes",
    "bench simulate": "tests/tools/simulate: costs are measured first, of a model that is downloaded",
    "--trace trace.jsonl": "tests/clients/test_bench_trace.py, which writes one",
    "--method gptq": "tests/quantize/test_quantize.py: transformers computes the layers for half a minute",
    "--device tpu": "tests/platforms/tpu/: without a TPU, compiling takes a minute",
}
PYTHON_ELSEWHERE = {
    "docs/vendors.md": "tests/conformance/test_vendors_page.py: parts of a package that is not there",
    "docs/encoder-decoders.md": "tests/e2e/families/test_encoder_decoders_served.py: it needs a BART model",
    "docs/speech.md": "tests/e2e/speech/test_served.py: it needs a Whisper model",
    "docs/plugins.md": "tests/server/http/test_endpoint_plugins.py, tests/server/metrics/test_stat_loggers.py",
    "docs/ollama.md": "ollama may not be installed: tests/server/http/ollama/test_clients.py",
}
PACKAGES = {"docs/tutorials/langchain.md": "langchain_openai"}  # page -> what its code imports, and may be missing
OTHERS = {  # what a line of a shell may begin with besides, and why it is not run
    "git": "fetches",
    "make": "sets up an environment",
    "pip": "installs from an index",
    "docker": "needs a daemon and images",
    "bash": "needs a GPU: tests/platforms/gpu/scripts/test_make_gpu.py says what the scripts run",
    "python": "a script, with a checkpoint that is downloaded",
    ".venv/bin/python": "writes into the repository",
    "kubectl": "needs a cluster: tests/rules/test_deploy.py renders what is applied",
    "export": "a variable of that shell",
    ".": "activates an environment in that shell",
    "torchrun": "tests/e2e/parallel/test_launched.py",
    "curl": "stands for any client: tests/server/http",
}


class Block(NamedTuple):
    page: str
    language: str
    text: str


def blocks() -> list[Block]:
    paths = [path for pattern in PAGES for path in sorted(ROOT.glob(pattern))]
    found = [
        (path, re.findall(r"^```(\w*)\n(.*?)^```", path.read_text(encoding="utf-8"), re.S | re.M)) for path in paths
    ]
    return [Block(str(path.relative_to(ROOT)), *each) for path, all_of_it in found for each in all_of_it]


BLOCKS = blocks()
LINES = [
    pytest.param(line, id=f"{each.page}: {line}")
    for each in BLOCKS
    if each.language in ("", "sh", "bash", "console")
    for line in each.text.replace("\\\n", " ").splitlines()
    if line.strip() and not line.startswith("#")
]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """`quintet serve`, at a port of its own."""
    with Server() as started:
        yield started


@pytest.fixture(scope="module")
def embedder() -> Iterator[Server]:
    with Server("bundled-embed") as started:
        yield started


PYTHON = sorted({each.page for each in BLOCKS if each.language == "python"} - set(PYTHON_ELSEWHERE))


@pytest.mark.parametrize("page", PYTHON)
def test_python_runs(
    page: str,
    server: Server,
    request: pytest.FixtureRequest,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The blocks of a page one after the other, as a reader would: later ones use the names of those before."""
    if package := PACKAGES.get(page):
        pytest.importorskip(package)
    monkeypatch.chdir(tmp_path)  # what they write is the test's
    sources = [each.text for each in BLOCKS if (each.page, each.language) == (page, "python")]
    code = "\n".join(sources).replace(SERVED, server.url)
    if EMBEDDED in code:
        code = code.replace(EMBEDDED, request.getfixturevalue("embedder").url)
    (tmp_path / "page.py").write_text(code)
    runpy.run_path(str(tmp_path / "page.py"), run_name="__main__")
    out = capsys.readouterr().out
    assert out
    if page in SHOWS:
        shown = re.findall(r"^ *print\(.*\)  # (.+)$", "\n".join(sources), re.M)
        assert len(shown) == SHOWS[page] and [each for each in shown if each not in out] == []


@pytest.mark.parametrize("line", LINES)
def test_a_line_of_the_shell_runs(
    line: str, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said, typed, name, words = understood(line)
    if not name:
        assert typed in OTHERS, (
            f"{line!r} is no command that is run here: say in OTHERS why not, or call the block text"
        )
        return
    if any(each in line for each in ELSEWHERE):
        module = importlib.import_module(cli.COMMANDS[name].module)
        parser = Parser(prog=f"quintet {name}")
        module.add_arguments(parser)
        parser.parse(words)
        return
    if SERVED in line or name in ("complete", "bench serve"):
        url = request.getfixturevalue("server").url
        words = [url if word == SERVED else word for word in words] + ["--url", url] * ("--url" not in words)
    monkeypatch.chdir(tmp_path)
    Image.new("RGB", (64, 48), "white").save(tmp_path / "picture.png")
    (tmp_path / "notes.txt").write_text("Tea at four.\ncp a b duplicates a file\n")
    (tmp_path / "in.jsonl").write_text(
        next(each.text for each in BLOCKS if each.page == "docs/client-commands.md" and "POST" in each.text)
    )
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(said.encode())))
    assert cli.main([*name.split(), *words]) == 0
    for file in {word for word in words if word.endswith((".jsonl", ".json"))}:
        assert [json.loads(row) for row in _rows(tmp_path / file)]


def _rows(path: Path) -> list[str]:
    text = path.read_text()
    return text.splitlines() if path.suffix == ".jsonl" else [text]


def understood(line: str) -> tuple[str, str, str, list[str]]:
    """What comes on standard input, the first word, quintet's command or "", and its words."""
    for there, here in INSTEAD.items():
        line = line.replace(there, here)
    before, pipe, after = line.partition(" | ")
    words = shlex.split(after if pipe else line, comments=True)
    while re.fullmatch(r"[A-Z_]+=\S*", words[0]):  # variables
        del words[0]
    said = shlex.split(before)[-1] if pipe else "Hello!"
    if words[0] != "quintet":
        return said, words[0], "", words
    name = cli._name(words[1:])
    assert name, f"{line!r} names no command"
    return said + "\n", "quintet", name, words[1 + len(name.split()) :]


def test_every_reason_not_to_run_something_still_holds() -> None:
    lines = [each.values[0] for each in LINES]
    assert [each for each in (*ELSEWHERE, *OTHERS) if not any(each in line for line in lines)] == []
    text = "".join(each.text.replace("\\\n", " ") for each in BLOCKS)
    assert [each for each in INSTEAD if each not in re.sub(" +", " ", text)] == []
    assert set(PYTHON_ELSEWHERE) <= {each.page for each in BLOCKS if each.language == "python"}
