"""The commands as a person runs them, on the bundled model: what is printed where, exit codes, Ctrl-C."""

import contextlib
import json
import os
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from quintet.cli import main as cli

QUINTET = [sys.executable, "-m", "quintet"]
FRANCE, PARIS = "What is the capital of France?", "The capital of France is Paris."
SKY, BLUE = "What color is the sky?", "The sky is blue."


def _run(*words: str, stdin: str = "", **environ: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **environ}
    return subprocess.run([*QUINTET, *words], input=stdin, capture_output=True, text=True, timeout=120, env=environment)


def test_generate_prints_text_and_speed() -> None:
    done = _run("generate", "--chat", "--temperature", "0", FRANCE)
    assert (done.returncode, done.stdout) == (0, PARIS + "\n")
    figures = r"\d+ prompt tokens, first token after .* tokens of output, .* tokens/s\n"
    assert re.fullmatch(f"loading bundled\n{figures}", done.stderr)


@pytest.mark.slow
def test_generate_takes_several_prompts_in_order() -> None:
    done = _run("generate", "--json", "-q", "--chat", "--temperature", "0", "--logprobs", "1", "--n", "2", FRANCE, SKY)
    assert (done.returncode, done.stderr) == (0, "")
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert [[each["text"] for each in answer["outputs"]] for answer in answers] == [[PARIS] * 2, [BLUE] * 2]
    first = answers[0]["outputs"][0]
    assert first["finish_reason"] == "stop" and len(first["logprobs"]) == len(first["token_ids"])
    assert {"logprob", "rank", "decoded_token"} == set(first["logprobs"][0][str(first["token_ids"][0])])


@pytest.mark.slow
def test_generate_reads_standard_input_whole() -> None:
    done = _run("generate", "--chat", "--temperature", "0", "-q", stdin=FRANCE + "\n")
    assert (done.returncode, done.stdout, done.stderr) == (0, PARIS + "\n", "")


def test_generate_takes_prompts_from_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text(f"{FRANCE}\n\n{SKY}\n", encoding="utf-8")
    assert cli.main(["generate", "--chat", "--temperature", "0", "-q", "--prompts-file", str(file)]) == 0
    assert capsys.readouterr().out == f"> {FRANCE}\n{PARIS}\n\n> {SKY}\n{BLUE}\n\n"
    for raw, says in ((b"caf\xe9\n", "no UTF-8 text (byte 3 is 0xe9)"), (b"\n \n", "holds no prompts")):
        file.write_bytes(raw)
        assert cli.main(["generate", "--prompts-file", str(file)]) == 1
        assert says in capsys.readouterr().err
    assert cli.main(["generate", "--prompts-file", str(file), "x"]) == 1
    assert "give one of them" in capsys.readouterr().err


