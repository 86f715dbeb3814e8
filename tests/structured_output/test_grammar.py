"""Answers with a shape: every token is one that the grammar allows, whatever else is asked for or happens."""

import json
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from quintet import LLM, AsyncLLM, BeamSearchParams, RequestOutputKind, SamplingParams, StructuredOutputsParams
from quintet.chat.prompts import Prompt
from quintet.config import StructuredOutputsConfig
from quintet.engine.client import EngineClient
from quintet.engine.engine import Engine
from quintet.engine.request import CoreRequest, Request
from quintet.engine.sampling.logits_processors import RequestLogitsProcessor, RowFunction
from quintet.engine.startup import launch, prepare
from quintet.outputs import RequestOutput, TokenDelta
from quintet.sampling_params import ParameterError
from quintet.structured_output.grammar import GrammarCompiler, MaskFiller, Matcher
from quintet.structured_output.grammar_source import grammar_text
from quintet.tokenizers.tokenizer import Tokenizer, load_tokenizer
from tests.helpers.checkpoints import tokenizers
from tests.helpers.platforms.behind import Work, behind
from tests.helpers.platforms.null_engine import CtrlC, drain
from tests.helpers.platforms.shaped import SIZE, client, config, folder, params

pytest.importorskip("llguidance", reason="structured_outputs are an extra: pip install 'quintet-llm[structured]'")
jsonschema = pytest.importorskip("jsonschema")

PROMPT = Prompt(list(range(5, 45)))
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 5}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
REGEXES = [r"[a-f]{3,9}", "[0-9]{3}-[0-9]{2}", "(ab|c)*d", r"[^x]{1,4}x", "é+", ".{0,6}", "", r"^a|bc$", "👋🏽?"]


@pytest.fixture(scope="module")
def shared() -> Iterator[EngineClient]:
    made = client()
    yield made
    made.close()


def ask(shared: EngineClient, *wanted: SamplingParams, prompt: Prompt = PROMPT) -> list[RequestOutput]:
    """Together, in one batch."""
    for index, each in enumerate(wanted):
        shared.add(str(index), prompt, each)
    outputs = drain(shared)
    return [outputs[str(index)] for index in range(len(wanted))]


def texts(outputs: list[RequestOutput]) -> list[str]:
    for output in outputs:
        assert [each.finish_reason for each in output.outputs] == ["stop"] * len(output.outputs), output
    return [each.text for output in outputs for each in output.outputs]


@pytest.mark.parametrize("pattern", REGEXES)
def test_a_regex_matches_the_whole_output(shared: EngineClient, pattern: str) -> None:
    said = texts(ask(shared, *(params(regex=pattern, seed=seed, max_tokens=200) for seed in range(30))))
    assert all(re.fullmatch(pattern, text) for text in said)
    assert len(set(said)) > 1 or pattern in ("", "👋🏽?", r"^a|bc$")


@pytest.mark.parametrize("asked", [PERSON, json.dumps(PERSON)])
def test_json_follows_its_schema(shared: EngineClient, asked: Any) -> None:
    outputs = ask(shared, *(params(json=asked, seed=seed, max_tokens=150) for seed in range(40)))
    ended = [each.outputs[0].text for each in outputs if each.outputs[0].finish_reason == "stop"]
    for text in ended:
        jsonschema.validate(json.loads(text), PERSON)
    assert len(ended) > 20


def test_any_object_is_json(shared: EngineClient) -> None:
    outputs = ask(shared, *(params(json_object=True, seed=seed, max_tokens=150) for seed in range(20)))
    ended = [each.outputs[0].text for each in outputs if each.outputs[0].finish_reason == "stop"]
    assert ended and all(isinstance(json.loads(text), dict) for text in ended)


def test_a_choice_is_one_of_its_texts(shared: EngineClient) -> None:
    choice = ["yes", "no", 'a "quoted" \\ one', "naïve 👋\n", "yes, but"]
    said = texts(ask(shared, *(params(choice=choice, seed=seed) for seed in range(60))))
    assert set(said) <= set(choice) and len(set(said)) > 3


