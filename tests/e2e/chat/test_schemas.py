"""Hundreds of JSON schemas: whatever is said inside the mask comes to an end, and what ended follows its schema."""

import decimal
import functools
import json
from pathlib import Path
from typing import Any

import pytest

from quintet import LLM, SamplingParams
from quintet.config import BUNDLED, StructuredOutputsConfig
from quintet.sampling_params import ParameterError, StructuredOutputsParams
from quintet.structured_output.compile_check import CompileChecker
from quintet.structured_output.grammar_source import grammar_text
from tests.helpers.platforms.shaped import folder
from tests.helpers.walks import walk

llguidance = pytest.importorskip(
    "llguidance", reason="structured_outputs are an extra: pip install 'quintet-llm[structured]'"
)
jsonschema = pytest.importorskip("jsonschema")

ALL: dict[str, Any] = json.loads((Path(__file__).parent / "schemas.json").read_text(encoding="utf-8"))
KINDS = sorted({name.partition("-")[0] for name in ALL})
REFUSED = 13  # of all; a library that serves more is welcome, one that serves fewer is not


def wanted(name: str, bare: bool) -> StructuredOutputsParams:
    return StructuredOutputsParams(json=json.dumps(ALL[name]), disable_any_whitespace=bare)


def follows(text: str, schema: Any) -> None:
    """Raises if it does not. Numbers are taken as they are written: a tenth is no multiple of 0.1 in binary."""
    text = text.replace('"0000-', '"2000-')  # a year that Python has not; both are leap years
    exact: Any = json.loads(json.dumps(schema), parse_float=number)
    kind = jsonschema.validators.validator_for(exact, default=jsonschema.Draft202012Validator)
    with decimal.localcontext(prec=5000):
        kind(exact, format_checker=kind.FORMAT_CHECKER).validate(json.loads(text, parse_float=number))


def number(text: str) -> decimal.Decimal:
    """As it is written, but for exponents of twenty digits, which no number here may have where it has borders."""
    try:
        return decimal.Decimal(text)
    except decimal.InvalidOperation:
        return decimal.Decimal("-Infinity" if text.startswith("-") else "Infinity")


@functools.cache
def refused() -> dict[str, str]:
    """Name -> why it is not served."""
    trials = CompileChecker()
    found = {}
    for name in ALL:
        try:
            why = trials.compile_error(grammar_text(wanted(name, False), StructuredOutputsConfig()))
        except ParameterError as error:
            why = str(error)
        if why:
            found[name] = why
    trials.close()
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_every_walk_inside_the_mask_ends_and_what_it_says_follows_the_schema(kind: str) -> None:
    names = [name for name in ALL if name.startswith(f"{kind}-") and name not in refused()]
    assert names
    for number, name in enumerate(names):
        grammar = grammar_text(wanted(name, number % 2 == 0), StructuredOutputsConfig())
        for seed in range(3):
            text = walk(grammar, seed)
            try:
                follows(text, ALL[name])
            except (jsonschema.ValidationError, ValueError) as error:
                raise AssertionError(f"{name} {ALL[name]}: {text!r}") from error


def test_nearly_all_are_served_and_every_refusal_names_a_keyword() -> None:
    assert len(ALL) >= 400 and 0 < len(refused()) <= REFUSED
    for name, why in refused().items():
        keywords = set(_keys(ALL[name]))
        assert any(f'"{key}"' in why or f"'{key}'" in why or key in why.split() for key in keywords), (name, why)


def _keys(schema: Any) -> Any:
    inner = schema.values() if isinstance(schema, dict) else schema if isinstance(schema, list) else ()
    yield from schema if isinstance(schema, dict) else ()
    for each in inner:
        yield from _keys(each)


@pytest.mark.parametrize("model", ["random", pytest.param("bundled", marks=pytest.mark.slow)])
def test_what_a_model_says_to_its_end_follows_the_schema(model: str) -> None:
    settings: dict[str, Any] = {
        "use_tqdm": False,
        "device": "cpu",
        "max_model_len": 256,
        "kv_cache_memory_bytes": "64M",
    }
    name = BUNDLED if model == "bundled" else str(folder())
    llm = LLM(name, load_format="auto" if model == "bundled" else "dummy", **settings)
    names = [name for name in ALL if name not in refused()]
    asked = [
        SamplingParams(temperature=1.5, seed=seed, max_tokens=100, structured_outputs=wanted(name, seed % 3 > 0))
        for seed, name in enumerate(names)
    ]
    outputs = llm.generate(["One day, Tom"] * len(names), asked, use_tqdm=False)
    ended = 0
    for name, output in zip(names, outputs, strict=True):
        assert output.outputs[0].finish_reason in ("stop", "length"), (name, output.outputs[0])
        if output.outputs[0].finish_reason == "stop":
            ended += 1
            follows(output.outputs[0].text, ALL[name])
    assert ended > len(names) // 2