def test_generate_shows_log_probabilities(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["generate", "-q", "--temperature", "0", "--max-tokens", "2", "--logprobs", "2"]
    assert cli.main([*words, "Once"]) == 0
    assert re.search(r"\n +-\d\.\d{3}  'upon'  \('.*' -\d+\.\d{3}\)\n", capsys.readouterr().out)


@pytest.mark.parametrize(
    ("words", "environ", "says"),
    [
        (["-m", "/no/such/folder", "x"], {}, "no folder '/no/such/folder'"),
        (["--device", "cpux", "x"], {}, "did you mean 'cpu'"),
        (["x"], {"QUINTET_DEVICE": "tpux"}, "did you mean 'tpu'"),
        (["--max-model-len", "1T", "x"], {}, "--max-model-len"),
        (["--kv-cache-memory-bytes", "1k", "x"], {}, "KV cache"),
        (["--hf-overrides", '{"hiden_size": 1}', "x"], {}, "did you mean 'hidden_size'"),
        (["x " * 5000], {}, "--max-model-len"),
    ],
)
def test_failures_are_one_message(
    words: list[str],
    environ: dict[str, str],
    says: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert cli.main(["generate", *words]) == 1
    captured = capsys.readouterr()
    assert says in captured.err
    assert "Traceback" not in captured.err
    assert captured.out == ""


@pytest.mark.slow
def test_debug_shows_where_it_failed() -> None:
    done = _run("generate", "-m", "/no/such/folder", "x", QUINTET_LOG_LEVEL="DEBUG")
    assert done.returncode == 1
    assert "Traceback" in done.stderr


def test_a_reader_that_leaves_is_no_failure_worth_a_word() -> None:
    words = ["generate", "-q", "--ignore-eos", "--max-tokens", "400", "x"]
    with subprocess.Popen([*QUINTET, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout and process.stderr
        process.stdout.read(1)
        process.stdout.close()
        assert process.stderr.read() == b""


def test_explain_names_platform_memory_and_providers(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["explain", "bundled"]) == 0
    page = capsys.readouterr().out
    for word in ("cpu", "rms_norm", "reference", "pages"):
        assert word in page


def test_an_attention_backend_is_obeyed_or_refused_with_those_that_there_are(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.main(["explain", "bundled", "--device", "cpu", "--attention-backend", "TORCH_SDPA"]) == 0
    assert re.search(r"paged_attention +torch +asked for", capsys.readouterr().out)
    assert cli.main(["explain", "bundled", "--device", "cpu", "--attention-backend", "FLASH_ATTN"]) == 1
    said = capsys.readouterr().err
    assert "'flash_attn' was asked for, and does not serve paged_attention" in said and "torch (serves)" in said


def test_what_a_platform_cannot_capture_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["explain", "bundled", "--device", "cpu", "--cudagraph-capture-sizes", "1", "2"]) == 0
    assert "capture_sizes: nothing changes, for platform cpu captures no steps" in capsys.readouterr().out


def test_collect_env_prints_versions_and_no_secrets(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    assert cli.main(["collect-env"]) == 0
    page = capsys.readouterr().out
    assert "torch:" in page
    assert "hf_secret" not in page


@pytest.mark.parametrize("kind", ["latency", "throughput"])
def test_bench_prints_and_writes_figures(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    load = {"latency": ["--batch-size", "2", "--num-iters", "2"], "throughput": ["--num-prompts", "3"]}[kind]
    file = tmp_path / "figures.json"
    lengths = ["--input-len", "8", "--output-len", "4"]
    assert cli.main(["bench", kind, *load, *lengths, "--output-json", str(file)]) == 0
    figures, page = json.loads(file.read_text()), capsys.readouterr().out
    assert figures["output_tokens_per_s"] > 0
    assert all(name in page for name in figures)


def test_bench_latency_traces_one_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    load = ["--batch-size", "2", "--num-iters-warmup", "0", "--input-len", "8", "--output-len", "4", "--profile"]
    allowed = ["--profiler-config.profiler", "torch", "--profiler-config.torch_profiler_dir", str(tmp_path)]
    assert cli.main(["bench", "latency", *load]) == 1
    assert "traces are off; allow them with --profiler-config " in capsys.readouterr().err
    assert cli.main(["bench", "latency", *load, *allowed]) == 0
    (path,) = tmp_path.iterdir()
    assert capsys.readouterr().out.strip() == str(path)


# ------------------------------------------------------------------------------------------------------------- chat


def test_chat_answers_piped_lines_and_remembers() -> None:
    done = _run("chat", "--temperature", "0", stdin=f"{FRANCE}\n/reset\n{SKY}\n")
    assert (done.returncode, done.stdout.splitlines()) == (0, [PARIS, BLUE])


WEATHER = 'def get_weather(city: str) -> str:\n    "Get the weather in a city"\n    return "sunny, 21 degrees"\n'


@pytest.mark.slow
def test_chat_asks_before_a_tool_runs(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(WEATHER)
    terminal = Terminal("chat", "--temperature", "0", "--quiet", "--tools", str(tmp_path / "mine.py"))
    terminal.until("> ", 120)  # it starts
    terminal.type("What is the weather in Paris?\n")
    terminal.until('call: get_weather {"city": "Paris"}')
    terminal.until("[y]es, [n]o, [a]lways this tool: ")
    terminal.insist("a\n", "result: sunny, 21 degrees")
    terminal.until("The weather in Paris: sunny, 21 degrees.")
    terminal.until("> ")
    terminal.insist("What is the weather in Oslo?\n", "The weather in Oslo: sunny, 21 degrees.")
    terminal.until("> ")
    terminal.insist("\x04", END)
    assert terminal.exit_code() == 0


# A process of its own sets the stage: this one has threads, and must not run Python between fork and exec.
# Tests that were started in the background inherit that SIGINT is ignored.
HEEDING_CTRL_C = [
    *(sys.executable, "-c"),
    "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL); os.execv(sys.argv[1], sys.argv[1:])",
]
IN_TERMINAL = [
    *(sys.executable, "-c"),
    "import os, pty, sys; sys.exit(os.waitstatus_to_exitcode(pty.spawn(sys.argv[1:])))",
]


END = "\0"  # comes from no program: until(END) reads all there is
# An answer of half a minute at least: it goes on however late Ctrl-C comes. Eager, so that each token takes its time.
ENDLESS = [
    *("--ignore-eos", "--enforce-eager", "--quiet", "--max-tokens", "30000"),
    *("--hf-overrides", '{"max_position_embeddings": 32768}', "--max-model-len", "32768"),
]


class Terminal:
    """A program in a pseudo-terminal."""

    def __init__(self, *words: str) -> None:
        command = [*IN_TERMINAL, *HEEDING_CTRL_C, *QUINTET, *words]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self._process.stdin and self._process.stdout
        self._keys, self._screen = self._process.stdin.fileno(), self._process.stdout.fileno()
        self.seen = ""

    def until(self, text: str, seconds: float = 60) -> str:
        """Reads until the text comes, and returns all that came since the last call."""
        end = time.monotonic() + seconds
        while text not in self.seen:
            ready, _, _ = select.select([self._screen], [], [], max(0.0, end - time.monotonic()))
            assert ready, f"{text!r} did not come: {self.seen!r}"
            read = os.read(self._screen, 65536)
            if not read:  # the program has ended
                assert text == END, f"{text!r} never came: {self.seen!r}"
                break
            self.seen += read.decode(errors="replace")
        before, _, self.seen = self.seen.partition(text)
        return before

    def type(self, text: str) -> None:
        with contextlib.suppress(BrokenPipeError):  # who reads on learns that the program has ended
            os.write(self._keys, text.encode())

    def insist(self, text: str, answer: str) -> None:
        """Types until the answer comes: the line editor drops what is typed while it takes the terminal over."""
        for _ in range(6):
            self.type(text)
            with contextlib.suppress(AssertionError):
                self.until(answer, 20)  # long enough that nothing is typed twice on a busy machine
                return
        raise AssertionError(f"{answer!r} never came: {self.seen!r}")

    def exit_code(self) -> int:
        self.until(END)
        with self._process as process:
            return process.wait(60)


@pytest.mark.slow
def test_ctrl_c_stops_the_answer_and_not_the_program() -> None:
    terminal = Terminal("chat", "--temperature", "0", *ENDLESS)
    terminal.until("> ", 120)  # it starts
    terminal.type("Tell me a story.\n")
    terminal.until("\n")
    terminal.until(" ")  # of the answer
    terminal.insist("\x03", "[stopped]")
    terminal.until("> ")
    terminal.insist("\x03", "Ctrl-D leaves")
    terminal.until("> ")
    terminal.insist("/hepl\n", "did you mean '/help'")
    terminal.until("> ")
    terminal.insist("\x04", END)
    assert terminal.exit_code() == 0


@pytest.mark.slow
def test_ctrl_c_ends_other_commands_quietly() -> None:
    words = ["generate", *ENDLESS, "x"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([*HEEDING_CTRL_C, *QUINTET, *words], **pipes) as process:
        assert process.stdout and process.stderr
        process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
        assert process.stderr.read() == b""


def test_quantize_writes_a_model_that_runs_and_says_what_it_costs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text, report = tmp_path / "held-out.txt", tmp_path / "report.json"
    text.write_text(f"{SKY}\n{BLUE}\n{FRANCE}\n{PARIS}\n" * 3)
    words = [
        "bundled",
        "-o",
        str(tmp_path / "made"),
        "--scheme",
        "W8A8",
        "--evaluate",
        str(text),
        "--json",
        str(report),
    ]
    assert cli.main(["quantize", *words, "--device", "cpu"]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"42 products as W8A8 by rtn, 1 left as they were; 9.3 MB -> 5.2 MB in .* s\nKL mean 0\.", shown)
    found = json.loads(report.read_text())
    assert 0 < found["mean"] < 0.1
    assert found["perplexity_after"] == pytest.approx(found["perplexity_before"], rel=0.2)
    assert cli.main(["generate", "--model", str(tmp_path / "made"), "--chat", "--temperature", "0", FRANCE]) == 0
    assert capsys.readouterr().out == PARIS + "\n"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "no model to quantize"),
        (["bundled"], "-o DIR"),
        (["bundled", "-o", "made", "--scheme", "W4A17"], "did you mean 'W4A16'"),
        (["bundled", "-o", "made", "--method", "awq"], "needs calibration"),
        (["./nothing", "-o", "made"], "no folder './nothing' here"),
    ],
)
def test_quantize_refuses(words: list[str], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [str(tmp_path / word) if word == "made" else word for word in words]
    assert cli.main(["quantize", *words]) == 1
    assert says in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
