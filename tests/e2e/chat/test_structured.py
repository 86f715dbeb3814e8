"""Answers with a shape, of models that compute: the bundled one, a random one, on two platforms."""

import functools
import json
import re
import subprocess
import sys
from typing import Any

import pytest

from quintet import LLM, SamplingParams
from quintet.config import BUNDLED
from tests.helpers.platforms import tpu
from tests.helpers.platforms.shaped import folder, params

pytest.importorskip("llguidance", reason="structured_outputs are an extra: pip install 'quintet-llm[structured]'")
jsonschema = pytest.importorskip("jsonschema")

PROMPTS = ["Once upon a time", "One day, Tom", 'My favourite JSON is {"a": 1}.']
SCHEMAS: list[dict[str, Any]] = [
    {
        "type": "object",
        "properties": {
            "name": {"type": "string", "minLength": 1, "maxLength": 12},
            "age": {"type": "integer", "minimum": 1, "maximum": 120},
            "tags": {"type": "array", "items": {"enum": ["red", "green", "größer"]}, "minItems": 1, "maxItems": 3},
        },
        "required": ["name", "age", "tags"],
        "additionalProperties": False,
    },
    {"type": "array", "items": {"type": "number", "multipleOf": 0.5}, "minItems": 2, "maxItems": 4},
    {"anyOf": [{"const": None}, {"type": "string", "pattern": "^[A-Z][a-z]{2,8}$"}, {"type": "boolean"}]},
    {
        "$defs": {"tree": {"type": "array", "items": {"$ref": "#/$defs/tree"}, "maxItems": 2}},
        "type": "object",
        "properties": {"tree": {"$ref": "#/$defs/tree"}, "when": {"type": "string", "format": "date"}},
        "required": ["tree", "when"],
        "additionalProperties": False,
    },
]
REGEXES = [r"[a-z]{3,9}( [a-z]{2,7}){1,4}\.", r"[0-9]{3}-[0-9]{2}", "(yes|no), because .{5,30}", r"[^\n]{0,20}é"]


@functools.cache
def llm(model: str) -> LLM:
    settings: dict[str, Any] = {"use_tqdm": False, "device": "cpu", "kv_cache_memory_bytes": "64M"}
    if model == "random":
        return LLM(str(folder()), load_format="dummy", max_model_len=512, **settings)
    return LLM(BUNDLED, max_model_len=512, **settings)


def said(model: LLM, wanted: list[SamplingParams]) -> list[tuple[str, str | None]]:
    """One request for each, over all prompts in turn -> (text, why it ended)."""
    prompts = [PROMPTS[index % len(PROMPTS)] for index in range(len(wanted))]
    found = [output.outputs[0] for output in model.generate(prompts, wanted, use_tqdm=False)]
    return [(each.text, each.finish_reason) for each in found]


@pytest.mark.parametrize("model", ["bundled", "random"])
@pytest.mark.parametrize("index", range(len(SCHEMAS)))
def test_every_finished_answer_validates(model: str, index: int) -> None:
    shape = {"json": SCHEMAS[index], "disable_any_whitespace": True}
    hot = [SamplingParams(temperature=1.5, seed=s, max_tokens=300, structured_outputs=shape) for s in range(40)]
    ended = [text for text, reason in said(llm(model), hot) if reason == "stop"]
    for text in ended:
        jsonschema.validate(json.loads(text), SCHEMAS[index])
    assert len(ended) > 5  # a number may go on for as long as there is room


@pytest.mark.parametrize("model", ["bundled", "random"])
@pytest.mark.parametrize("pattern", REGEXES)
def test_every_finished_answer_matches(model: str, pattern: str) -> None:
    found = said(llm(model), [params(regex=pattern, seed=seed, max_tokens=120) for seed in range(30)])
    ended = [text for text, reason in found if reason == "stop"]
    assert len(ended) > 20 and all(re.fullmatch(pattern, text) for text in ended)


def test_an_answer_that_would_fit_is_left_as_it_is() -> None:
    """Where what the model says by itself is of the shape, its tokens are the ones it says by itself."""
    free = llm("bundled").generate(PROMPTS[0], SamplingParams(temperature=0, max_tokens=30), use_tqdm=False)[0]
    shaped = SamplingParams(temperature=0, max_tokens=30, structured_outputs={"regex": "(.|\n)*"})
    bound = llm("bundled").generate(PROMPTS[0], shaped, use_tqdm=False)[0]
    assert bound.outputs[0].token_ids == free.outputs[0].token_ids


@pytest.mark.slow
def test_the_command_takes_a_shape_as_json() -> None:
    command = [sys.executable, "-m", "quintet", "generate", "--device", "cpu", "--structured-outputs"]
    done = subprocess.run([*command, '{"regex": "[0-9]{3}"}', "A number:"], capture_output=True, text=True, check=True)
    assert re.fullmatch("[0-9]{3}", done.stdout.strip())
    wrong = subprocess.run([*command, '{"regx": "a"}', "A number:"], capture_output=True, text=True)
    assert wrong.returncode == 2 and "did you mean 'regex'?" in wrong.stderr


@pytest.mark.slow
@tpu.needs_jax
def test_on_static_shapes_every_answer_matches() -> None:
    model = LLM(str(folder()), device="tpu", load_format="dummy", max_model_len=64, num_pages=40, max_num_seqs=8,
                max_num_batched_tokens=32, use_tqdm=False, compilation_cache_dir=tpu.programs().name)  # fmt: skip
    shape = SCHEMAS[2]
    wanted = [params(regex=pattern, seed=seed, max_tokens=50) for seed in range(3) for pattern in REGEXES]
    wanted += [params(json=shape, seed=seed, max_tokens=50) for seed in range(3)]
    plain = SamplingParams(seed=3, max_tokens=10, ignore_eos=True)
    found = model.generate([PROMPTS[0]] * (len(wanted) + 1), [*wanted, plain], use_tqdm=False)
    alone = model.generate(PROMPTS[0], plain, use_tqdm=False)[0]
    ended = [output.outputs[0] for output in found[:-1] if output.outputs[0].finish_reason == "stop"]
    assert len(ended) > 8
    for each, asked in zip(found[:-1], wanted, strict=True):
        if each.outputs[0].finish_reason == "stop" and asked.structured_outputs and asked.structured_outputs.regex:
            assert re.fullmatch(asked.structured_outputs.regex, each.outputs[0].text)
        elif each.outputs[0].finish_reason == "stop":
            jsonschema.validate(json.loads(each.outputs[0].text), shape)
    assert found[-1].outputs[0].token_ids == alone.outputs[0].token_ids