def test_a_grammar_is_followed_from_its_start(shared: EngineClient) -> None:
    sums = 'start: NUMBER ("+" NUMBER)*\nNUMBER: /[1-9][0-9]{0,2}/'
    said = texts(ask(shared, *(params(grammar=sums, seed=seed, max_tokens=200) for seed in range(20))))
    assert all(re.fullmatch(r"[1-9][0-9]{0,2}(\+[1-9][0-9]{0,2})*", text) for text in said)


def test_json_options_are_obeyed(shared: EngineClient) -> None:
    loose = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}

    def said(**options: Any) -> list[str]:
        shapes = StructuredOutputsParams(json=loose, **options)
        hot = [SamplingParams(temperature=2.0, max_tokens=80, seed=s, structured_outputs=shapes) for s in range(30)]
        return [o.outputs[0].text for o in ask(shared, *hot) if o.outputs[0].finish_reason == "stop"]

    assert any(set(json.loads(text)) > {"a"} for text in said(disable_any_whitespace=True))
    assert any(" \n" in text for text in said(disable_additional_properties=True))
    bare = said(disable_any_whitespace=True, disable_additional_properties=True)
    assert bare and all(re.fullmatch(r'\{"a":-?\d+\}', text) for text in bare)
    single = said(whitespace_pattern=" ", disable_additional_properties=True)
    assert single and all(re.fullmatch(r'\{ ?"a" ?: ?-?\d+ ?\}', text) for text in single), single


def test_a_format_that_json_schema_does_not_know_says_nothing(shared: EngineClient) -> None:
    """Pydantic writes some, OpenAPI others. One that it knows, and that cannot be served, is refused."""

    def secret(form: str) -> dict[str, Any]:
        word = {"type": "string", "format": form, "maxLength": 4}
        return {"type": "object", "properties": {"format": word}, "required": ["format"], "additionalProperties": False}

    asked = [secret(form) for form in ("password", "path", "binary", "int64")]
    outputs = ask(shared, *(params(json=each, seed=seed, max_tokens=60) for seed, each in enumerate(asked * 3)))
    said = [o.outputs[0].text for o in outputs if o.outputs[0].finish_reason == "stop"]
    assert said and all(len(json.loads(text)["format"]) <= 4 for text in said)
    assert asked[0]["properties"]["format"]["format"] == "password"  # the caller's own is not changed
    with pytest.raises(ParameterError, match=r"regex.*#/properties/format, keyword 'format'"):
        shared.add("x", PROMPT, params(json=secret("regex")))


def test_the_configuration_may_ask_for_json_options_of_all() -> None:
    served = client(structured_outputs_config={"disable_any_whitespace": True, "disable_additional_properties": True})
    loose = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}
    assert set(texts(ask(served, *(params(json=loose, seed=seed) for seed in range(9))))) == {'{"a":1}', '{"a":2}'}


def test_the_last_token_is_text_and_ends_the_request(shared: EngineClient) -> None:
    """Not end-of-text, which would be hidden, and not a step more than the text needs."""
    shared.add("x", PROMPT, params(choice=["abc"], max_tokens=3, output_kind=RequestOutputKind.DELTA))
    deltas = [output.outputs[0] for _ in range(9) for output in shared.step()]
    assert "".join(delta.text for delta in deltas) == "abc"
    assert sum(len(delta.token_ids) for delta in deltas) <= 3
    assert (deltas[-1].finish_reason, deltas[-1].stop_reason, shared.busy) == ("stop", None, False)


def test_end_of_text_comes_where_the_grammar_accepts_and_no_sooner_than_asked(shared: EngineClient) -> None:
    free = ask(shared, *(params(regex="(ab)*", seed=seed, max_tokens=90) for seed in range(30)))
    assert {each.outputs[0].token_ids[-1] for each in free if each.outputs[0].finish_reason == "stop"} == {1}
    assert min(map(len, texts(free))) == 0
    late = ask(shared, *(params(regex="(ab)*", seed=seed, min_tokens=20, max_tokens=200) for seed in range(30)))
    assert min(len(each.outputs[0].token_ids) for each in late) > 20
    done = ask(
        shared, params(regex="ab", min_tokens=20, max_tokens=30)
    )  # the grammar has no more: it ends all the same
    assert texts(done) == ["ab"]


