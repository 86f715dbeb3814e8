"""`quintet chat --url` and `quintet complete`: what is sent, what is printed, and what each failure says."""

import argparse
import contextlib
import io
import socket
import ssl
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quintet.cli import main as cli
from quintet.cli.chat.conversation import TerminalConversation
from quintet.cli.chat.permission import REFUSED
from quintet.clients import errors
from quintet.clients import server_address as target
from quintet.clients.chat_deltas import ChatDeltaParser
from quintet.clients.remote_engine import RemoteEngine, ServerSpeed
from quintet.clients.server_address import ServerTarget, server_url
from quintet.config import Environment, read_environment
from quintet.parsers.events import MessageBuilder
from tests.clients.conftest import KEY, Fake


@pytest.fixture
def free_port() -> Iterator[int]:
    """A port that nobody listens on."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]


def typed(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))


# --------------------------------------------------------------------------------------------------------- complete


def test_a_prompt_is_continued_with_what_was_given(fake: Fake, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["complete", "Once", "--url", fake.url + "/v1/", "--max-tokens", "3", "--stop", "x", "--top-k", "5"]
    assert cli.main([*words, "--logit-bias", '{"7": -1}']) == 0
    (body,) = fake.bodies()
    assert body == {
        "model": "echo", "prompt": "Once", "max_tokens": 3, "stop": ["x"], "top_k": 5, "logit_bias": {"7": -1.0},
        "stream": True, "stream_options": {"include_usage": True},
    }  # fmt: skip
    captured = capsys.readouterr()
    assert captured.out == " 0 1 2\n"
    assert "7 prompt tokens" in captured.err and "3 tokens of output" in captured.err


def test_a_prompt_may_come_through_a_pipe_and_over_a_socket(
    fake: Fake, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    typed(monkeypatch, "Once\nupon\n")
    assert cli.main(["complete", "--uds", fake.uds, "-m", "other", "-q"]) == 0
    assert (fake.bodies()[0]["prompt"], fake.bodies()[0]["model"]) == ("Once\nupon", "other")
    assert capsys.readouterr() == (" 0 1 2 3\n", "")
    assert [asked.path for asked in fake.asked] == ["/v1/completions"]  # a model that is named is not looked up


def test_tokens_are_counted_in_events_where_the_server_counts_none(
    fake: Fake, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["complete", "x", "--url", fake.url, "-m", "no-usage"]) == 0
    assert "4 tokens of output" in capsys.readouterr().err


@pytest.mark.parametrize("model", ["drips", "until-close"])
def test_any_framing_will_do(fake: Fake, model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["complete", "x", "--url", fake.url, "-m", model, "-q"]) == 0
    assert capsys.readouterr().out == {"drips": "ö\n", "until-close": "all\n"}[model]


@pytest.mark.parametrize(
    ("model", "says", "shown"),
    [
        ("breaks-off", "broke the connection off", "half"),
        ("ends-early", "the stream ended early", "half"),
        ("fails-midway", "ended the answer with an error: out of pages", "half"),
        ("bad-chunk", "broke the connection off", "half"),
        ("bad-event", "no chunk of an answer", ""),
        ("html", "no event stream", ""),
        ("fault", "answered 500: it broke", ""),
        ("hangs-up", "broke the connection off", ""),
        ("othr", "unknown model 'othr'; did you mean 'other'?", ""),
    ],
)
def test_each_failure_says_what_it_is(
    fake: Fake, model: str, says: str, shown: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["complete", "x", "--url", fake.url, "-m", model]) == 1
    captured = capsys.readouterr()
    assert says in captured.err and "Traceback" not in captured.err
    assert captured.out.strip() == shown


def test_a_refused_connection_says_how_to_start_a_server(free_port: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["complete", "x", "--url", f"http://127.0.0.1:{free_port}"]) == 1
    said = capsys.readouterr().err
    assert f"http://127.0.0.1:{free_port}" in said and f"quintet serve --port {free_port}" in said
    assert cli.main(["complete", "x", "--uds", "/nowhere/socket"]) == 1
    assert "quintet serve --uds /nowhere/socket" in capsys.readouterr().err


def test_a_server_of_another_kind_is_named_as_such(fake: Fake, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["complete", "x", "--url", fake.url + "/elsewhere"]) == 1
    assert "is it an OpenAI-compatible server?" in capsys.readouterr().err
    fake.models = []
    assert cli.main(["complete", "x", "--url", fake.url]) == 1
    assert "lists no models" in capsys.readouterr().err


def test_tls_to_a_plain_server_is_explained(fake: Fake, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["complete", "x", "--url", f"https://127.0.0.1:{fake.port}"]) == 1
    assert "is it http:// there?" in capsys.readouterr().err


# --------------------------------------------------------------------------------------------------------------- key


def test_the_key_comes_from_the_flag_or_the_environment(
    fake: Fake, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake.key = KEY
    assert cli.main(["complete", "x", "--url", fake.url]) == 1
    said = capsys.readouterr().err
    assert "401" in said and "OPENAI_API_KEY" in said and "who are you?" in said
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    assert cli.main(["complete", "x", "--url", fake.url]) == 0
    assert cli.main(["complete", "x", "--url", fake.url, "--api-key", "wrong"]) == 1


def test_the_key_is_never_shown() -> None:
    environment = read_environment({"OPENAI_API_KEY": KEY})
    assert environment.openai_api_key == KEY
    assert KEY not in repr(environment) and KEY not in str(environment.variables())
    assert "OPENAI_API_KEY" in Environment.descriptions()
    assert KEY not in repr(ServerTarget(api_key=KEY))


def test_a_key_cannot_smuggle_a_header(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "a\r\nx: y")
    with pytest.raises(ValueError, match="one line"):
        target.target(argparse.Namespace())


# --------------------------------------------------------------------------------------------------------------- URL


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ("http://127.0.0.1:8000", "http://127.0.0.1:8000"),
        (" http://a/v1/ ", "http://a"),
        ("https://a.example/api/v1", "https://a.example/api"),
        ("http://[::1]:80/", "http://[::1]:80"),
    ],
)
def test_an_address_has_one_form(given: str, found: str) -> None:
    assert server_url(given) == found


def test_addresses_know_where_they_lead() -> None:
    address = ServerTarget(url=server_url("https://a.example/api/v1")).address
    assert (address.host, address.port, address.tls, address.prefix) == ("a.example", 443, True, "/api")
    assert address.authority == "a.example"
    assert ServerTarget(url="http://[::1]:8000").address.authority == "[::1]:8000"


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("localhost:8000", "did you mean 'http://localhost:8000'"),
        ("ftp://a", "must be an address"),
        ("http://", "must be an address"),
        ("http://a:99999", "a port from 1"),
        ("http://a:b", "a port from 1"),
        ("http://a:0", "a port from 1"),
        ("http://me:secret@a", "--api-key"),
        ("http://a?x=1", "no user, query"),
        ("http://a b", "plain ASCII"),
        ("http://a\r\nx: y", "plain ASCII"),
        ("", "not empty"),
    ],
)
def test_a_wrong_address_is_refused(url: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(["complete", "x", "--url", url])
    assert end.value.code == 2
    assert says in capsys.readouterr().err


# -------------------------------------------------------------------------------------------------------------- chat


def test_a_conversation_goes_on_at_a_server(
    fake: Fake, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    typed(monkeypatch, "hello\n/help\nagain\n/reset\nfresh\n")
    assert cli.main(["chat", "--url", fake.url, "--temperature", "0", "--system", "be kind", "--max-tokens", "2"]) == 0
    captured = capsys.readouterr()
    assert captured.out == " 0 1\n 0 1\n 0 1\n"
    assert "/reset" in captured.err
    said = [[message["content"] for message in body["messages"]] for body in fake.bodies()]
    assert said == [["be kind", "hello"], ["be kind", "hello", " 0 1", "again"], ["be kind", "fresh"]]
    assert {(body["temperature"], body["max_tokens"], body["model"]) for body in fake.bodies()} == {(0.0, 2, "echo")}


def test_a_message_that_fails_is_taken_back(
    fake: Fake, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    typed(monkeypatch, "one\ntwo\n")
    assert cli.main(["chat", "--url", fake.url, "--model", "fails-midway"]) == 1
    assert "out of pages" in capsys.readouterr().err
    assert [len(body["messages"]) for body in fake.bodies()] == [1, 1]


def test_ctrl_c_ends_the_answer_at_the_server_too(fake: Fake, capsys: pytest.CaptureFixture[str]) -> None:
    class Impatient(RemoteEngine):
        def stream_chat(self, messages: Any, params: Any, **template: Any) -> Iterator[Any]:
            with contextlib.closing(super().stream_chat(messages, params, **template)) as outputs:
                yield next(outputs)
                raise KeyboardInterrupt

    talk = TerminalConversation(Impatient(ServerTarget(url=fake.url), "held"), {}, speed=ServerSpeed)
    talk.interactive = True
    assert talk.handle_line("tell me")
    assert talk.messages[-1] == {"role": "assistant", "content": "one"}
    assert "[stopped]" in capsys.readouterr().out
    assert fake.gone.wait(60)


ADD = 'def add(a: int, b: int) -> int:\n    "Adds."\n    return a + b\n'


@pytest.mark.parametrize(("allow", "told"), [(["--allow-tool", "add"], "3"), ([], REFUSED)])
def test_calls_that_are_allowed_run_until_there_is_an_answer(
    fake: Fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    allow: list[str], told: str,
) -> None:  # fmt: skip
    (tmp_path / "mine.py").write_text(ADD)
    typed(monkeypatch, "1 + 2?\n")
    words = ["chat", "--url", fake.url, "--model", "calls", "--tools", str(tmp_path / "mine.py")]
    assert cli.main([*words, *allow]) == 0
    captured = capsys.readouterr()
    assert captured.out == f"It is {told}.\n"
    assert 'Hm.\ncall: add {"a": 1, "b": 2}\n' in captured.err
    first, second = fake.bodies()
    assert first["tools"][0]["function"]["name"] == "add"
    _, said, result = second["messages"]
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": 2}'}}
    assert said == {"role": "assistant", "content": None, "reasoning": "Hm.", "tool_calls": [call]}
    assert result == {"role": "tool", "tool_call_id": "c1", "content": told}


def test_calls_without_end_are_ended(
    fake: Fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.py").write_text(ADD)
    typed(monkeypatch, "forever\n")
    words = ["chat", "--url", fake.url, "--model", "calls", "--tools", str(tmp_path / "mine.py")]
    assert cli.main([*words, "--allow-tool", "add", "--max-tool-rounds", "3", "-q"]) == 0
    assert len(fake.bodies()) == 3 and "stopped after 3 rounds of calls" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--allow-tool", "f"], "--allow-tool has no effect without --tools"),
        (["--tools", "/nowhere.py"], "--tools /nowhere.py: "),
        (["--max-tool-rounds", "0"], "--max-tool-rounds must be 1 or more"),
        (["--chat-template-kwargs", "[1]"], "--chat-template-kwargs must be a JSON object"),
        (["--chat-template-kwargs", "{"], "--chat-template-kwargs must be a JSON object"),
        (["--tool-call-parser", "hermes"], "--tool-call-parser has no effect with a server"),
    ],
)
def test_wrong_tools_are_refused_at_once(
    fake: Fake, words: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["chat", "--url", fake.url, "--model", "calls", *words]) == 1
    assert says in capsys.readouterr().err and not fake.asked


@pytest.mark.parametrize(
    ("parts", "found"),
    [
        ([[{"function": {"name": "f", "arguments": {"a": 1}}, "id": "x"}, {"function": {"name": "g"}}]],
         [("f", '{"a": 1}'), ("g", "")]),
        ([[{"index": 4, "function": {"name": "f"}}], [{"index": 4, "function": {"arguments": "{}"}}]],
         [("f", "{}")]),
    ],
)  # fmt: skip
def test_calls_of_servers_that_number_otherwise(parts: Any, found: Any) -> None:
    deltas, heard = ChatDeltaParser(), MessageBuilder()
    for each in parts:
        heard.take(deltas.events({"tool_calls": each}, ended=False))
    heard.take(deltas.events({}, ended=True))
    assert [(each.name, each.arguments) for each in heard.calls] == found
    assert all(each.complete and each.id for each in heard.calls)  # a call without an id is given one


def test_engine_flags_are_refused_beside_a_server(fake: Fake, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["chat", "--url", fake.url, "--dtype", "float32", "--num-pages", "9"]) == 1
    said = capsys.readouterr().err
    assert "--dtype and --num-pages" in said and "no effect" in said
    assert fake.asked == []


def test_a_server_that_is_not_there_ends_the_chat_at_once(
    free_port: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    typed(monkeypatch, "hello\n")
    assert cli.main(["chat", "--url", f"http://127.0.0.1:{free_port}"]) == 1
    assert "cannot reach" in capsys.readouterr().err


def test_a_chat_at_a_server_imports_nothing_of_the_engine(fake: Fake) -> None:
    code = (
        "import sys\nfrom quintet.cli import main as cli\n"
        f"code = cli.main(['complete', 'x', '--url', {fake.url!r}])\n"
        "sys.exit(code or any(name in sys.modules for name in ('torch', 'transformers', 'numpy')))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60).returncode == 0


# -------------------------------------------------------------------------------------------------------------- words


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b'{"error": {"message": "a"}}', "a"),
        (b'{"error": "b"}', "b"),
        (b'{"object": "error", "message": "c"}', "c"),
        (b'{"detail": [{"loc": 1}]}', '[{"loc": 1}]'),
        (b"<html>\n bad\x1b[31m gateway", "<html> bad [31m gateway"),
        (b"", "without a word"),
        (b"[" * 100_000, "[" * 300 + " ..."),
    ],
)
def test_a_servers_words_are_found_and_made_harmless(body: bytes, said: str) -> None:
    assert errors.error_message(body) == said


@pytest.mark.parametrize(
    ("error", "kind", "says"),
    [
        (ConnectionRefusedError(111, "Connection refused"), "connection", "quintet serve --port 8000"),
        (OSError("Multiple exceptions: [Errno 111] Connect call failed"), "connection", "quintet serve --port"),
        (socket.gaierror(-2, "Name or service not known"), "connection", "Name or service not known"),
        (ssl.SSLCertVerificationError(1, "self-signed"), "tls", "self-signed"),
    ],
)
def test_no_connection_has_a_reason(error: OSError, kind: str, says: str) -> None:
    found = errors.unreachable("http://a:8000", error)
    assert found.kind == kind and says in str(found)
