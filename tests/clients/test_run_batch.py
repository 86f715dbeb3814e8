"""`quintet run-batch`: a line out for every line in, in their order, whatever is wrong with some of them."""

import io
import json
import os
import signal
import subprocess
import sys
import time
from argparse import Namespace
from email.utils import formatdate
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from quintet.cli import main as cli
from quintet.cli.commands import _local_server as _local
from quintet.cli.commands import run_batch
from quintet.clients import batch_files as batch
from quintet.clients import http_client as http_stream
from quintet.clients.batch_files import BadLine, BatchOptions, BatchRequest, BatchSender
from quintet.clients.http_client import HttpClient, HttpResponse, ServerAddress
from quintet.clients.http_connection import ConnectionLost
from quintet.config.schema import flags
from tests.clients.conftest import KEY, Fake
from tests.helpers.servers.serving import until, words_of
from tests.server.http.serving import Live, serving


def line(name: Any = "a", url: str = "/v1/completions", **body: Any) -> dict[str, Any]:
    return {"custom_id": name, "method": "POST", "url": url, "body": {"model": "echo", "prompt": "x", **body}}


class Files:
    """The input and the output of one batch."""

    def __init__(self, folder: Path) -> None:
        self.input, self.output = folder / "in.jsonl", folder / "out.jsonl"
        self.part = folder / "out.jsonl.part"

    def run(self, fake: Fake | Live, *lines: Any, words: tuple[str, ...] = ()) -> tuple[int, list[dict[str, Any]]]:
        texts = [each if isinstance(each, bytes) else json.dumps(each).encode() for each in lines]
        self.input.write_bytes(b"\n".join(texts) + b"\n")
        code = cli.main(["run-batch", "-i", str(self.input), "-o", str(self.output), "--url", fake.url, *words])
        assert not self.part.exists()
        return code, [json.loads(each) for each in self.output.read_text().splitlines()]


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path)


def test_every_line_is_answered_in_its_place(fake: Fake, files: Files, capsys: pytest.CaptureFixture[str]) -> None:
    urls = ["/v1/completions", "/v1/chat/completions", "/v1/responses"]
    lines = [line(f"r{at}", urls[at % 3], max_tokens=1 + at % 5, text="ö") for at in range(30)]
    code, found = files.run(fake, *lines, words=("--concurrency", "4"))
    assert code == 0
    assert [each["custom_id"] for each in found] == [each["custom_id"] for each in lines]
    assert [each["response"]["body"]["echo"] for each in found] == [each["body"] for each in lines]
    assert {asked.path for asked in fake.asked[1:]} == set(urls)
    assert all(each["response"]["status_code"] == 200 and each["error"] is None for each in found)
    assert found[0]["response"]["request_id"] == "req-1"
    assert len({each["id"] for each in found}) == 30
    assert fake.most_under_way <= 4
    said = capsys.readouterr().err
    assert "30 lines: 30 answered in " in said and "90 tokens of output" in said


def test_fields_that_the_server_ignored_are_told(files: Files, capsys: pytest.CaptureFixture[str]) -> None:
    with serving() as live:
        lines = [
            line(f"r{at}", model="fake/model", max_tokens=2, **({"max_token": 1} if at else {})) for at in range(3)
        ]
        code, found = files.run(live, *lines, words=("--quiet",))
    said = "max_token (did you mean max_tokens?)"
    assert code == 0 and [each["response"].get("ignored_fields") for each in found] == [None, said, said]
    assert f"in 2 lines the server ignored fields that it does not know: {said}" in capsys.readouterr().err


BAD = [
    (b"{nonsense", "is not JSON"),
    (b"\xff\xfe", "is not JSON"),
    (b'{"custom_id": NaN}', "NaN is no number"),
    (b"[" * 50_000, "is not JSON"),
    (b"[1]", "must be a JSON object, not list"),
    ({"method": "POST"}, "custom_id must be text"),
    (line(7), "custom_id must be text"),
    (line(""), "custom_id must be text"),
    ({**line(), "method": "GET"}, "method must be POST, not 'GET'"),
    (line(url="/v1/completion"), "did you mean '/v1/completions'"),
    (line(url="/v1/images"), "a batch takes /v1/chat/completions, /v1/completions, /v1/responses"),
    ({**line(), "body": "x"}, "body must be a JSON object"),
    ({**line(), "bdy": 1}, "did you mean 'body'"),
    (line(stream=True), "body.stream must not be set"),
    (line("first"), "the same as that of an earlier line"),
    (line(prompt="x" * 5000), "longer than 4000 bytes"),
]


