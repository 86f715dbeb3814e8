"""Words of other programs, wrong names and a missing network get one sentence that helps (newcomers)."""

import subprocess
import sys
from pathlib import Path

import pytest

from quintet.cli.main import main
from quintet.config import EngineConfig, Environment
from quintet.hub import downloads
from quintet.hub.resolve import resolve_model
from tests.helpers.processes import the_same_signals


def said(words: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    with the_same_signals():
        try:
            code = main(words)
        except SystemExit as ended:
            code = int(ended.code or 0)
    shown = capsys.readouterr()
    return code, shown.err + shown.out


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["serve", "-c", "4096"], "there is no -c: use --max-model-len"),
        (["serve", "--ctx-size", "4096"], "there is no --ctx-size: use --max-model-len"),
        (["serve", "--ngl", "99"], "there is no --ngl: the whole model runs on one platform"),
        (["serve", "-ngl", "99"], "there is no -ngl: the whole model runs on one platform"),
        (["serve", "--threads", "4"], "there is no --threads: all cores are used"),
        (["serve", "--temp", "1"], "there is no --temp: use --temperature"),
        (["serve", "--jinja"], "there is no --jinja: the model's chat template is always used"),
        (["serve", "-np", "3"], "there is no -np: use --max-num-seqs"),
        (["serve", "--disable-log-requests"], "there is no --disable-log-requests: texts of requests are never logged"),
        (["serve", "--max-log-len", "3"], "there is no --max-log-len: texts of requests are never logged"),
        (["chat", "-hf", "a/b"], "there is no -hf: give OWNER/REPOSITORY:QUANTIZATION as the model"),
        (["create", "x"], "there is no command 'create'"),
        (["chat", "/no/such/model.gguf"], "no file '/no/such/model.gguf' here; check the path"),
        (["chat", "./no/such/model.gguf"], "no file './no/such/model.gguf' here; check the path"),
        (["chat", "a", "--model", "b"], "two models: 'a' and --model 'b'; give one"),
        (["serve", "qwen3:0.6b"], "names of Ollama's library are not known; give OWNER/REPOSITORY:QUANTIZATION"),
        (["pull", "hf.co/a/b-GGUF:Q8_0"], "is an address of the hub; give its model alone: 'a/b-GGUF"),
        (["generate", "https://huggingface.co/a/b", "Hi"], "is an address of the hub; give its model alone: 'a/b'"),
        (["pull", ":Q4_0"], "no folder ':Q4_0' here, and it is no hub id"),
        (["generate", "--model", "qwen3:0.6b", "Hi"], "names of Ollama's library are not known"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_wrong_word_gets_a_sentence(words: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, text = said(words, capsys)
    assert code != 0 and says in text and "Traceback" not in text


@pytest.mark.parametrize("name", ["serve", "chat", "bench serve"])
def test_help_of_a_command_is_its_own(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, text = said(["help", *name.split()], capsys)
    assert code == 0 and f"usage: quintet {name} " in text


def test_a_foreign_word_that_is_a_prompt_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    code, text = said(["generate", "--xyzzy", "--", "--threads"], capsys)
    assert code == 2 and "--threads" not in text


@pytest.mark.parametrize("library", ["httpx", "httpx2"])
def test_a_hub_that_is_not_reached_is_one_sentence(library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A list of files is asked of the hub by its HTTP library, whose errors are no OSErrors."""
    http = pytest.importorskip(library)

    class Api:
        def __init__(self, token: object) -> None:
            pass

        def model_info(self, name: str, **_: object) -> None:
            raise http.ConnectError("[Errno -2] Name or service not known")

    monkeypatch.setattr("huggingface_hub.HfApi", Api)
    config = EngineConfig(model="nobody-has/this-GGUF:Q4_K_M")
    with pytest.raises(
        ConnectionError, match="cannot download 'nobody-has/this-GGUF' from the hub: .*give a local folder"
    ):
        resolve_model(config, Environment())


def test_files_that_are_in_the_cache_are_used_without_a_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> list[str]:
        raise OSError("no route")

    monkeypatch.setattr("huggingface_hub.HfApi.model_info", refuse)
    (tmp_path / "x-Q4_K_M.gguf").touch()
    monkeypatch.setattr(downloads, "download", lambda *_: tmp_path)
    assert downloads.list_files("a/b", None, EngineConfig(), Environment()) == ["x-Q4_K_M.gguf"]


def test_ctrl_c_while_the_command_starts_leaves_no_traceback() -> None:
    code = "import os, signal; os.kill(os.getpid(), signal.SIGINT)"
    hook = f"import quintet.cli.main as m; m._run = lambda *a: exec({code!r}) or 0; raise SystemExit(m.main(['serve']))"
    done = subprocess.run([sys.executable, "-c", hook], capture_output=True, text=True, timeout=60)
    assert done.returncode == 130 and "Traceback" not in done.stderr


def test_ctrl_c_while_the_command_ends_leaves_no_traceback() -> None:
    """Libraries that a command loads clear up at the end: torch takes a tenth of a second."""
    hook = (
        "import atexit, os, signal; import quintet.cli.main as m; end = lambda: os.kill(os.getpid(), signal.SIGINT); "
        "m._run = lambda *a: atexit.register(end) and 0; raise SystemExit(m.main(['serve']))"
    )
    done = subprocess.run([sys.executable, "-c", hook], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
