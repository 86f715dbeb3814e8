"""`quintet serve` as it is called: flags, a config file, keys, TLS, limits on what a connection may send."""

import json
import os
import resource
import socket
import ssl
import subprocess
import sys
from pathlib import Path

import httpx
import psutil
import pytest
import trustme

from quintet.server.config import ServerConfig
from quintet.server.config_file import read_config_file
from tests.helpers.servers.serving import NULL, PATIENCE, Server, words_of


def refused(*flags: str) -> str:
    """What the command says when it will not serve."""
    command = [sys.executable, "-m", "quintet.cli.main", "serve", *NULL, "--port", "0", *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode in (1, 2), done.stderr
    assert "Traceback" not in done.stderr
    return done.stderr


def test_a_config_file_gives_flags_and_flags_come_before_it(tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text(
        "device: 'null'\nload-format: dummy\nmax_model_len: 256\n"
        "served-model-name: [first, second]\napi-key: [secret]\nenable-sleep-mode: true\n"
    )
    with Server("--config", str(file), "--max-model-len", "128") as server:
        headers = {"Authorization": "Bearer secret"}
        models = httpx.get(server.url + "/v1/models", headers=headers, timeout=PATIENCE).json()["data"]
        assert [each["id"] for each in models] == ["first", "second"]
        assert {each["max_model_len"] for each in models} == {128}
        assert httpx.get(server.url + "/v1/models", timeout=PATIENCE).status_code == 401
        sleeping = httpx.get(server.url + "/is_sleeping", headers=headers, timeout=PATIENCE)
        assert sleeping.json() == {"is_sleeping": False}


@pytest.mark.parametrize("flag", ["--tool-call-parser", "--reasoning-parser"])
def test_a_checkpoint_that_describes_no_parser_ends_the_start(flag: str) -> None:
    assert "parser 'hf' reads response_template of tokenizer_config.json, which this" in refused(flag, "hf")


def test_a_limit_on_open_files_that_is_too_low_is_said() -> None:
    """ZeroMQ would abort the process."""
    words = " ".join([sys.executable, "-m", "quintet.cli.main", "serve", *NULL, "--port", "0"])
    done = subprocess.run(["sh", "-c", f"ulimit -n 24; exec {words}"], capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith("quintet serve: error: a process may have 24 files open here") and "ulimit -n" in line


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("prot: 80", "did you mean 'port'"),
        ("- port", "must be a mapping"),
        ("port: [", "cannot be read"),
        ("port: 80\n--port: 81", "given twice"),
        ("swap-space: 4", "nothing is swapped"),
        ("speculative-config.code-revision: main", "a draft model has the model's setting of that name"),
        ("speculative-config: {method: ngram}\nspeculative_config.method: ngram", "given twice"),
        ("speculatve-config.method: ngram", "did you mean 'speculative_config'"),
        ("!!python/object/apply:os.system ['true']", "cannot be read"),
    ],
)
def test_a_wrong_config_file_is_refused_by_name(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text(text)
    with pytest.raises(ValueError, match=said):
        read_config_file(str(file))


@pytest.mark.slow
def test_a_reasoning_parser_may_be_named_as_vllm_names_it(tmp_path: Path) -> None:
    """Within structured_outputs_config, with the file that registers it."""
    plugin = tmp_path / "mine.py"
    plugin.write_text("raise ValueError('it was run')")
    config = json.dumps({"reasoning_parser": "mine", "reasoning_parser_plugin": str(plugin)})
    assert "it was run" in refused("--structured-outputs-config", config)


def test_settings_are_refused_before_anything_is_loaded() -> None:
    assert "did you mean '--api-key'" in refused("--api-kye", "x")
    assert "belong together" in refused("--ssl-certfile", "cert.pem")
    assert "port" in refused("--port", "70000")
    assert "two models: 'bundled' and --model 'bundled-embed'" in refused("bundled", "--model", "bundled-embed")
    assert "no address of this machine" in refused("--host", "fe80::1%no-such-device")  # nobody is asked for a name
    assert "cert.pem" in refused("--ssl-certfile", "cert.pem", "--ssl-keyfile", "key.pem")


def test_a_key_is_in_no_list_of_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUINTET_API_KEY", "from-the-environment")
    with Server(*NULL, "--api-workers", "2") as server:
        for key, status in (("from-the-environment", 200), ("another", 401)):
            headers = {"Authorization": f"Bearer {key}"}
            got = httpx.get(server.url + "/v1/models", headers=headers, timeout=PATIENCE)
            assert got.status_code == status
        lines = [" ".join(words_of(each)) for each in server.children()]
        assert lines and not any("from-the-environment" in line for line in lines)
        assert "from-the-environment" not in server.output


def test_keys_are_tenants_of_one_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUINTET_ADMIN_API_KEY", "root")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (300, hard))  # the server raises its own
    try:
        server = Server(*NULL, "--api-key", "alice", "--api-key", "bob", "--max-connections", "400")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    with server:

        def post(path: str, key: str, body: object = None) -> httpx.Response:
            return httpx.post(server.url + path, json=body, headers={"x-api-key": key}, timeout=PATIENCE)

        def cached(key: str) -> int:
            usage = post("/v1/completions", key, {"prompt": "a b c " * 40, "max_tokens": 1}).json()["usage"]
            return int(usage["prompt_tokens_details"]["cached_tokens"])

        assert [cached("alice"), cached("bob")] == [0, 0]
        assert cached("alice") == cached("bob") > 0
        assert [post("/reset_prefix_cache", key).status_code for key in ("alice", "wrong", "root")] == [403, 401, 200]
        assert cached("alice") == 0
        assert 0 < hard < 600 or psutil.Process(server.process.pid).rlimit(psutil.RLIMIT_NOFILE)[0] > 400


def test_settings_do_not_show_keys() -> None:
    assert "secret" not in repr(ServerConfig(api_key=("secret",)))


def test_tls(tmp_path: Path) -> None:
    authority, files = trustme.CA(), {name: tmp_path / f"{name}.pem" for name in ("cert", "key")}
    issued = authority.issue_cert("localhost", "127.0.0.1")
    issued.cert_chain_pems[0].write_to_path(str(files["cert"]))
    issued.private_key_pem.write_to_path(str(files["key"]))
    trusted = ssl.create_default_context()
    authority.configure_trust(trusted)
    with Server(*NULL, "--ssl-certfile", str(files["cert"]), "--ssl-keyfile", str(files["key"])) as server:
        assert server.url.startswith("https://127.0.0.1:")
        body = {"prompt": "a", "max_tokens": 3, "temperature": 0}
        got = httpx.post(server.url + "/v1/completions", json=body, verify=trusted, timeout=PATIENCE)
        assert got.status_code == 200
        with pytest.raises(httpx.HTTPError):
            httpx.get(server.url.replace("https", "http") + "/health", timeout=PATIENCE)


def test_another_address_without_a_key_is_warned_of() -> None:
    with Server(*NULL, "--host", "0.0.0.0") as server:
        assert "other machines can use this server without a key" in server.output


def _answer(url: str, message: bytes) -> bytes:
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=PATIENCE) as connection:
        connection.sendall(message)
        return connection.recv(65536)


def test_headers_and_bodies_are_bounded() -> None:
    with Server(*NULL, "--max-header-bytes", "8192", "--max-body-bytes", "10000") as server:
        start = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"
        assert _answer(server.url, start + b"X: y\r\n\r\n").startswith(b"HTTP/1.1 200")
        assert _answer(server.url, start + b"X: " + b"y" * 9000).startswith(b"HTTP/1.1 431")
        assert _answer(server.url, b"GET /" + b"a" * 9000).startswith(b"HTTP/1.1 431")
        assert server.complete("a" * 20_000).status_code == 413
        content = (b"a" * 1000 for _ in range(50))
        chunked = httpx.post(server.url + "/v1/completions", content=content, timeout=PATIENCE)
        assert chunked.status_code == 413
        assert server.complete().status_code == 200


def test_the_http_side_loads_no_torch() -> None:
    """An API process is small and starts at once."""
    heavy = {"torch", "transformers", "numpy"}
    code = f"import sys, quintet.server.processes.api_process; sys.exit(' '.join({heavy} & set(sys.modules)) or 0)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=dict(os.environ))
    assert done.returncode == 0, done.stderr