@pytest.mark.parametrize(("wrong", "says"), BAD, ids=[says for _, says in BAD])
def test_a_bad_line_fails_alone(fake: Fake, files: Files, wrong: Any, says: str) -> None:
    if isinstance(wrong, bytes) and len(wrong) > 4000:
        wrong = wrong[:3900]
    code, found = files.run(fake, line("first"), wrong, b"", line("last"), words=("--max-line-bytes", "4000"))
    assert code == 1
    assert len(found) == 3
    assert [found[0]["custom_id"], found[2]["custom_id"]] == ["first", "last"]
    assert found[0]["response"]["status_code"] == found[2]["response"]["status_code"] == 200
    assert found[1]["response"] is None
    assert (found[1]["error"]["code"], says in found[1]["error"]["message"]) == ("bad_line", True)
    assert "line 2" in found[1]["error"]["message"]
    assert len(fake.bodies()) == 2


def test_a_mark_at_the_start_of_the_file_is_none_of_the_text(fake: Fake, files: Files) -> None:
    code, found = files.run(fake, b"\xef\xbb\xbf" + json.dumps(line("a")).encode())
    assert (code, found[0]["custom_id"]) == (0, "a")


def test_what_fails_at_the_server_is_told_and_does_not_stop_the_rest(
    fake: Fake, files: Files, capsys: pytest.CaptureFixture[str]
) -> None:
    models = ["fault", "hangs-up", "html", "nobody", "echo"]
    code, found = files.run(fake, *(line(model, model=model) for model in models))
    assert code == 1
    fault, hangs_up, html, nobody, echo = found
    assert (fault["response"]["status_code"], fault["error"]) == (500, None)
    assert fault["response"]["body"]["error"]["message"] == "it broke"
    assert (hangs_up["response"], hangs_up["error"]["code"]) == (None, "broken_off")
    assert (html["response"], html["error"]["code"]) == (None, "not_json")
    assert nobody["response"]["status_code"] == 404
    assert echo["response"]["status_code"] == 200
    said = capsys.readouterr().err
    assert "5 lines: 1 answered, 4 failed" in said and "1 HTTP_500" in said


def test_a_busy_server_is_asked_again(fake: Fake, files: Files) -> None:
    fake.busy = 3
    code, found = files.run(fake, line("a", model="busy"), words=("--max-retries", "3"))
    assert (code, found[0]["response"]["status_code"], len(fake.bodies())) == (0, 200, 4)


def test_asking_again_has_an_end(fake: Fake, files: Files) -> None:
    fake.busy = 100
    code, found = files.run(fake, line("a", model="busy"), words=("--max-retries", "2"))
    assert (code, found[0]["response"]["status_code"], len(fake.bodies())) == (1, 429, 3)
    assert found[0]["response"]["body"]["error"]["message"] == "come again"


def test_a_server_may_not_ask_for_an_age_of_patience(fake: Fake) -> None:
    fake.busy, fake.retry_after = 1, "999999"

    async def work() -> list[Any]:
        sender = BatchSender(HttpClient(ServerAddress("127.0.0.1", fake.port)), fake.url, BatchOptions(max_wait=0.01))
        return [
            each async for each in sender.answers(iter([BatchRequest("a", "/v1/completions", b'{"model": "busy"}')]))
        ]

    assert http_stream.run(work())[0]["response"]["status_code"] == 200


@pytest.mark.parametrize(
    ("said", "seconds"),
    [("5", 5.0), ("", 2.0), ("soon", 2.0), ("-1", 2.0), ("9" * 40, 999999999.0), (formatdate(0, usegmt=True), 0.0)],
)
def test_retry_after_is_a_number_or_a_date(said: str, seconds: float) -> None:
    assert batch.retry_after(HttpResponse(429, {"retry-after": said}), 2.0) == seconds


def test_retry_after_a_date_to_come() -> None:
    begun = time.time()
    said = formatdate(begun + 30, usegmt=True)  # in whole seconds
    found = batch.retry_after(HttpResponse(429, {"retry-after": said}), 2.0)
    assert 28 < found + (time.time() - begun) and found <= 31


