"""Pictures in chats: by LLM.chat and over HTTP, the tokens of LLM.generate with the same picture."""

import io
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from PIL import Image

from quintet import LLM, SamplingParams
from quintet.cli.chat.conversation import TerminalConversation
from quintet.cli.main import main
from tests.helpers.media.wrappers import Made, make, picture
from tests.helpers.media_files import data_url
from tests.helpers.servers.serving import Server

TEMPLATE = (
    "{% for m in messages %}{% for p in m.content %}{% if p.type == 'text' %}{{ p.text }}{% else %}<image>{% endif %}"
    "{% endfor %}{% endfor %}"
)
PICTURE = picture(40, 56, 1)
TEXT = ("What is ", " this?")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Made]:
    yield make("llava", tmp_path_factory.mktemp("llava"))


def url() -> str:
    file = io.BytesIO()
    Image.fromarray(PICTURE).save(file, "PNG")
    return data_url(file.getvalue())


def content(part: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"type": "text", "text": TEXT[0]}, part, {"type": "text", "text": TEXT[1]}]


def test_a_chats_picture_is_that_of_the_prompt(made: Made) -> None:
    llm = LLM(str(made.folder), dtype="float32", max_model_len=512, kv_cache_memory_bytes="16M", use_tqdm=False)
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    prompt = {"prompt": f"{TEXT[0]}<image>{TEXT[1]}", "multi_modal_data": {"image": PICTURE}}
    [want] = llm.generate(prompt, params, use_tqdm=False)
    parts = [
        {"type": "image_pil", "image_pil": Image.fromarray(PICTURE)},
        {"type": "image_url", "image_url": {"url": url()}},
    ]
    for part in parts:
        messages = [{"role": "user", "content": content(part)}]
        [found] = llm.chat(messages, params, use_tqdm=False, chat_template=TEMPLATE)
        assert found.outputs[0].token_ids == want.outputs[0].token_ids
        assert found.prompt_token_ids == want.prompt_token_ids
    with pytest.raises(ValueError, match=r"messages\[0\].content\[1\] cannot be used: .*--allowed-media-domains"):
        wrong = content({"type": "image_url", "image_url": {"url": "https://example.com/a.png"}})
        llm.chat([{"role": "user", "content": wrong}], params, use_tqdm=False, chat_template=TEMPLATE)
    llm.close()


def test_a_terminals_picture_is_that_of_the_prompt(made: Made, tmp_path: Path, capfd: Any) -> None:
    file, text = tmp_path / "picture.png", "What is this?"
    Image.fromarray(PICTURE).save(file)
    folder = tmp_path / "model"
    shutil.copytree(made.folder, folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    shared = ["--model", str(folder), "--dtype", "float32", "--max-model-len", "512",
              "--kv-cache-memory-bytes", "16M", "--max-tokens", "6", "--temperature", "0", "--ignore-eos"]  # fmt: skip
    found = []
    for name in ("picture.png", "other.png"):
        Image.fromarray(PICTURE if name == "picture.png" else picture(40, 56, 9)).save(tmp_path / name)
        given = ["--image", str(tmp_path / name), "--quiet"]
        assert main(["generate", *shared, *given, "--json", text]) == 0
        found.append(json.loads(capfd.readouterr().out)["outputs"][0])
    llm = LLM(str(folder), dtype="float32", max_model_len=512, kv_cache_memory_bytes="16M", use_tqdm=False)
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    [want] = llm.generate({"prompt": f"<image>{text}", "multi_modal_data": {"image": PICTURE}}, params, use_tqdm=False)
    assert found[0]["token_ids"] == list(want.outputs[0].token_ids) != found[1]["token_ids"]
    speaker = TerminalConversation(llm, params, quiet=True)
    speaker.handle_line(f"/image {file}")
    speaker.handle_line(text)
    assert capfd.readouterr().out.strip() == found[0]["text"].strip()
    assert speaker.messages[0]["content"][0]["type"] == "image_url" and not speaker.options.pictures
    speaker.handle_line("/image nothing.png")
    assert "cannot read 'nothing.png'" in capfd.readouterr().err
    llm.close()


@pytest.mark.slow
def test_a_server_sees_what_the_engine_sees(made: Made, tmp_path: Any) -> None:
    llm = LLM(str(made.folder), dtype="float32", max_model_len=512, kv_cache_memory_bytes="16M", use_tqdm=False)
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    prompt = {"prompt": f"{TEXT[0]}<image>{TEXT[1]}", "multi_modal_data": {"image": PICTURE}}
    [want] = llm.generate(prompt, params, use_tqdm=False)
    llm.close()
    template = tmp_path / "template.jinja"
    template.write_text(TEMPLATE)
    flags = ("--dtype", "float32", "--max-model-len", "512", "--kv-cache-memory-bytes", "16M", "--device", "cpu",
             "--chat-template", str(template), "--limit-mm-per-prompt", '{"image": 1}')  # fmt: skip
    with Server(str(made.folder), *flags) as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=300)
        messages: Any = [{"role": "user", "content": content({"type": "image_url", "image_url": {"url": url()}})}]
        more = {"return_token_ids": True, "ignore_eos": True}
        for _ in range(2):  # the second finds the processor's process, and the picture in its cache
            answer = client.chat.completions.create(
                model=made.folder.name, messages=messages, temperature=0, max_tokens=6, extra_body=more
            )
            assert answer.choices[0].token_ids == list(want.outputs[0].token_ids)  # type: ignore[attr-defined]
        with pytest.raises(openai.BadRequestError, match="1 are the most"):
            twice = [{"role": "user", "content": messages[0]["content"] * 2}]
            client.chat.completions.create(model=made.folder.name, messages=twice, max_tokens=1)
