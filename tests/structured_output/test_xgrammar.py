"""The backend xgrammar: its masks are llguidance's, it can be stopped, and its absence says what to do."""

import importlib.util
import json
from typing import Any

import numpy as np
import pytest

from quintet import LLM, SamplingParams, StructuredOutputsParams
from quintet.config import StructuredOutputsConfig
from quintet.sampling_params import ParameterError
from quintet.structured_output import xgrammar_backend, xgrammar_worker
from quintet.structured_output.compile_check import TOO_MUCH
from quintet.structured_output.grammar import GrammarCompiler, Matcher
from quintet.structured_output.grammar_source import grammar_after, grammar_text
from quintet.structured_output.xgrammar_source import guidance_text, with_xgrammar, xgrammar_source
from quintet.tokenizers.tokenizer import Tokenizer
from tests.server.fakes import FakeBackend

pytest.importorskip("llguidance", reason="structured_outputs are an extra: pip install 'quintet-llm[structured]'")
CONFIG = StructuredOutputsConfig(backend="xgrammar")
needs_library = pytest.mark.skipif(
    importlib.util.find_spec("xgrammar") is None, reason="an extra: pip install 'quintet-llm[xgrammar]'"
)
TAGS = {"type": "array", "items": {"enum": ["a", "b"]}}
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}},
    },
    "required": ["name", "tags"],
    "additionalProperties": False,
}
WANTED: dict[str, StructuredOutputsParams] = {
    "object": StructuredOutputsParams(json=PERSON, disable_any_whitespace=True),
    "integer": StructuredOutputsParams(json={"type": "integer", "minimum": 3, "maximum": 412}),
    "union": StructuredOutputsParams(json={"anyOf": [{"const": "no"}, {"type": "boolean"}, {"type": "null"}]}),
    "reference": StructuredOutputsParams(
        json={"$defs": {"n": {"type": "array", "items": {"$ref": "#/$defs/n"}, "maxItems": 2}}, "$ref": "#/$defs/n"},
        disable_any_whitespace=True,
    ),
    "regex": StructuredOutputsParams(regex=r"[a-f]{2,4}(-[0-9]+)?"),
    "choice": StructuredOutputsParams(choice=["yes", 'no "way"', "perhaps\n", "\U0001fae9\x85"]),
    "ebnf": StructuredOutputsParams(grammar='root ::= "(" root ")" | [a-c]'),
}


def tokenizer() -> Tokenizer:
    found = FakeBackend().tokenizer
    assert found is not None
    return found


def compiler(backend: str) -> GrammarCompiler:
    return GrammarCompiler(tokenizer, 512, tokenizer().eos_ids, StructuredOutputsConfig(backend=backend))


class Output:
    """Tokens of a request."""

    def __init__(self) -> None:
        self.num_prompt, self.token_ids = 1, [1]

    @property
    def num_known(self) -> int:
        return len(self.token_ids)


