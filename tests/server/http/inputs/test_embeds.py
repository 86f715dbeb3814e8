"""prompt_embeds of /v1/completions: what people's clients send is read, and nothing that only looks like it."""

import base64
import io
import json
import re
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
import torch
from safetensors.torch import load_file, save

from tests.helpers.servers.serving import Server
from tests.server.fakes import BUNDLED, FakeBackend
from tests.server.http.serving import client

WIDTH = 6
X = torch.arange(5 * WIDTH).reshape(5, WIDTH) / 7


def text(data: bytes) -> str:
    return base64.b64encode(data).decode()


def torch_file(x: Any) -> bytes:
    out = io.BytesIO()
    torch.save(x, out)
    return out.getvalue()


def backend(width: int = WIDTH) -> FakeBackend:
    made = FakeBackend()
    made.model_info = replace(made.model_info, embeds_width=width)
    return made


async def post(there: FakeBackend, **body: Any) -> tuple[int, Any]:
    async with client(there) as http:
        response = await http.post("/v1/completions", json={"max_tokens": 2, **body})
    return response.status_code, response.json()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("form", ["torch", "safetensors"])
async def test_both_forms_bring_the_numbers(form: str, dtype: torch.dtype) -> None:
    there, x = backend(), X.to(dtype)
    data = torch_file(x) if form == "torch" else save({"prompt_embeds": x})
    status, answer = await post(there, prompt_embeds=text(data), cache_salt="mine")
    assert status == 200 and answer["usage"]["prompt_tokens"] == 5
    (asked,) = there.submitted
    np.testing.assert_array_equal(np.frombuffer(asked.prompt.embeds, np.float32).reshape(5, WIDTH), x.float().numpy())
    assert asked.prompt.token_ids == [0] * 5 and asked.prompt.cache_salt == "mine"


async def test_several_come_before_text_and_an_empty_text_is_none() -> None:
    """openai's client insists on a prompt; vLLM's users give it an empty one."""
    there, both = backend(), [text(torch_file(X)), text(torch_file(X[None, :2]))]
    status, answer = await post(there, prompt_embeds=both, prompt="Hello")
    assert status == 200 and [len(each.prompt.token_ids) for each in there.submitted] == [5, 2, 2]
    assert there.submitted[2].prompt.text == "Hello"
    status, answer = await post(there, prompt_embeds=both[0], prompt="")
    assert status == 200 and len(answer["choices"]) == 1


async def test_a_prompt_is_cut_where_the_request_says_so() -> None:
    there = backend()
    status, _ = await post(there, prompt_embeds=text(torch_file(X)), truncate_prompt_tokens=2)
    assert status == 200 and there.submitted[0].prompt.embeds == X[3:].numpy().tobytes()


def bomb() -> bytes:
    """A file of torch's whose entries were compressed."""
    source, out = zipfile.ZipFile(io.BytesIO(torch_file(torch.zeros(400, WIDTH)))), io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as made:
        for entry in source.infolist():
            made.writestr(entry.filename, source.read(entry))
    return out.getvalue()


def hollow() -> bytes:
    """A shape of more numbers than there are in the file."""
    source, out = zipfile.ZipFile(io.BytesIO(torch_file(torch.zeros(400, WIDTH)))), io.BytesIO()
    with zipfile.ZipFile(out, "w") as made:
        for entry in source.infolist():
            data = source.read(entry)
            made.writestr(entry.filename, data[:64] if "/data/" in entry.filename else data)
    return out.getvalue()


class Harm:
    def __reduce__(self) -> Any:
        return print, ("run",)


REFUSED: dict[str, tuple[str, str]] = {
    "not base64": ("###", "is not base64"),
    "neither form": (text(b"hello there"), "must be base64 of safetensors"),
    "two tensors": (text(save({"a": X, "b": X + 1})), "this one has 2 tensors"),
    "one number over and over": (
        text(torch_file(torch.zeros(1, 1).expand(10**8, WIDTH))),
        "says that its tensor is larger than the file",
    ),
    "another width": (text(torch_file(X[:, :4])), r"must be \[tokens, 6\]"),
    "not finite": (text(torch_file(X / 0)), "must be finite"),
    "sparse": (text(torch_file(X.to_sparse())), "must be one dense tensor"),
    "of integers": (text(torch_file(X.int())), "must be in float32"),
    "a dict": (text(torch_file({"x": X})), "must be one dense tensor, not dict"),
    "code": (text(torch_file(Harm())), "cannot be read as a file of torch's"),
    "compressed": (text(bomb()), "is an archive that is compressed"),
    "hollow": (text(hollow()), "cannot be read|larger than the file"),
    "half a file": (text(torch_file(X)[:300]), "cannot be read as a file of torch's"),
    "too long": ("A" * 400_000, "has 400000 characters, and no more than"),
    "of no room": (text(torch_file(torch.zeros(512, WIDTH))), "maximum context length is 512"),
}


@pytest.mark.parametrize("case", REFUSED)
async def test_anything_else_is_a_400_that_says_why(case: str, capsys: pytest.CaptureFixture[str]) -> None:
    given, why = REFUSED[case]
    there = backend()
    status, answer = await post(there, prompt_embeds=given)
    assert status == 400 and re.search(why, answer["error"]["message"]), answer
    assert answer["error"]["param"] == "prompt_embeds" and not there.submitted
    assert "run" not in capsys.readouterr().out


async def test_a_server_that_was_not_told_to_takes_none() -> None:
    status, answer = await post(FakeBackend(), prompt_embeds=text(torch_file(X)))
    assert status == 400 and "--enable-prompt-embeds" in answer["error"]["message"]


async def test_what_goes_with_tokens_alone_is_refused() -> None:
    given = text(torch_file(X))
    for field in ({"echo": True}, {"prompt_logprobs": 1}):
        status, answer = await post(backend(), prompt_embeds=given, **field)
        assert status == 400 and answer["error"]["param"] in field, answer
    status, answer = await post(backend())
    assert status == 400 and answer["error"]["param"] == "prompt"


@pytest.mark.slow
def test_openais_client_has_the_same_answer_for_both() -> None:
    """The bundled model, over the wire."""
    table = load_file(Path(BUNDLED) / "model.safetensors")["model.embed_tokens.weight"]
    with Server("--device", "cpu", "--enable-prompt-embeds", "--max-model-len", "256", "--num-pages", "64") as server:
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as ai:
            ids = [5, 853, 17, 302, 44] * 5
            ask: dict[str, Any] = {"model": "bundled", "max_tokens": 12, "temperature": 0}
            wanted = ai.completions.create(prompt=ids, **ask).choices[0].text
            for _ in range(2):
                body = {"prompt_embeds": text(torch_file(table[ids]))}
                answer = ai.completions.create(prompt="", extra_body=body, **ask)
                assert answer.choices[0].text == wanted, json.dumps(answer.model_dump())
            details = answer.usage and answer.usage.prompt_tokens_details
            assert details and details.cached_tokens == 16
