"""GET /tokenizer_info: what the tokenizer is, as vLLM tells it, and nothing of where its files lie."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.server.fakes import BUNDLED, FakeBackend
from tests.server.http.serving import client

ON: dict[str, Any] = {"enable_tokenizer_info_endpoint": True}


def backend(folder: Path, **entries: Any) -> FakeBackend:
    """Of a folder with the bundled tokenizer, and such entries in its configuration."""
    for name in ("tokenizer.json", "chat_template.jinja"):
        shutil.copy(BUNDLED / name, folder)
    known = json.loads((BUNDLED / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**known, **entries}))
    made = FakeBackend()
    made.model_info = replace(made.model_info, tokenizer=str(folder))
    return made


async def test_without_the_flag_it_is_not_there_and_says_how() -> None:
    async with client() as http:
        response = await http.get("/tokenizer_info")
        assert response.status_code == 404 and "--enable-tokenizer-info-endpoint" in response.text
        assert "/tokenizer_info" not in (await http.get("/openapi.json")).json()["paths"]


async def test_it_tells_what_the_tokenizers_files_say(tmp_path: Path) -> None:
    token = {"__type": "AddedToken", "content": "<unk>", "special": True}
    fake = backend(tmp_path, unk_token=token, added_tokens_decoder={"0": {"content": "<unk>", "lstrip": False}})
    async with client(fake, **ON) as http:
        told = (await http.get("/tokenizer_info")).json()
    assert fake.tokenizer is not None
    assert told["chat_template"] == fake.tokenizer.chat_template
    assert (told["tokenizer_class"], told["bos_token"], told["unk_token"]) == (
        "PreTrainedTokenizerFast",
        "<s>",
        "<unk>",
    )
    assert told["model_max_length"] == 1024 and told["added_tokens_decoder"] == {"0": "<unk>"}


async def test_no_path_gets_out(tmp_path: Path) -> None:
    fake = backend(
        tmp_path, name_or_path="/home/somebody/model", tokenizer_file="/home/somebody/t.json", vocab_file="v.txt",
        merges_file=None, special_tokens_map_file="/root/.cache/x", extra={"deep": "/home/somebody/x", "fine": "a/b"},
        many=["/home/somebody", "~/x"], windows="C:\\Users\\somebody",
    )  # fmt: skip
    async with client(fake, **ON) as http:
        response = await http.get("/tokenizer_info")
    assert response.status_code == 200
    for secret in ("somebody", "_file", "name_or_path", "/root", "~/x", str(tmp_path)):
        assert secret not in response.text, secret
    assert response.json()["extra"] == {"fine": "a/b"}


async def test_the_servers_chat_template_is_the_one_that_counts(tmp_path: Path) -> None:
    async with client(backend(tmp_path), chat_template="{{ messages }}", **ON) as http:
        assert (await http.get("/tokenizer_info")).json()["chat_template"] == "{{ messages }}"


async def test_a_folder_without_the_file_tells_what_is_known(tmp_path: Path) -> None:
    fake = backend(tmp_path)
    (tmp_path / "tokenizer_config.json").unlink()
    async with client(fake, **ON) as http:
        told = (await http.get("/tokenizer_info")).json()
    assert told["bos_token"] == "<s>" and "messages" in told["chat_template"]
    assert told["tokenizer_class"] == "PreTrainedTokenizerFast"


async def test_a_damaged_file_is_told_without_its_place(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    fake = backend(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{")
    async with client(fake, **ON) as http:
        response = await http.get("/tokenizer_info")
    assert response.status_code == 500 and str(tmp_path) not in response.text
    assert str(tmp_path) in caplog.text


async def test_an_engine_without_a_tokenizer_says_so() -> None:
    async with client(FakeBackend(tokenizer=None), **ON) as http:
        response = await http.get("/tokenizer_info")
    assert (response.status_code, response.json()["error"]["code"]) == (400, "no_tokenizer")


async def test_it_asks_for_the_key() -> None:
    async with client(api_key=("secret",), **ON) as http:
        assert (await http.get("/tokenizer_info")).status_code == 401