def allowed(matcher: Matcher, output: Output) -> set[int]:
    """Tokens that a step may draw; empty if the output has ended."""
    assert not matcher.advance(output)
    if matcher.complete:
        return set()
    words = np.zeros(16, np.int32)
    if matcher.fill(words) is matcher:
        matcher.fill_now(words)
    return {*np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")).tolist()}


DEL = {each for each in range(512) if tokenizer().token_bytes(each) == b"\x7f"}


@pytest.fixture(scope="module")
def both() -> Any:
    pair = compiler("guidance"), compiler("xgrammar")
    yield pair
    for each in pair:
        each.close()


@needs_library
@pytest.mark.parametrize("name", WANTED)
def test_a_text_that_one_backend_writes_is_the_others_too(both: Any, name: str) -> None:
    """What llguidance forces, xgrammar allows; where the model chooses, the masks are equal but for DEL, which
    llguidance leaves out of strings."""
    ours, theirs = both
    draw = np.random.default_rng(3)
    for _ in range(4):
        one, other = (each.matcher(each.compile_and_wait(WANTED[name])) for each in (ours, theirs))
        output = Output()
        for _ in range(60):
            first, second = allowed(one, output), allowed(other, output) - DEL
            if not first:
                assert not second
                break
            assert first <= second, (name, tokenizer().decode(output.token_ids[1:]))
            if not one.num_forced:
                assert first == second, (name, tokenizer().decode(output.token_ids[1:]), first ^ second)
            output.token_ids.append(int(draw.choice(sorted(first))))


@needs_library
def test_tokens_are_taken_back_and_refused_ones_end_the_output(both: Any) -> None:
    _, theirs = both
    matcher, output = theirs.matcher(theirs.compile_and_wait(WANTED["regex"])), Output()
    before = allowed(matcher, output)
    a, dash = (tokenizer().encode(each, add_special_tokens=False)[-1] for each in ("a", "-"))
    output.token_ids += [a, a]
    after = allowed(matcher, output)
    assert dash in after and dash not in before
    assert matcher.count_allowed(output, [dash, dash]) == 1
    del output.token_ids[1:]
    assert allowed(matcher, output) == before
    output.token_ids.append(dash)
    assert "does not take" in matcher.advance(output)


@needs_library
def test_what_takes_too_long_is_ended_and_the_next_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    made = compiler("xgrammar")
    backend = made.matcher(made.compile_and_wait(WANTED["choice"])) and made._xgrammar
    assert backend is not None and backend._child is not None
    first = backend._child.pid
    monkeypatch.setattr("quintet.structured_output.xgrammar_backend.TIMEOUT", 0.0)
    with pytest.raises(ValueError, match=TOO_MUCH):
        backend.compile(["regex", "[a-z]{1,3000}", {}])
    monkeypatch.undo()
    assert backend._child is not None and backend._child.pid != first  # the next loads already
    assert made.compile_and_wait(WANTED["integer"])
    with pytest.raises(ValueError, match="parenthesis is not closed"):
        backend.compile(["regex", "(", {}])
    made.close()


@needs_library
@pytest.mark.parametrize(
    "schema", [{"items": 5}, {"anyOf": 5}, {"additionalProperties": 3}, {"type": 5, "const": 1}, {"required": [[1]]}]
)
def test_what_is_no_schema_is_refused(both: Any, schema: dict[str, Any]) -> None:
    with pytest.raises(ParameterError, match="structured_outputs cannot be served"):
        both[1].compile_and_wait(StructuredOutputsParams(json=schema))


@needs_library
def test_a_choice_beyond_the_first_plane_is_taken(both: Any) -> None:
    text = "\U0001fae9\x85"
    state = both[1].matcher(both[1].compile_and_wait(StructuredOutputsParams(choice=[text]))).future.result()
    assert state.deep_copy().consume_tokens(tokenizer().encode(text, add_special_tokens=False))


@needs_library
def test_tokens_behind_the_end_are_taken_back_first(both: Any) -> None:
    backend = both[1]._start_xgrammar()
    state = backend.compile(["regex", "aa", {}])
    a, eos = tokenizer().encode("a", add_special_tokens=False)[-1], tokenizer().eos_ids[0]
    assert state.consume_tokens([a, a, eos, a, a]) and state.is_stopped()
    copied = state.deep_copy()
    copied.rollback(2)
    assert copied.is_stopped()
    copied.rollback(2)
    assert not copied.is_stopped() and copied.consume_tokens([a]) and copied.is_stopped()
    state.rollback(5)
    assert state.consume_tokens([a, a]) and not state.consume_tokens([a])


@needs_library
def test_a_compiled_grammar_counts_with_its_size(both: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import xgrammar

    theirs, wanted = both[1], StructuredOutputsParams(regex="[a-z]{1,2000}")
    before = theirs._compiled.num_bytes
    text = theirs.compile_and_wait(wanted)
    size = theirs.matcher(text).future.result().num_bytes
    assert size > 80_000 and theirs._compiled.num_bytes > before + size
    info = theirs._start_xgrammar()._info
    library = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
    assert xgrammar_worker._answer(library, "regex", "[a-z]{1,2000}", {})[0] == "+"
    monkeypatch.setattr(xgrammar_worker, "MAX_GRAMMAR", 2**16)
    assert "MiB when it is compiled, and" in xgrammar_worker._answer(library, "regex", "[a-z]{1,2000}", {})


@needs_library
def test_a_process_that_does_not_start_says_why(both: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = both[1]._start_xgrammar()
    with monkeypatch.context() as patched:
        patched.setattr(type(backend._info), "serialize_json", lambda info: "{}")
        with backend._lock:
            backend._end()
        with pytest.raises(ValueError, match=r"xgrammar does not start \(.+\); reinstall it"):
            backend.compile(["regex", "a", {}])
    with monkeypatch.context() as patched:
        patched.setattr(xgrammar_backend, "MAX_ANSWER", 10)
        with pytest.raises(ValueError, match=TOO_MUCH):
            backend.compile(["regex", "a", {}])
    assert backend.compile(["regex", "a", {}])


@needs_library
def test_a_model_answers_as_its_schema_says() -> None:
    config: dict[str, Any] = {"backend": "xgrammar"}
    with LLM("bundled", use_tqdm=False, structured_outputs_config=config) as llm:
        params = SamplingParams(temperature=1, seed=4, n=3, max_tokens=120, structured_outputs=WANTED["object"])
        for output in llm.generate("A person:", params, use_tqdm=False)[0].outputs:
            assert output.finish_reason == "stop" and set(json.loads(output.text)) == {"name", "tags"}
        messages = [{"role": "user", "content": "Think, then answer."}]
        shaped = SamplingParams(temperature=0, max_tokens=200, structured_outputs=WANTED["choice"])
        [answer] = llm.chat(messages, shaped, use_tqdm=False, chat_template_kwargs={"enable_thinking": True})
        assert (
            answer.outputs[0].content in (WANTED["choice"].choice or []) or answer.outputs[0].finish_reason == "length"
        )


def test_keywords_that_it_would_pass_over_are_refused() -> None:
    for schema, keyword in (
        ({"type": "integer", "multipleOf": 3}, "'multipleOf'"),
        ({"properties": {"a": {"type": "array", "uniqueItems": True}}}, "'uniqueItems'"),
        ({"$defs": {"x": {"not": {}}}, "$ref": "#/$defs/x"}, "'not'"),
        ({"type": "string", "pattern": "a+", "maxLength": 3}, "'pattern' beside minLength or maxLength"),
        ({"type": "object", "properties": {"a": {}}, "required": ["a"], "anyOf": [{}]}, "'type' beside anyOf"),
        ({"$defs": {"x": {}}, "$ref": "#/$defs/x", "maxLength": 1}, r"'maxLength' beside \$ref"),
        ({"$ref": "#", "type": "string"}, r"'type' beside \$ref"),
        ({"type": "string", "enum": ["a", 3]}, "'type' beside enum"),
        ({"type": ["integer", "null"], "const": True}, "'type' beside const"),
        ({"items": {"const": 3, "minimum": 4}}, "'minimum' beside const"),
        ({"pattern": "^a$"}, "'pattern' without type"),
        ({"minimum": 5}, "'minimum' without type"),
        ({"minLength": 5}, "'minLength' without type"),
        ({"minItems": 2}, "'minItems' without type"),
        ({"required": ["a"]}, "'required' with a name that properties lacks"),
        ({"type": "object", "properties": {"b": {}}, "required": ["a"]}, "'required' with a name"),
    ):
        with pytest.raises(ValueError, match=f"does not enforce the keyword {keyword}"):
            with_xgrammar("", StructuredOutputsParams(json=schema), CONFIG)
    known: list[dict[str, Any]] = [
        {"type": "string", "enum": ["a", "b"]}, {"type": ["integer", "null"], "enum": [3.0, None], "title": "x"},
        {"$defs": {"x": {}}, "$ref": "#/$defs/x", "description": "y", "default": 5}, {"properties": {"type": {}}},
    ]  # fmt: skip
    for each in known:
        assert with_xgrammar("", StructuredOutputsParams(json=each), CONFIG)
    deep: dict[str, Any] = {"type": "integer"}
    for _ in range(60):
        deep = {"type": "array", "items": deep}
    assert with_xgrammar("", StructuredOutputsParams(json=deep), CONFIG)  # each level is read once
    with pytest.raises(ParameterError, match="whitespace_pattern is not there with the backend xgrammar"):
        grammar_text(StructuredOutputsParams(json={}, whitespace_pattern=" "), CONFIG)


def test_lark_and_combinations_are_llguidances() -> None:
    lark = StructuredOutputsParams(grammar='start: "a"')
    assert grammar_text(lark, CONFIG) == grammar_text(lark, StructuredOutputsConfig())
    quoted = StructuredOutputsParams(grammar='start: "a ::= b"')
    assert xgrammar_source(grammar_text(quoted, CONFIG)) is None
    plain, written = (grammar_text(WANTED["choice"], each) for each in (StructuredOutputsConfig(), CONFIG))
    assert written != plain == guidance_text(written) == guidance_text(plain)
    assert grammar_after(written, "start: @answer") == grammar_after(plain, "start: @answer")


@pytest.mark.parametrize(("module", "package"), [("xgrammar", "xgrammar"), ("tvm_ffi", "apache-tvm-ffi")])
def test_without_a_package_one_line_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, module: str, package: str
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *_: None if name == module else "found")
    with pytest.raises(
        ValueError, match=rf"needs the package {package}, which is not here: pip install '.*\[xgrammar\]'"
    ):
        compiler("xgrammar")