def test_without_end_of_text_the_grammar_ends_it_too(shared: EngineClient) -> None:
    outputs = ask(shared, *(params(regex="(ab)*", seed=seed, ignore_eos=True, max_tokens=200) for seed in range(5)))
    assert all(re.fullmatch("(ab)*", text) for text in texts(outputs))


def test_an_end_by_length_is_a_beginning(shared: EngineClient) -> None:
    output = ask(shared, params(regex="a{500}", max_tokens=7))[0].outputs[0]
    assert (output.finish_reason, len(output.token_ids)) == ("length", 7)
    assert re.fullmatch("a+", output.text)


def test_each_completion_has_its_own_state(shared: EngineClient) -> None:
    output = ask(shared, params(regex="[ab]{4,30}c", n=8, seed=3))[0]
    assert len(set(texts([output]))) > 2 and all(re.fullmatch("[ab]{4,30}c", text) for text in texts([output]))


def test_with_logprobs_stop_strings_and_penalties(shared: EngineClient) -> None:
    said = params(regex="[a-z]{50}", seed=1, logprobs=2, stop=["q", "e"], frequency_penalty=2.0, repetition_penalty=1.5)
    output = ask(shared, said)[0].outputs[0]
    assert output.stop_reason in ("q", "e") and re.fullmatch("[a-df-pr-z]*", output.text)
    assert output.logprobs is not None and len(output.logprobs) == len(output.token_ids)
    assert all(np.isfinite(at[token].logprob) for at, token in zip(output.logprobs, output.token_ids, strict=True))


def test_rows_beside_have_the_tokens_they_have_alone(shared: EngineClient) -> None:
    plain = [
        SamplingParams(temperature=0, max_tokens=25, ignore_eos=True),
        SamplingParams(seed=4, max_tokens=25, top_k=40, logprobs=3),
        SamplingParams(seed=5, max_tokens=25, min_p=0.01, allowed_token_ids=list(range(5, 90))),
    ]
    alone = ask(shared, *plain)
    mixed = ask(shared, params(regex="a{9}b*", seed=1), *plain, params(json=PERSON, seed=2))
    for one, other in zip(alone, mixed[1:-1], strict=True):
        assert one.outputs[0].token_ids == other.outputs[0].token_ids
        assert one.outputs[0].logprobs == other.outputs[0].logprobs


def test_a_cached_beginning_changes_nothing(shared: EngineClient) -> None:
    wanted = params(regex="[a-z ]{30,50}", seed=9)
    shared.engine.reset_prefix_cache()
    first, again = ask(shared, wanted)[0], ask(shared, wanted)[0]
    assert (first.num_cached_tokens, again.num_cached_tokens) == (0, 32)
    assert first.outputs[0].token_ids == again.outputs[0].token_ids


def test_preempted_requests_go_on_where_they_were() -> None:
    wanted = [params(regex="[a-z]{60}", seed=seed, max_tokens=100) for seed in range(6)]
    roomy, tight = client(), client(num_pages=24, page_size=4, max_model_len=88)
    expected, found = ask(roomy, *wanted, prompt=Prompt([5, 6, 7])), ask(tight, *wanted, prompt=Prompt([5, 6, 7]))
    assert tight.engine.scheduler.stats().num_preemptions > 0
    assert [each.outputs[0].token_ids for each in found] == [each.outputs[0].token_ids for each in expected]
    assert all(re.fullmatch("[a-z]{60}", text) for text in texts(found))


@pytest.mark.parametrize("line", range(40, 700, 60))
def test_ctrl_c_at_any_line_costs_nobody_a_token(shared: EngineClient, line: int) -> None:
    wanted = [params(regex="[a-z]{6}", seed=seed) for seed in range(2)]
    expected = [each.outputs[0].token_ids for each in ask(shared, *wanted)]
    for index, each in enumerate(wanted):
        shared.add(str(index), PROMPT, each)
    outputs: dict[str, RequestOutput] = {}
    with CtrlC(line):
        while shared.busy:
            outputs.update((output.request_id, output) for output in shared.step())
    outputs.update(drain(shared))
    assert [outputs[str(index)].outputs[0].token_ids for index in range(2)] == expected


