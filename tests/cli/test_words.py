"""The command line as people type it: a model as the first word, `run`, help by topic, words of other programs."""

import io
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from quintet import SamplingParams
from quintet.cli import main as cli
from quintet.cli.commands import _engine as engine
from quintet.cli.commands import chat, embed, generate, rerank, run, serve
from quintet.cli.common_flags import COMMON_FLAGS
from quintet.config.schema import flags
from quintet.config.schema.unsupported import COMMANDS, FLAGS
from quintet.hub.model_names import is_model_name, served_name
from quintet.outputs import CompletionOutput, RequestOutput


def parsed(command: Any, *words: str) -> Any:
    parser = flags.Parser(prog="test")
    command.add_arguments(parser)
    return parser.parse(words)


def ended(words: list[str]) -> int:
    try:
        return cli.main(words)
    except SystemExit as end:
        return int(end.code or 0)


# ------------------------------------------------------------------------------------------------- names of models


@pytest.mark.parametrize(
    "word", ["bundled", "bundled-embed", "a/b", "Qwen/Qwen3-0.6B", "a/b:Q4_K_M", "qwen3:0.6b", "x.gguf", "/no/x.gguf"]
)
def test_words_that_name_a_model(word: str) -> None:
    assert is_model_name(word)


@pytest.mark.parametrize(
    "word", ["", "hello", "gpt2", "Once upon a time", "and / or", "What is 1/2 of x?", "a/b/c", "x" * 10_000, "a\0b"]
)
def test_words_that_are_texts(word: str) -> None:
    assert not is_model_name(word)


def test_a_path_that_is_there_names_a_model(tmp_path: Path) -> None:
    folder = tmp_path / "my model"
    assert not is_model_name(str(folder))
    folder.mkdir()
    assert is_model_name(str(folder))


def test_a_model_is_served_under_a_name_and_not_a_path(tmp_path: Path) -> None:
    snapshot = tmp_path / "models--a--b" / "snapshots" / "0123"
    names = {
        "/models/qwen2.5-coder-0.5b-instruct-Q4_K_M.gguf": "qwen2.5-coder-0.5b-instruct-Q4_K_M",
        "/models/big-00001-of-00003.gguf": "big",
        "/models/Qwen3-0.6B/": "Qwen3-0.6B",
        "./x.gguf": "x",
        str(snapshot): "a/b",
        "s3://bucket/models/mine": "mine",
        "Qwen/Qwen3-0.6B": "Qwen/Qwen3-0.6B",
        "a/b:Q4_K_M": "a/b:Q4_K_M",
        "bundled": "bundled",
        "/": "/",
    }
    assert {each: served_name(each) for each in names} == names


# ---------------------------------------------------------------------------------------------- the model as a word


@pytest.mark.parametrize(
    ("words", "model", "prompts"),
    [
        (["a/b", "Once upon a time"], "a/b", ["Once upon a time"]),
        (["a/b:Q8_0", "one", "two"], "a/b:Q8_0", ["one", "two"]),
        (["Once upon a time"], None, ["Once upon a time"]),
        (["Once", "a/b"], None, ["Once", "a/b"]),
        (["a/b"], "a/b", []),
        (["--", "a/b"], None, ["a/b"]),
        (["a/b", "--", "c/d"], "a/b", ["c/d"]),
        (["--model", "bundled", "a/b"], None, ["a/b"]),
        (["/no/model", "Hi"], "/no/model", ["Hi"]),  # a wrong path is no prompt beside another
        (["/no/model"], None, ["/no/model"]),
    ],
)
def test_the_first_word_is_the_model_if_it_names_one(words: list[str], model: str | None, prompts: list[str]) -> None:
    for command, place in ((generate, "PROMPT"), (embed, "TEXT")):
        arguments = parsed(command, *words)
        assert engine.take_model(arguments, getattr(arguments, place)) == prompts
        assert arguments.MODEL == model
        assert engine.engine_settings(arguments).get("model") in (model, "bundled" if "--model" in words else model)


def test_a_misspelt_bundled_model_is_no_prompt(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["generate", "bundled-visoin", "What is this?"]) == 1
    assert (
        "unknown bundled model 'bundled-visoin'; did you mean 'bundled-vision'?; if it is text"
        in capsys.readouterr().err
    )
    assert engine.take_model(parsed(generate, "--", "bundled-visoin"), ["bundled-visoin"]) == ["bundled-visoin"]