# ------------------------------------------------------------------------------------------------------------ the file


def test_a_server_that_is_not_there_stops_the_command_before_it_begins(
    files: Files, capsys: pytest.CaptureFixture[str]
) -> None:
    files.input.write_text(json.dumps(line()))
    files.output.write_text("of yesterday")
    assert cli.main(["run-batch", "-i", str(files.input), "-o", str(files.output), "--url", "http://127.0.0.1:1"]) == 1
    assert "quintet serve --port 1" in capsys.readouterr().err
    assert files.output.read_text() == "of yesterday"


def test_the_key_is_shown_to_the_server(fake: Fake, files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    fake.key = KEY
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    assert files.run(fake, line())[0] == 0


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["-o", "IN"], "is the input too"),
        (["-o", "FOLDER"], "is a folder"),
        (["-o", "OUT", "--dtype", "float32"], "--dtype: an engine flag has no effect"),
        (["-o", "OUT", "-i", "/nowhere/in"], "/nowhere/in"),
    ],
)
def test_wrong_words(fake: Fake, files: Files, words: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    files.input.write_text("")
    names = {"IN": str(files.input), "FOLDER": str(files.input.parent), "OUT": str(files.output)}
    words = [names.get(word, word) for word in words]
    assert cli.main(["run-batch", "-i", str(files.input), "--url", fake.url, *words]) == 1
    assert says in capsys.readouterr().err


def test_an_empty_file_has_an_empty_answer(fake: Fake, files: Files) -> None:
    assert files.run(fake) == (0, [])


def test_lines_are_written_as_they_come_and_reading_stays_near(fake: Fake, tmp_path: Path) -> None:
    """An endless file: what is read ahead is bounded, and what is done is in the file."""
    read = 0

    def endless() -> Any:
        nonlocal read
        while True:
            read += 1
            yield BatchRequest(str(read), "/v1/completions", b'{"model": "echo"}')

    async def work() -> list[str]:
        found = []
        lines = BatchSender(
            HttpClient(ServerAddress("127.0.0.1", fake.port)), fake.url, BatchOptions(concurrency=2)
        ).answers(endless())
        async for each in lines:
            found.append(each["custom_id"])
            if len(found) == 20:
                break
        await lines.aclose()
        return found

    assert http_stream.run(work()) == [str(at) for at in range(1, 21)]
    assert read <= 20 + 2 * 4 + 2


def test_a_file_that_cannot_be_read_on_is_an_error(fake: Fake) -> None:
    def failing() -> Any:
        yield BatchRequest("a", "/v1/completions", b'{"model": "echo"}')
        raise OSError("the disk is gone")

    async def work() -> Any:
        return await BatchSender(HttpClient(ServerAddress("127.0.0.1", fake.port)), fake.url, BatchOptions()).write(
            failing(), io.BytesIO()
        )

    with pytest.raises(OSError, match="the disk is gone"):
        http_stream.run(work())


def test_a_line_too_long_is_read_away_in_pieces() -> None:
    file = io.BytesIO(b"x" * 5_000_000 + b"\n" + json.dumps(line("b")).encode())
    first, second = batch.read(file, 1000)
    assert isinstance(first, BadLine) and "line 1 is longer" in str(first)
    assert isinstance(second, BatchRequest) and second.custom_id == "b"
    (last,) = batch.read(io.BytesIO(b"x" * 2000), 1000)
    assert isinstance(last, BadLine)


# ------------------------------------------------------------------------------------------------- a server of its own


SERVE = """
import http.server, json, os, signal, socketserver, sys
words = sys.argv[1:]
path, key = (words[words.index(name) + 1] for name in ("--uds", "--api-key"))
print("words", json.dumps(words), flush=True)
if "--model=missing" in words:
    sys.exit("no such model")
if "--model=stubborn" in words:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)

class Answers(http.server.BaseHTTPRequestHandler):
    looks = 0
    def do_GET(self):
        Answers.looks += 1
        self.send_response(200 if Answers.looks > 2 else 503)
        self.send_header("content-length", "0")
        self.end_headers()
    def do_POST(self):
        body = self.rfile.read(int(self.headers["content-length"]))
        if "--model=frail" in words:
            print("out of memory", flush=True)
            os._exit(3)
        right = self.headers["authorization"] == f"Bearer {key}"
        said = json.dumps({"words": words, "pid": os.getpid(), "body": json.loads(body)}).encode()
        self.send_response(200 if right else 401)
        self.send_header("content-length", str(len(said)))
        self.end_headers()
        self.wfile.write(said)
    def address_string(self):
        return "x"

class Server(socketserver.ThreadingUnixStreamServer):
    daemon_threads = True

Server(path, Answers).serve_forever()
"""


@pytest.fixture
def serve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, ...]:
    """A program that takes the flags of `quintet serve`."""
    program = tmp_path / "serve.py"
    program.write_text(SERVE)
    command = (sys.executable, str(program))
    monkeypatch.setattr(_local, "SERVE", command)
    return command


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_without_a_url_a_server_of_our_own_answers_and_is_gone_afterwards(
    serve: tuple[str, ...], files: Files, capsys: pytest.CaptureFixture[str]
) -> None:
    files.input.write_text(json.dumps(line()))
    words = ["--model", "here", "--dtype", "float32", "--no-enable-prefix-caching", "--num-pages", "1k"]
    words += ["--hf-overrides", '{"a": 1}']
    assert cli.main(["run-batch", "-i", str(files.input), "-o", str(files.output), *words]) == 0
    (found,) = (json.loads(each) for each in files.output.read_text().splitlines())
    body = found["response"]["body"]
    assert (found["response"]["status_code"], body["body"]["prompt"]) == (200, "x")
    engine_words = [word for word in body["words"] if not word.startswith(("--uds", "--api-key"))][-5:]
    assert sorted(engine_words) == sorted(
        ["--model=here", "--dtype=float32", "--no-enable-prefix-caching", "--num-pages=1000", '--hf-overrides={"a": 1}']
    )
    assert not is_running(body["pid"])
    assert not Path(body["words"][1]).parent.exists()
    assert "starting an engine" in capsys.readouterr().err