def test_allowed_tokens_and_the_grammar_both_hold(shared: EngineClient) -> None:
    assert shared.tokenizer is not None
    ids = [shared.tokenizer.token_id(letter) for letter in "xyz"]
    said = texts(ask(shared, *(params(regex="[a-z]{5}", allowed_token_ids=ids, seed=seed) for seed in range(5))))
    assert all(re.fullmatch("[xyz]{5}", text) for text in said)
    failed, beside = ask(shared, params(regex="[0-9]{5}", allowed_token_ids=ids), params(regex="[0-9]{5}"))
    assert failed.outputs[0].finish_reason == "error" and "structured_outputs" in (failed.outputs[0].error or "")
    assert texts([beside])


# ------------------------------------------------------------------------------------------------------- refusals

REFUSED = [
    ({"regex": "("}, "unclosed group"),
    ({"regex": "(?=a)b"}, "look-around"),
    ({"json": {"not": {"type": "string"}}}, '"not"'),
    ({"json": "{x"}, "no JSON"),
    ({"json": {"$ref": "https://example.com/schema"}}, "https://example.com/schema"),
    ({"json": {"type": "integer", "minimum": 3, "maximum": 1}}, "Unsatisfiable"),
    ({"json": {"exclusiveMinimum": 1.5, "maximum": 10**400}}, "too large"),
    ({"grammar": "start: missing"}, "missing"),
    ({"choice": ["x" * 1000 + str(i) for i in range(2000)]}, "characters"),
]


@pytest.mark.parametrize(("asked", "why"), REFUSED)
def test_what_cannot_be_compiled_is_refused_before_anything_runs(shared: EngineClient, asked: Any, why: str) -> None:
    with pytest.raises(ParameterError, match=re.escape(why)) as caught:
        shared.add("x", PROMPT, SamplingParams(structured_outputs=asked))
    assert caught.value.parameter == "structured_outputs" and "\n" not in str(caught.value)
    assert not shared.busy


def test_names_of_properties_are_no_keywords() -> None:
    """A property may be called like a keyword, and what is below it is a schema all the same."""
    inner = {"type": "object", "properties": {"a": {"type": "null"}}}
    names = ("default", "enum", "const", "examples", "properties", "items")
    schema = {"type": "object", "properties": dict.fromkeys(names, inner), "enum": [{"properties": {}}]}
    written = grammar_text(
        StructuredOutputsParams(json=schema, disable_additional_properties=True), StructuredOutputsConfig()
    )
    [made] = [each["json_schema"] for each in json.loads(written)["grammars"]]
    assert all(made["properties"][name]["additionalProperties"] is False for name in names)
    assert set(made["properties"]) == set(names) and made["enum"] == [{"properties": {}}]


def test_nested_too_deep_is_refused(shared: EngineClient) -> None:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(100_000):
        schema = {"type": "array", "items": schema}
    with pytest.raises(ParameterError, match="nested too deep"):
        shared.grammars.compile_and_wait(StructuredOutputsParams(json=schema))
    with pytest.raises(ParameterError, match="nested too deep"):
        shared.grammars.compile_and_wait(StructuredOutputsParams(json="[" * 100_000))


