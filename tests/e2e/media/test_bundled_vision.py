"""The bundled vision model: right about plain drawings, with transformers' tokens, and without a network."""

import base64
import io
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from PIL import Image, ImageDraw, ImageFont

from quintet import LLM, SamplingParams
from quintet.common.distribution import install_hint
from quintet.config import BUNDLED_VISION, EngineConfig
from quintet.hub.resolve import resolve_model
from tests.helpers.servers.serving import Server

GREEDY = SamplingParams(temperature=0, max_tokens=40, logprobs=1)
SETTINGS: dict[str, Any] = {"device": "cpu", "kv_cache_memory_bytes": "64M", "use_tqdm": False}


def circle_and_square() -> Image.Image:
    image = Image.new("RGB", (320, 240), "white")
    pen = ImageDraw.Draw(image)
    pen.ellipse((30, 60, 130, 160), fill="red")
    pen.rectangle((190, 70, 290, 170), fill="blue")
    return image


def triangle_above_cross() -> Image.Image:
    image = Image.new("RGB", (256, 256), "black")
    pen = ImageDraw.Draw(image)
    pen.polygon([(128, 15), (180, 105), (76, 105)], fill="yellow")
    pen.rectangle((113, 150, 143, 240), fill="white")
    pen.rectangle((83, 180, 173, 210), fill="white")
    return image


def seven() -> Image.Image:
    image = Image.new("RGB", (200, 200), "white")
    ImageDraw.Draw(image).text((100, 100), "7", "black", ImageFont.load_default(120), anchor="mm")
    return image


CASES: dict[str, tuple[Image.Image, dict[str, str]]] = {
    "shapes": (
        circle_and_square(),
        {
            "What is in the picture?": "A red circle and a blue square.",
            "What colour is the circle?": "Red.",
            "what color is the square": "Blue.",
            "Which shape is red?": "The circle.",
            "Is there a triangle?": "No.",
            "How many shapes are there?": "Two.",
        },
    ),
    "above": (
        triangle_above_cross(),
        {
            "What do you see?": "A yellow triangle and a white cross.",
            "Is the triangle below the cross?": "No.",
            "What colour is the background?": "Black.",
        },
    ),
    "digit": (seven(), {"Which digit is it?": "7.", "Describe the image.": "A black 7.", "Who are you?": "I can tell"}),
}


def chat(question: str) -> list[dict[str, Any]]:
    parts = [{"type": "text", "text": question}]
    return [{"role": "user", "content": parts}]


def data_url(image: Image.Image) -> str:
    file = io.BytesIO()
    image.save(file, "PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


def with_picture(question: str, image: Image.Image) -> list[dict[str, Any]]:
    [message] = chat(question)
    return [{**message, "content": [*message["content"], {"type": "image_url", "image_url": {"url": data_url(image)}}]}]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(BUNDLED_VISION, dtype="float32", **SETTINGS) as opened:
        yield opened


@pytest.fixture(scope="module")
def folder() -> Path:
    return resolve_model(EngineConfig(model=BUNDLED_VISION))


@pytest.mark.parametrize("name", CASES)
def test_answers_about_plain_drawings(llm: LLM, name: str) -> None:
    image, wanted = CASES[name]
    outputs = llm.chat([with_picture(question, image) for question in wanted], GREEDY, use_tqdm=False)
    found = {question: output.outputs[0].text for question, output in zip(wanted, outputs, strict=True)}
    assert all(found[question].startswith(answer) for question, answer in wanted.items()), found


def test_a_later_question_is_about_the_same_picture(llm: LLM) -> None:
    image, _ = CASES["shapes"]
    first = with_picture("What is in the picture?", image)
    said = {"role": "assistant", "content": "A red circle and a blue square."}
    [output] = llm.chat([*first, said, *chat("What colour is the square?")], GREEDY, use_tqdm=False)
    assert output.outputs[0].text == "Blue."
    [output] = llm.chat(chat("What is in the picture?"), GREEDY, use_tqdm=False)
    assert output.outputs[0].text.startswith("I see no picture.")


@pytest.mark.parametrize("name", CASES)
def test_tokens_and_their_logprobs_are_those_of_transformers(llm: LLM, folder: Path, name: str) -> None:
    from transformers import AutoImageProcessor, AutoTokenizer, LlavaForConditionalGeneration, LlavaProcessor

    tokenizer = AutoTokenizer.from_pretrained(folder)
    images = AutoImageProcessor.from_pretrained(folder, backend="pil")
    processor = LlavaProcessor(images, tokenizer, patch_size=12, vision_feature_select_strategy="full")
    model = LlavaForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
    image, questions = CASES[name]
    for question in questions:
        content = [{"type": "image"}, {"type": "text", "text": question}]
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
        )
        inputs = processor(text=text.removeprefix("<s>"), images=image, return_tensors="pt")
        out = model.generate(
            **inputs, max_new_tokens=40, do_sample=False, output_logits=True, return_dict_in_generate=True
        )
        wanted = out.sequences[0, inputs["input_ids"].shape[1] :].tolist()
        [output] = llm.chat(with_picture(question, image), GREEDY, use_tqdm=False)
        assert output.prompt_token_ids == inputs["input_ids"][0].tolist()
        assert list(output.outputs[0].token_ids) == wanted
        theirs = [float(step[0].log_softmax(-1)[token]) for step, token in zip(out.logits, wanted, strict=True)]
        ours = [entry[token].logprob for entry, token in zip(output.outputs[0].logprobs or [], wanted, strict=True)]
        assert ours == pytest.approx(theirs, abs=1e-4)


def test_the_folder_is_small(folder: Path) -> None:
    assert sum(path.stat().st_size for path in folder.rglob("*")) < 4e6


@pytest.mark.slow
def test_generate_without_a_network(tmp_path: Path) -> None:
    """In a process of its own whose home is empty, and where the hub's cache would be."""
    circle_and_square().save(tmp_path / "picture.png")
    command = [sys.executable, "-m", "quintet.cli.main", "generate", BUNDLED_VISION, "What is in the picture?",
               "--json", "--quiet", "--device", "cpu", "--image", str(tmp_path / "picture.png")]  # fmt: skip
    env = {"HOME": str(tmp_path), "HF_HUB_OFFLINE": "1", "PATH": "/usr/bin:/bin"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["outputs"][0]["text"] == "A red circle and a blue square."


def test_without_pillow_the_error_has_the_command_that_installs_it(tmp_path: Path) -> None:
    circle_and_square().save(tmp_path / "picture.png")
    code = (
        "import importlib.util, sys\n"
        "find = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda name, *more: None if name == 'PIL' else find(name, *more)\n"
        "from quintet.cli.main import main\n"
        "sys.exit(main(sys.argv[1:]))\n"
    )
    words = ["generate", BUNDLED_VISION, "What is it?", "--device", "cpu", "--image", str(tmp_path / "picture.png")]
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True)
    assert done.returncode and "Traceback" not in done.stderr
    assert f"images need the package pillow, which is not installed: {install_hint('image')}" in done.stderr


@pytest.mark.slow
def test_it_is_served_by_its_name() -> None:
    image, wanted = CASES["shapes"]
    with Server(BUNDLED_VISION, "--device", "cpu") as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=300)
        for question in list(wanted)[:3]:
            messages: Any = with_picture(question, image)
            answer = client.chat.completions.create(model=BUNDLED_VISION, messages=messages, temperature=0)
            assert answer.choices[0].message.content == wanted[question]
        [entry] = client.models.list().data
        assert entry.id == BUNDLED_VISION
