"""The command line: what it answers to wrong words, what it imports, and how a conversation goes."""

import json
import logging
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from quintet import SamplingParams
from quintet.cli import main as cli
from quintet.cli.chat.conversation import TerminalConversation
from quintet.cli.commands import chat, generate
from quintet.cli.commands._engine import sampling_params
from quintet.cli.tables import table
from quintet.clients.latency import percentiles
from quintet.common import logging_setup as logs
from quintet.config.schema import flags
from quintet.outputs import CompletionOutput, RequestOutput
from quintet.parsers import Content


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["genrate"], 2, "did you mean 'generate'"),
        (["help", "enviroment"], 2, "unknown command 'enviroment'"),
        (["--verison"], 2, "did you mean '--version'"),
        (["bench"], 2, "bench latency"),
        (["bench", "latncy"], 2, "did you mean 'latency'"),
        (["sevre"], 2, "did you mean 'serve'?"),
        (["platforms", "--jsn"], 2, "did you mean '--json'"),
        (["generate", "--xyzzy", "x"], 2, "unknown flag '--xyzzy'\n"),
        (["explain", "a", "b"], 2, "unexpected argument 'b'"),
        (["serve", "a", "b"], 2, "unexpected argument 'b'; `--models FOLDER`"),
        (["platforms", "cpu"], 2, "unexpected argument 'cpu'"),
        (["generate", "--max-token", "5", "x"], 2, "did you mean '--max-tokens'"),
        (["generate", "--bogus", "x"], 2, "unknown flag '--bogus'\n"),
        (["generate", "--max_tokn=5", "x"], 2, "did you mean '--max-tokens'"),
        (["generate", "--swap-space", "4", "x"], 2, "nothing is swapped"),
        (["generate", "--max-tokens", "x", "y"], 2, "whole number"),
        (["generate", "--max-tokens"], 2, "expected one argument"),
        (["generate", "--temperature", "-1", "x"], 2, "from 0 to"),
        (["generate", "--temperature", "nan", "x"], 2, "from 0 to"),
        (["generate", "--dtype", "int8", "x"], 2, "one of auto, float32"),
        (["generate", "--logit-bias", "{", "x"], 2, "JSON"),
        (["generate", "--n", "0", "x"], 2, "from 1 to"),
        (["generate", "--min-tokens", "9", "--max-tokens", "3", "x"], 1, "--min-tokens must be at most --max-tokens"),
        (["generate", "--model-impl", "other", "x"], 2, "one of auto, quintet, transformers"),
        (["generate", "--quantization", "int3", "x"], 2, "one of int8, int4, w8a8, w4a8"),
        (["generate", "--quantization", "awq", "x"], 1, "by one of int8, int4, w8a8, w4a8, fp8"),
        (["generate", "--num-pages", "9", "--kv-cache-memory-bytes", "1G", "x"], 1, "give one of them"),
        (["explain", "a", "--model", "b"], 1, "two models"),
        (["bench", "latency", "--batch-size", "0"], 2, "at least 1"),
    ],
)
def test_wrong_words(words: list[str], code: int, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert _exit_code(words) == code
    captured = capsys.readouterr()
    assert says in captured.err + captured.out
    assert "Traceback" not in captured.err


def _exit_code(words: list[str]) -> int:
    try:
        return cli.main(words)
    except SystemExit as end:
        return int(end.code or 0)


def test_prompts_and_flags_mix_and_two_dashes_end_the_flags() -> None:
    parser = flags.Parser(prog="test")
    generate.add_arguments(parser)
    found = parser.parse(["a b", "--max_tokens", "4", "c", "--", "--dash", "-1"])
    assert found.PROMPT == ["a b", "c", "--dash", "-1"]
    assert flags.given_settings(found, SamplingParams) == {"max_tokens": 4}
    assert parser.parse(["--", "--x_y"]).PROMPT == ["--x_y"]
    assert parser.parse([]).PROMPT == []
    assert flags.given_settings(parser.parse(["--stop", "a", "--stop=b_c"]), SamplingParams) == {"stop": ["a", "b_c"]}


def test_percentiles_are_of_the_nearest_rank() -> None:
    assert percentiles([2.0, 1.0]) == {"mean": 1.5, "p10": 1.0, "p50": 1.0, "p90": 2.0, "p99": 2.0}
    assert percentiles([*map(float, range(1, 101))])["p99"] == 99.0


@pytest.mark.parametrize("command", [*cli.COMMANDS])
def test_every_command_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert _exit_code([*command.split(), "--help"]) == 0
    assert f"usage: quintet {command}" in capsys.readouterr().out


def test_an_unknown_variable_stops_every_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("QUINTET_DEVISE", "cpu")
    assert cli.main(["platforms"]) == 1
    assert "did you mean 'QUINTET_DEVICE'" in capsys.readouterr().err


def test_platforms_prints_facts_and_reasons(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["platforms"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("cpu") and " available " in line for line in lines)
    assert any(line.startswith("null") for line in lines)
    assert lines[-1].startswith("auto → ")


def test_help_fits_a_screen_and_has_a_topic_for_variables(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0
    text = capsys.readouterr().out
    assert len(text.splitlines()) < 40 and "QUINTET_DEVICE" not in text and "`quintet help environment`" in text
    assert cli.main(["help", "environment"]) == 0
    assert "QUINTET_DEVICE" in capsys.readouterr().out


@pytest.mark.parametrize("words", [["--version"], ["--help"], ["generate", "--help"], ["genrate"]])
def test_words_alone_import_nothing_slow(words: list[str]) -> None:
    code = (
        "import sys\nfrom quintet.cli import main as cli\n"
        f"try: cli.main({words!r})\nexcept SystemExit: pass\n"
        "sys.exit(any(name in sys.modules for name in ('torch', 'transformers', 'numpy', 'huggingface_hub')))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60).returncode == 0


def test_the_log_says_where_only_when_asked(capsys: pytest.CaptureFixture[str]) -> None:
    log = logging.getLogger("quintet.x")
    for level in ("WARNING", "INFO", "DEBUG"):
        logs.install_terminal_log(level)
        log.warning("w")
        log.info("i")
    assert capsys.readouterr().err.splitlines() == [
        "warning: w", "warning: w", "i", "warning: quintet.x: w", "quintet.x: i"
    ]  # fmt: skip


def test_a_table_lines_up() -> None:
    assert table(("a", "bb"), [("long", "x y"), ("s", "")]) == "a     bb\nlong  x y\ns"


# ------------------------------------------------------------------------------------------------------ conversation


@dataclass
class Parrot:
    """Answers each message with its last word, in two pieces; refuses "fail"."""

    heard: list[list[dict[str, str]]] = field(default_factory=list)
    closed: int = 0

    def stream_chat(self, messages: list[dict[str, str]], params: SamplingParams) -> Iterator[RequestOutput]:
        self.heard.append(messages)
        word = messages[-1]["content"].split()[-1]
        if word == "fail":
            raise ValueError("too long")
        try:
            for piece in (word[:1], word[1:]):
                if word == "stop" and piece == "top":
                    raise KeyboardInterrupt
                completion = CompletionOutput(index=0, text=piece, token_ids=[1], events=[Content(piece)])
                yield RequestOutput("0", "", [1], None, [completion], finished=False)
        finally:
            self.closed += 1


def _talk(*lines: str, interactive: bool = True) -> tuple[TerminalConversation, Parrot, list[bool]]:
    parrot: Any = Parrot()
    talk = TerminalConversation(parrot, SamplingParams())
    talk.interactive = interactive
    return talk, parrot, [talk.handle_line(line) for line in lines]


def test_a_conversation_is_remembered_until_reset(capsys: pytest.CaptureFixture[str]) -> None:
    talk, parrot, _ = _talk("/system be kind", "say hello", "", "say bye", "/reset", "new")
    assert capsys.readouterr().out.split() == ["hello", "bye", "new"]
    system = {"role": "system", "content": "be kind"}
    assert [message["content"] for message in parrot.heard[1]] == ["be kind", "say hello", "hello", "say bye"]
    assert parrot.heard[2] == [system, {"role": "user", "content": "new"}]
    assert talk.messages[0] == system


def test_commands_are_answered_not_sent(capsys: pytest.CaptureFixture[str]) -> None:
    _, parrot, went_on = _talk("/help", "/rest", "/exit")
    assert went_on == [True, True, False]
    assert parrot.heard == []
    assert "did you mean '/reset'" in capsys.readouterr().err


def test_retry_answers_the_last_message_again(capsys: pytest.CaptureFixture[str]) -> None:
    talk, parrot, _ = _talk("/retry", "say one", "say two", "/retry")
    assert [message["content"] for message in parrot.heard[2]] == ["say one", "one", "say two"]
    assert [message["content"] for message in talk.messages] == ["say one", "one", "say two", "two"]
    captured = capsys.readouterr()
    assert captured.out.split() == ["one", "two", "two"]
    assert "no message to answer again" in captured.err
    talk.messages[-2]["content"] = "please fail"
    before = list(talk.messages)
    talk.handle_line("/retry")
    assert talk.messages == before  # the old answer stays where there is no new one


def test_set_changes_sampling_parameters(capsys: pytest.CaptureFixture[str]) -> None:
    lines = ("/set temperature 0.5", "/set parameter num_predict 9", "/set top-k 3", "/set stop a", "/set")
    talk, _, _ = _talk(*lines)
    found = talk.params
    assert (found.temperature, found.max_tokens, found.top_k, found.stop) == (0.5, 9, 3, ["a"])
    assert "temperature 0.5" in capsys.readouterr().err.splitlines()
    for line, says in (
        ("/set tempreature 1", "did you mean 'temperature'"),
        ("/set temperature", "no value for temperature"),
        ("/set temperature -1", "temperature must be"),
        ("/set top_k x", "top_k must be a whole number"),
        ("/set n 2", "unknown sampling parameter 'n'"),
    ):
        assert talk.handle_line(line)
        assert says in capsys.readouterr().err
    assert talk.params == found
    talk.params = {"temperature": 0.1}  # a server's
    talk.handle_line("/set max_tokens 4k")
    assert talk.params == {"temperature": 0.1, "max_tokens": 4000}


def test_a_saved_conversation_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, other = tmp_path / "talk.json", tmp_path / "other.json"
    talk, _, _ = _talk("/system be kind", "say hello", f"/save {file}")
    assert json.loads(file.read_text()) == {"messages": talk.messages}
    after, parrot, _ = _talk(f"/load {file}", "say bye", f"/save {file}")
    assert [message["content"] for message in parrot.heard[0]] == ["be kind", "say hello", "hello", "say bye"]
    assert after.system == "be kind"
    assert len(json.loads(file.read_text())["messages"]) == 5
    capsys.readouterr()
    other.write_text("precious")
    for line, says in (
        (f"/save {other}", "is no saved conversation"),
        (f"/load {other}", "cannot load"),
        (f"/load {tmp_path}/none", "give a file that /save wrote"),
        ("/save", "no file: give one"),
        (f"/save {tmp_path}/none/x", "give the path of a new file"),
    ):
        after.handle_line(line)
        assert says in capsys.readouterr().err
    assert other.read_text() == "precious" and len(after.messages) == 5


def test_lines_become_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    typed = iter(['"""one', "", 'two"""', "a\\", "b", '"""', "c\\", '"""', "d", '"""alone"""', "e\\"])
    prompts: list[str] = []

    def read(prompt: str) -> str:
        prompts.append(prompt)
        try:
            return next(typed)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr("builtins.input", read)
    assert list(chat._lines(True)) == ["one\n\ntwo", "a\nb", "\nc\\\n", "d", "alone", "e"]
    assert prompts[:5] == ["> ", "... ", "... ", "> ", "... "]


def test_a_refused_message_is_taken_back(capsys: pytest.CaptureFixture[str]) -> None:
    talk, parrot, _ = _talk("please fail", "go on")
    assert talk.failed
    assert "too long" in capsys.readouterr().err
    assert [message["content"] for message in parrot.heard[1]] == ["go on"]


def test_an_interrupt_ends_the_answer_and_keeps_what_came(capsys: pytest.CaptureFixture[str]) -> None:
    talk, parrot, went_on = _talk("please stop")
    assert went_on == [True]
    assert talk.messages[-1] == {"role": "assistant", "content": "s"}
    assert parrot.closed == 1
    with pytest.raises(KeyboardInterrupt):
        _talk("please stop", interactive=False)


def test_the_user_outranks_the_model_and_the_model_the_command() -> None:
    class Model:
        def get_default_sampling_params(self) -> SamplingParams:
            return SamplingParams(temperature=0.6, top_p=0.9)

    model: Any = Model()
    params = sampling_params(model, {"temperature": 0.0}, max_tokens=256, top_p=0.5)
    assert (params.temperature, params.top_p, params.max_tokens) == (0.0, 0.9, 256)


@pytest.mark.parametrize(
    ("words", "output"),
    [
        (["generate", "--model", "FILE", "x"], "_engine.print_stderr = first"),
        (["chat", "--model", "FILE"], "_engine.print_stderr = first"),
        (["serve", "FILE", "--port", "0"], "serve.logger.info = lambda form, text: first(text)"),
    ],
)
def test_a_start_names_the_model_before_torch_is_imported(words: list[str], output: str, tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(bytes(2**20))
    code = f"""
import sys
from quintet.cli import main
from quintet.cli.commands import _engine, serve
def first(text):
    print(text, 'torch' in sys.modules)
    sys.exit()
{output}
main.main({[str(file) if word == "FILE" else word for word in words]!r})
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.returncode) == (f"loading {file} (1 MiB) False\n", 0), done.stderr