def test_a_model_that_was_taken_for_one_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", SimpleNamespace(isatty=lambda: True))
    assert cli.main(["generate", "bundled"]) == 1
    assert "no prompt ('bundled' is the model; `-- bundled` makes it the prompt)" in capsys.readouterr().err


@pytest.mark.parametrize("word", ["and/or", "TCP/IP", "12:30"])
def test_a_lone_word_at_a_terminal_is_the_text(word: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", SimpleNamespace(isatty=lambda: True))
    for command, place in ((generate, "PROMPT"), (embed, "TEXT")):
        arguments = parsed(command, word)
        assert engine.take_model(arguments, getattr(arguments, place)) == [word]
        assert engine.take_model(arguments, [word, "of x"]) == ["of x"]  # as "Qwen/Qwen3-0.6B"
        assert engine.take_model(arguments, [word], has_text=True) == []
    monkeypatch.setattr("sys.stdin", SimpleNamespace(isatty=lambda: False))
    assert engine.take_model(arguments, [word]) == []


@pytest.mark.parametrize(
    ("words", "model", "message"),
    [
        (["--model", "a/b", "Why?"], None, ["Why?"]),
        (["--", "hi"], None, ["hi"]),
        (["Why is", "the sky blue?"], None, ["Why is", "the sky blue?"]),
        (["gpt2"], "gpt2", []),
        (["Why?"], None, ["Why?"]),
        (["./absent", "hi"], "./absent", ["hi"]),
        (["gpt2", "--", "c/d"], "gpt2", ["c/d"]),
        (["a/b", "hi"], "a/b", ["hi"]),
    ],
)
def test_run_takes_its_model_as_generate_does(words: list[str], model: str | None, message: list[str]) -> None:
    arguments = parsed(run, *words)
    assert engine.take_first_as_model(arguments, arguments.PROMPT) == message
    assert arguments.MODEL == model


def test_the_error_of_an_unknown_model_names_dashes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert cli.main(["generate", "not/there", "is text"]) == 1
    assert "if 'not/there' is text, put it after --" in capsys.readouterr().err


def test_rerank_takes_a_model_before_query_and_file() -> None:
    two, three = parsed(rerank, "query", "file"), parsed(rerank, "a/b", "query", "file", "--json")
    assert (two.MODEL, two.QUERY, two.FILE) == (None, "query", "file")
    assert (three.MODEL, three.QUERY, three.FILE) == ("a/b", "query", "file")


def test_two_models_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["serve", "a/b"], ["chat", "a/b"], ["bench", "latency", "a/b"], ["rerank", "a/b", "q", __file__]):
        assert ended([*words, "--model", "c/d"]) == 1
        assert "two models: 'a/b' and --model 'c/d'; give one" in capsys.readouterr().err


def test_names_of_the_served_model_end_at_the_model(capsys: pytest.CaptureFixture[str]) -> None:
    before = parsed(serve, "a/b", "--served-model-name", "x", "y")
    assert (before.MODEL, vars(before)["ServerConfig.served_model_name"]) == ("a/b", ["x", "y"])
    for words, names in (
        (["--served-model-name", "x", "a/b"], ("x",)),
        (["--served-model-name", "x", "y", "bundled"], ("x", "y")),
        (["--served-model-name", "x", "--served-model-name", "y"], ("x", "y")),
        (["bundled", "--served-model-name=x", "--port", "0"], ("x",)),
    ):
        server, config = serve._settings(parsed(serve, *words))
        assert server.served_model_name == names
        assert config.model == ("a/b" if "a/b" in words else "bundled")
    assert ended(["serve", "--served-model-name", "x", "gpt2"]) == 1
    assert "no model is left; give the model first: `quintet serve bundled " in capsys.readouterr().err