def engine_flags(*words: str) -> Namespace:
    parser = flags.Parser(prog="test")
    run_batch.add_arguments(parser)
    return parser.parse(["-i", "x", "-o", "y", *words])


def test_a_server_that_does_not_start_is_quoted(serve: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match=r"(?s)ended with code 1 before it was ready.*no such model"):
        with _local.local_server(engine_flags("--model", "missing")):
            raise AssertionError("it was ready")


def test_a_server_that_dies_under_way_is_quoted(serve: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    with _local.local_server(engine_flags("--model", "frail")) as server:
        (pid,) = (each.pid for each in psutil.Process().children() if serve[1] in words_of(each))

        async def work() -> None:
            with pytest.raises(ConnectionLost):
                await HttpClient(server.address, server.headers()).request("POST", "/x", b"{}")

        http_stream.run(work())
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)  # it has closed its socket; soon it has ended, too
    said = capsys.readouterr().err
    assert "the server ended with code 3" in said and "out of memory" in said


def test_a_server_that_will_not_end_is_killed(serve: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_local, "_STOP_SECONDS", 0.1)
    with _local.local_server(engine_flags("--model", "stubborn")) as server:

        async def work() -> Any:
            return json.loads((await HttpClient(server.address, server.headers()).request("POST", "/x", b"{}")).body)

        pid = http_stream.run(work())["pid"]
        assert is_running(pid)
    assert not is_running(pid)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="asks Linux to tell the child")
def test_a_server_does_not_outlive_a_command_that_is_killed(
    serve: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory
) -> None:
    code = (
        "import os, signal, sys, http.client\nfrom argparse import Namespace\n"
        "from quintet.cli.commands import _local_server as _local\n"
        "from quintet.clients.remote_engine import connect\n"
        f"_local.SERVE = {serve!r}\n"
        "with _local.local_server(Namespace()) as server:\n"
        "    connection = connect(server)\n"
        "    connection.request('POST', '/x', b'{}', server.headers())\n"
        "    print(connection.getresponse().read().decode(), flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    environment = {**os.environ, "TMPDIR": str(tmp_path_factory.mktemp("x"))}  # for what a killed command leaves
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=environment)
    assert done.returncode == -signal.SIGKILL
    assert until(partial(has_ended, json.loads(done.stdout)["pid"]))


def has_ended(pid: int) -> bool:
    """Also where whoever inherited it has not looked yet."""
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True
