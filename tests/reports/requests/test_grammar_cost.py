"""A grammar that compiles is not trusted while it runs: its masks are tried, and their time and memory bounded."""

import subprocess
import sys
import time
from typing import Any

import pytest

from quintet.chat.prompts import Prompt
from quintet.config import StructuredOutputsConfig
from quintet.engine.client import EngineClient
from quintet.outputs import RequestOutput
from quintet.sampling_params import SamplingParams, StructuredOutputsParams
from quintet.structured_output.compile_cache import MAX_GROWTH, CompileCache
from quintet.structured_output.compile_check import CompileChecker
from quintet.structured_output.grammar_source import grammar_text
from tests.helpers.platforms.null_engine import drain
from tests.helpers.platforms.shaped import client, params
from tests.server.fakes import FakeBackend
from tests.server.http.serving import client as http_client

llguidance = pytest.importorskip(
    "llguidance", reason="structured_outputs are an extra: pip install 'quintet-llm[structured]'"
)

AMBIGUOUS = 'start: s\ns: "a" | s s | s s s | "" | "b" s'
WIDE = {
    "type": "object",
    "properties": {f"p{number}": {"type": "integer", "maximum": 9} for number in range(1000)},
    "additionalProperties": False,
}
SERVED = [
    {"json": WIDE},
    {"choice": [f"choice {number}" for number in range(5000)]},
    {"json": {"type": "string", "maxLength": 5000}},
    {"json": {"type": "array", "items": {"type": "string", "pattern": "^[a-z]{2,30}@[a-z]{2,30}$"}}},
    {"regex": "[a-z ]*"},
]
REFUSED = [  # attack A1, A6
    ({"regex": "(x{5000}){5000}"}, "too many"),
    ({"regex": "(y{4000}z{1000}){5000}"}, "too many"),
    ({"regex": "[a-z]{30}(x{5000}){5000}"}, "too many"),
    ({"json": {"$ref": "#"}}, "no text follows it"),
    ({"grammar": "root ::= root"}, "no text follows it"),
    ({"grammar": "start: <[0-4294967295]>"}, "too large"),
    ({"regex": ".*" * 300}, "too many"),
]


def text(wanted: dict[str, Any]) -> str:
    return grammar_text(StructuredOutputsParams(**wanted), StructuredOutputsConfig())


def ask(served: EngineClient, *wanted: SamplingParams) -> list[RequestOutput]:
    for index, each in enumerate(wanted):
        served.add(str(index), Prompt([5, 6, 7]), each)
    outputs = drain(served)
    return [outputs[str(index)] for index in range(len(wanted))]


@pytest.fixture(scope="module")
def checker() -> Any:
    made = CompileChecker()
    yield made
    made.close()


@pytest.mark.parametrize("wanted", SERVED)
def test_what_is_large_and_plain_is_served(checker: CompileChecker, wanted: dict[str, Any]) -> None:
    """attack A6: an object of 1,000 properties and a choice of 5,000, among others."""
    assert checker.compile_error(text(wanted)) == ""


@pytest.mark.parametrize(("wanted", "why"), REFUSED)
def test_masks_are_tried_before_a_grammar_is_served(checker: CompileChecker, wanted: dict[str, Any], why: str) -> None:
    assert why in checker.compile_error(text(wanted))


def test_an_object_of_a_thousand_properties_is_written() -> None:
    """attack A6"""
    output = ask(client(max_model_len=256), params(json=WIDE, max_tokens=200, temperature=0.1))[0].outputs[0]
    assert output.finish_reason in ("stop", "length") and output.text.startswith("{"), output


def test_a_slow_grammar_ends_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """attack A2: its request ends with an error of its own, and those beside it go on."""
    served = client(max_model_len=1024, num_pages=300)
    # a hundredth of the bounds, so that the test is short
    monkeypatch.setattr("quintet.structured_output.grammar.FIRST_SECONDS", 0.02)
    monkeypatch.setattr("quintet.structured_output.grammar.TOKEN_SECONDS", 0.0002)
    monkeypatch.setattr("quintet.structured_output.grammar.SLOW_SECONDS", 0.0002)
    slow, plain = params(grammar=AMBIGUOUS, max_tokens=300, min_tokens=300), params(regex="[a-z]{99}", max_tokens=120)
    start = time.perf_counter()
    outputs = [each.outputs[0] for each in ask(served, slow, plain)]
    assert outputs[0].finish_reason == "error" and "take too long" in (outputs[0].error or ""), outputs[0]
    assert outputs[1].finish_reason == "stop" and time.perf_counter() - start < 20


def test_a_grammar_that_failed_while_it_ran_is_forgotten() -> None:
    """attack A3: its lexer is full, and would fail for the next request as well."""
    served, wanted = client(), params(regex="[b-z]{80}(a?){500}a{500}", max_tokens=150)
    grammar = text({"regex": "[b-z]{80}(a?){500}a{500}"})
    served.compile_grammar(wanted)
    before = served.grammars.matcher(grammar).future
    assert ask(served, wanted)[0].outputs[0].finish_reason == "error"
    assert served.grammars.matcher(grammar).future is not before


def test_what_is_remembered_is_bounded_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """attack A3"""
    monkeypatch.setattr("quintet.structured_output.compile_cache.MAX_BYTES", 3 * MAX_GROWTH)
    cache = CompileCache(str.upper, seconds=60)
    futures = {name: cache(name) for name in "abcdefgh"}
    for name, future in futures.items():
        assert future.result() == name.upper()
        cache.grow(name, future, seconds=9.0)  # of masks
    assert MAX_GROWTH < cache.num_bytes <= 3 * MAX_GROWTH
    assert [name for name in "abcdefgh" if cache(name) is futures[name]] == ["g", "h"]


GROWTH = """
from pathlib import Path
from quintet.chat.prompts import Prompt
from tests.helpers.platforms.shaped import client, params
from tests.helpers.platforms.null_engine import drain
from quintet.structured_output import compile_cache
compile_cache.MAX_BYTES = 8 * 2**20
def rss(): return int(Path("/proc/self/statm").read_text().split()[1]) * 4096
served = client(max_model_len=512)
def run(number):
    pattern = "|".join(f"[a-z ]*{c}[a-z ]{{{12 + n * 2 + number}}}" for n, c in enumerate("the"))
    served.add("x", Prompt([5, 6]), params(regex=f"({pattern})+", max_tokens=300, ignore_eos=True, seed=number))
    drain(served)
for number in range(20):
    run(number)
before = rss()
for number in range(20, 40):
    run(number)
print((rss() - before) >> 20)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_of_lexers_is_given_back() -> None:
    """attack A3: each of these grammars takes some MB once it has run. The first twenty fill what is kept; without a
    bound the next take another 45 MB."""
    done = subprocess.run([sys.executable, "-c", GROWTH], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 20, done.stdout


@pytest.mark.slow
async def test_a_failure_of_a_grammar_is_the_requests_own_fault() -> None:
    """attack A6: 400, and no 500 that clients send again."""
    fake = FakeBackend(fail_at=0, failure="structured_outputs ended: too many states")
    async with http_client(fake) as http:
        answer = await http.post("/v1/completions", json={"prompt": "x"})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "structured_outputs"
    assert answer.json()["error"]["message"] == "structured_outputs ended: too many states"