def test_run_answers_one_prompt_or_talks(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str | None] = []
    monkeypatch.setattr(chat, "run", lambda arguments, prompt=None: asked.append(prompt) or 0)
    monkeypatch.setattr("sys.stdin", SimpleNamespace(isatty=lambda: True))
    assert run.run(parsed(run, "a/b", "why is", "the sky blue?")) == 0
    assert run.run(parsed(run, "a/b")) == 0
    monkeypatch.setattr("sys.stdin", SimpleNamespace(isatty=lambda: False, buffer=io.BytesIO(b"two\nlines\n")))
    assert run.run(parsed(run, "a/b")) == 0
    assert asked == ["why is the sky blue?", None, "two\nlines"]


def test_run_continues_a_prompt_where_there_is_no_chat_template(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Base:
        def get_tokenizer(self) -> SimpleNamespace:
            return SimpleNamespace(chat_template=None)

        def get_default_sampling_params(self) -> SamplingParams:
            return SamplingParams()

        def stream(self, prompt: str, params: SamplingParams, lora_request: None = None) -> Iterator[RequestOutput]:
            completion = CompletionOutput(index=0, text=f"{prompt} {params.max_tokens}", token_ids=[1], events=[])
            yield RequestOutput("0", prompt, [1], None, [completion], finished=True)

        def close(self) -> None:
            pass

    monkeypatch.setattr(engine, "open_engine", lambda *_: Base())
    assert cli.main(["run", "a/b", "The sky is", "--quiet"]) == 0
    captured = capsys.readouterr()
    assert captured.out == f"The sky is {generate.MAX_TOKENS}\n"
    assert "no chat template: the prompt is continued" in captured.err


# ------------------------------------------------------------------------------------------------------------- help


@pytest.mark.parametrize("command", COMMON_FLAGS)
def test_help_is_short_and_names_the_rest(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert ended([*command.split(), "--help"]) == 0
    text = capsys.readouterr().out
    assert f"usage: quintet {command} " in text and len(text.splitlines()) < 75
    assert 5 <= len(COMMON_FLAGS[command]) <= 18
    assert "more flags: --help=GROUP shows a group" in text and "--help-all all of them" in text
    assert ended([*command.split(), "--help-all"]) == 0
    assert len(capsys.readouterr().out) > len(text)


@pytest.mark.parametrize(
    ("topic", "shown", "hidden"),
    [
        ("listgroup", "scheduling", "--max-num-seqs"),
        ("scheduling", "--max-num-seqs", "--host"),
        ("ModelConfig", "--revision", "--host"),
        ("max_num_seqs", "--max-num-seqs", "--max-num-batched-tokens"),
        ("--tp", "--tensor-parallel-size", "--host"),
        ("max-num", "--max-num-batched-tokens", "--host"),
        ("all", "--host", "common flags"),
    ],
)
def test_help_has_topics(topic: str, shown: str, hidden: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert ended(["serve", f"--help={topic}"]) == 0
    text = capsys.readouterr().out
    assert shown in text and hidden not in text
    assert ended(["help", "serve", topic]) == 0
    assert capsys.readouterr().out == text


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["serve", "--help=schedulng"], 2, "did you mean 'scheduling'?"),
        (["serve", "--help=xyzzy"], 2, "groups are options, server"),
        (["help", "chta"], 2, "unknown command 'chta'; did you mean 'chat'?"),
        (["help", "bench"], 0, "bench throughput"),
        (["help"], 0, "usage: quintet COMMAND"),
        (["help", "ls"], 0, "usage: quintet list"),
    ],
)
def test_help_of_a_wrong_word(words: list[str], code: int, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert ended(words) == code
    captured = capsys.readouterr()
    assert says in captured.err + captured.out


# ------------------------------------------------------------------------------------------------ words of others


@pytest.mark.parametrize(
    "flag", [*"-c -ngl -np -m -p -n -t -s -b -fa".split(), *[each for each in FLAGS if "--" in each]]
)
def test_flags_of_other_programs_get_their_sentence(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    command = "router" if flag in ("-m", "--temperature", "--max-tokens", "--system", "--url") else "complete"
    assert ended([command, flag, "1"]) == 2
    assert f"there is no {flag}: {FLAGS[flag]}" in capsys.readouterr().err


@pytest.mark.parametrize("word", COMMANDS)
def test_commands_of_other_programs_get_their_sentence(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([word, "x"]) == 2
    assert COMMANDS[word] in capsys.readouterr().err