def test_without_the_package_the_remedy_is_named(shared: EngineClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(ParameterError, match=r"pip install '.*\[structured\]'"):
        shared.add("x", PROMPT, params(regex="a"))


def test_without_a_tokenizer_it_is_refused() -> None:
    with pytest.raises(ParameterError, match="tokenizer"):
        client(skip_tokenizer_init=True).add("x", PROMPT, params(regex="a", detokenize=False))


def test_a_tokenizer_whose_tokens_have_no_bytes_is_refused(tmp_path: Any) -> None:
    odd = tokenizers.word_piece(tmp_path)
    with pytest.raises(ParameterError, match=r"tokenizer does not have: its decoder \(WordPiece\)"):
        GrammarCompiler(lambda: odd, SIZE, [1]).compile_and_wait(StructuredOutputsParams(regex="a"))


async def test_async_refuses_alike_and_compiles_outside_the_engines_thread() -> None:
    engine = AsyncLLM(str(folder()), device="null", load_format="dummy", max_model_len=256, num_pages=80)
    try:
        with pytest.raises(ParameterError, match="unclosed group"):
            _ = [output async for output in engine.generate("a", params(regex="("))]
        last = [output async for output in engine.generate("a", params(regex="[ab]{5}"))][-1]
        assert re.fullmatch("[ab]{5}", last.outputs[0].text)
    finally:
        engine.shutdown()


# ------------------------------------------------------------------------------------- an engine without admission


def engine(grammars: GrammarCompiler) -> Engine:
    return launch(prepare(config()), progress=False, grammars=grammars)


def request(name: str, asked: dict[str, Any] | None, temperature: float = 0, most: int = 9) -> CoreRequest:
    wanted = SamplingParams(temperature=temperature, max_tokens=most)
    grammar = "" if asked is None else text(**asked)
    return CoreRequest(name, [5, 6, 7], wanted, (1, 2), most, frozenset([1]), grammar=grammar)


def text(**asked: Any) -> str:
    return grammar_text(StructuredOutputsParams(**asked), StructuredOutputsConfig())


def reader(wait: threading.Event | None = None) -> Any:
    def read() -> Tokenizer:
        assert wait is None or wait.wait(60)
        return load_tokenizer(folder())

    return read


def run(engine: Engine) -> dict[str, list[TokenDelta]]:
    said: dict[str, list[TokenDelta]] = {}
    while engine.busy:
        for delta in engine.step():
            said.setdefault(delta.request_id, []).append(delta)
        engine.check_integrity()
    return said


@pytest.mark.parametrize("static", [False, True])
def test_on_a_device_behind_the_host_the_next_model_runs_while_masks_are_filled(static: bool) -> None:
    """Tokens are the same: a mask is of the tokens that the host knows by then."""
    said = []
    for overlap in (False, True):
        work = Work()
        facts: dict[str, Any] = {"overlap": overlap, "static_shapes": static}
        prepared = prepare(config(num_pages=30, page_size=4, max_model_len=64, max_num_seqs=5), behind(work, **facts))
        work.take(prepared.ranks.workers[0].ops)
        served = launch(prepared, progress=False, grammars=GrammarCompiler(reader(), SIZE, [1]))
        work.begin()
        for index, shape in enumerate([{"regex": "[a-f]{3,12}"}, None, {"json": {"enum": ["a", "bc"]}}, None] * 3):
            served.add(request(f"{index}", shape, temperature=1.5))
        found = run(served)
        said.append({name: [i for delta in deltas for i in delta.token_ids] for name, deltas in found.items()})
        assert all(deltas[-1].error is None for deltas in found.values())
        first = {what: work.log.index((what, step)) for what, step in [("launch", 2), ("wait", 1)]}
        assert (first["launch"] < first["wait"]) == overlap
    assert said[0] == said[1]


def test_who_waits_for_a_grammar_holds_up_nobody() -> None:
    gate = threading.Event()
    served = engine(GrammarCompiler(reader(gate), SIZE, [1]))
    served.add(request("shaped", {"regex": "a{9}"}))
    served.add(request("plain", None))
    said = []
    while len(served) == 2:
        said += served.step()
    assert {delta.request_id for delta in said} == {"plain"} and said[-1].finish_reason == "length"
    assert served.step() == []  # with nothing else to do it looks around, and does not hang
    gate.set()
    assert run(served)["shaped"][-1].finish_reason == "stop"


def test_a_grammar_that_fails_ends_its_request_alone() -> None:
    served = engine(GrammarCompiler(reader(), SIZE, [1]))
    served.add(request("wrong", {"regex": "("}))
    served.add(request("right", {"regex": "a{9}"}))
    said = run(served)
    assert said["wrong"][-1].finish_reason == "error" and "unclosed group" in (said["wrong"][-1].error or "")
    assert said["right"][-1].finish_reason == "stop"


def test_a_grammar_that_takes_too_long_ends_its_request_alone() -> None:
    gate = threading.Event()
    served = engine(GrammarCompiler(reader(gate), SIZE, [1], seconds=0))
    served.add(request("slow", {"regex": "a{9}"}))
    served.add(request("plain", None))
    said = run(served)
    gate.set()
    assert "not compiled in time" in (said["slow"][-1].error or "")
    assert said["plain"][-1].finish_reason == "length"


def test_no_exit_waits_for_a_grammar_that_never_compiles() -> None:
    code = (
        "import threading; from quintet import StructuredOutputsParams\n"
        "from quintet.structured_output.grammar import GrammarCompiler\n"
        "grammars = GrammarCompiler(threading.Event().wait, 9, [1], seconds=0.01)\n"
        "try: grammars.compile_and_wait(StructuredOutputsParams(regex='a'))\n"
        "except ValueError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert "not compiled in time" in done.stdout


def test_an_aborted_request_may_leave_before_its_grammar_comes() -> None:
    gate = threading.Event()
    served = engine(GrammarCompiler(reader(gate), SIZE, [1]))
    served.add(request("gone", {"regex": "("}))
    served.abort(["gone"])
    gate.set()
    served.add(request("next", {"regex": "a{9}"}))
    assert set(run(served)) == {"next"}


def test_a_token_outside_the_grammar_ends_its_request_alone() -> None:
    """Only a logits processor can bring one: it may raise what the grammar has forbidden."""
    served = client(logits_processors=[Meddler])
    wrong = params(regex="a{9}", extra_args={"token": 7})
    failed, beside = ask(served, wrong, params(regex="a{9}"))
    assert failed.outputs[0].finish_reason == "error" and "doesn't satisfy" in (failed.outputs[0].error or "")
    assert texts([beside]) == ["aaaaaaaaa"]


def test_a_grammar_that_outgrows_its_limits_ends_its_request_alone(shared: EngineClient) -> None:
    failed, beside = ask(shared, params(regex="[b-z]{80}(a?){500}a{500}"), params(regex="a{9}"))
    assert failed.outputs[0].finish_reason == "error" and "too many" in (failed.outputs[0].error or "")
    assert texts([beside]) == ["aaaaaaaaa"]


def test_what_is_compiled_is_remembered() -> None:
    grammars = GrammarCompiler(reader(), SIZE, [1])
    one, other = (grammars.matcher(text(json=PERSON)) for _ in range(2))
    assert one.wait() == "" and one.future is other.future
    assert grammars.matcher(text(json={**PERSON, "title": "x"})).future is not one.future


def test_bits_after_drafts_are_those_after_the_same_tokens() -> None:
    tokenizer = load_tokenizer(folder())
    a, b = tokenizer.token_id("a"), tokenizer.token_id("b")
    assert a is not None and b is not None
    grammars, asked = GrammarCompiler(reader(), SIZE, [1]), Request(request("x", {"regex": "ab[0-9]c"}))
    matcher = grammars.matcher(text(regex="ab[0-9]c"))
    assert matcher.wait() == "" and matcher.advance(asked) == ""
    start, drafted, after, wrong, again = np.zeros((5, -(-SIZE // 32)), np.int32)
    fill(matcher, start)
    matcher.fill(drafted, [a, b])
    matcher.fill(wrong, [a, a])
    assert (wrong == -1).all()
    asked.append_sampled(a), asked.append_sampled(b)
    assert matcher.advance(asked) == ""
    fill(matcher, after)
    assert (drafted == after).all() and not (start == after).all()
    assert {tokenizer.token_text(i) for i in _ids(after)} == set("0123456789")
    asked.num_known -= 2  # they are taken back
    assert matcher.advance(asked) == ""
    fill(matcher, after)
    asked.num_known += 2  # and come again, when nobody knows what it was told
    matcher.reset()
    assert matcher.advance(asked) == ""
    fill(matcher, again)
    assert (drafted == again).all()
    assert (start == after).all() and {tokenizer.token_text(i) for i in _ids(start)} >= {"a"}


def fill(matcher: Matcher, words: np.ndarray[Any, Any]) -> None:
    if matcher.fill(words) is not None:
        MaskFiller()([(matcher, 0)], words[None])


def _ids(words: np.ndarray[Any, Any]) -> list[int]:
    return np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")).tolist()  # type: ignore[no-any-return]


class Meddler(RequestLogitsProcessor):
    """Makes a request say one token, whatever else was forbidden."""

    def for_request(self, params: SamplingParams) -> RowFunction | None:
        token = (params.extra_args or {}).get("token")
        if token is None:
            return None
        return lambda prompt, output, logits: torch.where(torch.arange(len(logits)) == token, 0.0, -torch.inf)


def test_guessed_tokens_are_held_to_the_grammar_that_they_stand_in() -> None:
    """Rows after drafts have masks of their own; where a draft is refused, nothing after it is looked at."""
    shapes = [{"regex": "(ab){4,9}c"}, {"json": PERSON}, {"regex": "[a-c]{20}"}]
    said, guess = [], {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1, "prompt_lookup_max": 2}
    for given in (None, guess):
        served = client(speculative_config=given)
        outputs = ask(served, *(params(seed=seed, **shape) for shape in shapes for seed in range(3)))
        said.append([(list(o.outputs[0].token_ids), o.outputs[0].finish_reason, o.outputs[0].text) for o in outputs])
    assert said[0] == said[1]
    stats = served.engine.stats()
    assert 0 < stats.spec_decode.num_accepted_tokens < stats.spec_decode.num_draft_tokens


LETTER = {
    "type": "object",
    "properties": {"greeting": {"const": "Dear reader, "}, "size": {"enum": [1, 20]}, "by": {"const": 1}},
    "required": ["greeting", "size", "by"],
    "additionalProperties": False,
}  # fmt: skip


def told(served: EngineClient, *wanted: SamplingParams) -> list[tuple[Any, ...]]:
    outputs = [output.outputs[0] for output in ask(served, *wanted)]
    return [(list(o.token_ids), o.text, o.finish_reason, o.stop_reason) for o in outputs]


def test_what_a_grammar_alone_decides_takes_no_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """And is what the model would have drawn: the same tokens, however many of them come at once."""
    shapes: list[dict[str, Any]] = [{"json": LETTER}, {"choice": ["naïve 👋\n", "yes, but"]}, {"regex": "(ab){9}[0-9]"}]
    wanted = [params(seed=seed, max_tokens=150, **shape) for shape in shapes for seed in range(4)]
    wanted += [params(json=LETTER, max_tokens=9), params(json=LETTER, stop=["der"]), params(json=PERSON, n=2)]
    wanted += [params(json=LETTER, max_tokens=90, repetition_penalty=1.5, presence_penalty=1.0, min_tokens=50)]
    said, steps = [], []
    for most in (0, 3, 256):
        monkeypatch.setattr("quintet.engine.step_output.MAX_JUMP", most)
        served = client(enable_prefix_caching=False)
        said.append(told(served, *wanted))
        stats = served.engine.stats()
        steps.append(stats.steps.num_steps)
        assert bool(stats.steps.num_jumped) == bool(most)
        assert stats.steps.num_generation_tokens >= sum(len(ids) for ids, *_ in said[-1])
    assert said[0] == said[1] == said[2]
    assert steps[2] < steps[1] < steps[0]
    (alone,) = told(served, params(regex="(ab){9}[0-9](cd){9}", max_tokens=150))
    assert len(alone[0]) > 30 and served.engine.stats().steps.num_steps - steps[2] <= 3


def test_where_each_token_is_looked_at_each_is_drawn(shared: EngineClient) -> None:
    """Log-probabilities are the model's; bad words and allowed tokens may forbid what the grammar wants."""
    before = shared.engine.stats().steps.num_jumped
    free, drawn = told(shared, params(json=LETTER, seed=1), params(json=LETTER, seed=1, logprobs=1))
    assert free == drawn
    (output,) = ask(shared, params(json=LETTER, seed=1, logprobs=1))
    assert len(output.outputs[0].logprobs or ()) == len(output.outputs[0].token_ids)
    after = shared.engine.stats().steps.num_jumped
    assert after > before
    allowed = [token_id for token_id in range(SIZE) if token_id != free[0][2]]
    (stuck,) = ask(shared, params(json=LETTER, seed=1, allowed_token_ids=allowed))
    assert "no token is left to draw" in (stuck.outputs[0].error or "")
    assert shared.engine.stats().steps.num_jumped == after


def test_a_step_behind_another_lands_before_a_jump() -> None:
    """What is said is the same; a step that draws what is decided anyway is the last that is started ahead."""
    said, steps = [], []
    for jump in (False, True):
        work = Work()
        prepared = prepare(config(max_num_seqs=5), behind(work, overlap=True, static_shapes=False))
        work.take(prepared.ranks.workers[0].ops)
        served = launch(prepared, progress=False, grammars=GrammarCompiler(reader(), SIZE, [1]))
        work.begin()
        served._answers._can_jump = jump
        for index, shape in enumerate([{"json": LETTER}, {"json": LETTER}, None, {"regex": "(ab){9}[0-9]"}]):
            served.add(request(f"{index}", shape, temperature=1.5, most=60 if shape else 5))
        found = run(served)
        assert all(deltas[-1].error is None for deltas in found.values()), found
        said.append({name: [i for delta in deltas for i in delta.token_ids] for name, deltas in found.items()})
        steps.append(served.stats().steps.num_steps)
    assert said[0] == said[1] and steps[1] < steps[0]


def test_user_code_that_edits_logits_sees_every_token() -> None:
    served = client(logits_processors=[Meddler])
    told(served, params(json=LETTER))
    assert served.engine.stats().steps.num_jumped == 0


def test_beams_are_held_to_a_shape_too() -> None:
    """They end where it is whole, and are the likeliest of all that it allows."""
    prompt, choice = [5, 6, 7], ["abc", "ab", "b", "yes", "no"]
    settings: dict[str, Any] = {"model": str(folder()), "device": "null", "load_format": "dummy", "use_tqdm": False}
    sizes: dict[str, Any] = {"max_model_len": 64, "num_pages": 400, "max_logprobs": 200}
    engine = LLM(**settings, **sizes, logprobs_mode="processed_logprobs")
    search = BeamSearchParams(beam_width=100, max_tokens=12, structured_outputs={"choice": choice}, length_penalty=0.0)
    found = engine.beam_search([{"prompt_token_ids": prompt}], search)[0].sequences
    tokenizer = load_tokenizer(folder())
    said = [tokenizer.decode([i for i in each.tokens[len(prompt) :] if i != 1]) for each in found]
    assert set(said) == set(choice) and {each.finish_reason for each in found} == {"stop"}
    assert sum(np.exp(each.cum_logprob) for each in found) == pytest.approx(1, abs=1e-3)  # nothing else can be said
    assert [each.cum_logprob for each in found] == sorted((each.cum_logprob for each in found), reverse=True)
    short = engine.beam_search([{"prompt_token_ids": prompt}], replace(search, max_tokens=1, beam_width=2))
    assert {each.finish_reason for each in short[0].sequences} <= {"stop", "length"}
    with pytest.raises(ParameterError, match="structured_outputs change no score with logprobs_mode='raw_logprobs'"):
        LLM(**settings, **sizes).beam_search([{"prompt_token_ids": prompt}], search)


def test_a_beam_that_must_say_nothing_says_nothing() -> None:
    engine = LLM(str(folder()), device="null", load_format="dummy", logprobs_mode="processed_logprobs")
    search = BeamSearchParams(beam_width=2, max_tokens=5, structured_outputs=StructuredOutputsParams(regex=""))
    (found,) = engine.beam_search([{"prompt_token_ids": [5, 6]}], search)[0].sequences
    assert (found.tokens, found.finish_reason) == ([5, 6], "stop")
