"""Budgets of thought: counted by tokens, kept whatever else is asked for or happens."""

import functools
from typing import Any

import pytest

from quintet import SamplingParams
from quintet.chat.prompts import Prompt
from quintet.chat.reasoning_tokens import (
    NOT_REASONING,
    ReasoningCounter,
    ReasoningMarkerIds,
    find_reasoning_markers,
    open_reasoning_tokens,
    reasoning_marker_ids,
)
from quintet.config import EngineConfig, ReasoningConfig
from quintet.engine.client import EngineClient
from quintet.engine.request import CoreRequest
from quintet.engine.startup import launch, prepare
from quintet.outputs import RequestOutput
from quintet.parsers import REASONING_PARSERS
from quintet.sampling_params import ParameterError
from quintet.tokenizers.tokenizer import Tokenizer
from tests.helpers.platforms.behind import Work, behind
from tests.helpers.platforms.null_engine import drain
from tests.server.fakes import bundled_tokenizer

THINK = REASONING_PARSERS.get("think")
OPEN, CLOSE, END = 8, 9, 1  # of the bundled tokenizer: <think>, </think> and the end of a text
BEGUN = [5, 60, 70, OPEN]  # a prompt whose last token begins a thought
MARKS = ReasoningMarkerIds(((OPEN,),), ((CLOSE,),), (CLOSE,))


def config(**settings: Any) -> EngineConfig:
    """The bundled model's tokenizer before a model without weights: it says anything."""
    settings = {"max_model_len": 256, "num_pages": 80, **settings}
    return EngineConfig.from_kwargs(model="bundled", device="null", load_format="dummy", **settings)


def bundled(**settings: Any) -> EngineClient:
    return EngineClient(config(**settings), progress=False)


@functools.cache
def tokenizer() -> Tokenizer:
    return bundled_tokenizer()


def params(budget: int | None, **given: Any) -> SamplingParams:
    """Nothing but the budget ends a thought: that token is too unlikely."""
    fixed = {"temperature": 1.0, "max_tokens": 40, "ignore_eos": True, "logit_bias": {CLOSE: -100, OPEN: -100}}
    return SamplingParams(**{**fixed, "thinking_token_budget": budget, **given})


def run(client: EngineClient, *wanted: SamplingParams, prompt: list[int] = BEGUN) -> list[RequestOutput]:
    for index, each in enumerate(wanted):
        client.add(str(index), Prompt(prompt), each)
    outputs = drain(client)
    return [outputs[str(index)] for index in range(len(wanted))]


def said(output: RequestOutput) -> list[list[int]]:
    return [list(each.token_ids) for each in output.outputs]


@pytest.mark.parametrize("budget", [0, 1, 7, 39])
def test_a_thought_ends_when_its_budget_is_used_up(budget: int) -> None:
    [output] = run(bundled(), params(budget, seed=3))
    [ids] = said(output)
    assert ids.index(CLOSE) == budget and ids.count(CLOSE) == 1 and len(ids) == 40


@pytest.mark.parametrize("budget", [None, -1, 100])
def test_without_a_bound_or_below_it_nothing_changes(budget: int | None) -> None:
    client = bundled()
    free, bounded = (run(client, params(each, seed=3))[0] for each in (None, budget))
    assert said(free) == said(bounded) and CLOSE not in said(free)[0]


def test_what_comes_before_the_bound_is_what_would_have_come() -> None:
    client = bundled()
    free, bounded = (said(run(client, params(each, seed=3))[0])[0] for each in (None, 12))
    assert free[:12] == bounded[:12]


def test_a_thought_that_the_model_begins_is_counted_from_there() -> None:
    client = bundled()
    bias = {"logit_bias": {OPEN: 100, CLOSE: -100}}
    [ids] = said(run(client, params(5, seed=1, **bias), prompt=[5, 60, 70])[0])
    assert ids[0] == OPEN and ids[6] == CLOSE
    assert ids[7:9] == [OPEN, CLOSE]  # another one finds the budget used up


def test_thoughts_of_the_prompt_count() -> None:
    [ids] = said(run(bundled(), params(5, seed=3), prompt=[*BEGUN, 40, 41, 42])[0])
    assert ids.index(CLOSE) == 2


def test_batched_equals_alone() -> None:
    client, budgets = bundled(), [None, 0, 3, 11, None, 30]
    wanted = [params(budget, seed=index) for index, budget in enumerate(budgets)]
    alone = [said(run(client, each)[0]) for each in wanted]
    assert [said(each) for each in run(client, *wanted)] == alone


def test_every_completion_has_its_budget() -> None:
    [output] = run(bundled(), params(4, seed=3, n=3))
    assert len({tuple(ids) for ids in said(output)}) == 3
    assert [ids.index(CLOSE) for ids in said(output)] == [4, 4, 4]


def test_preemption_changes_nothing() -> None:
    wanted = [params(9 + index, seed=index, max_tokens=60) for index in range(6)]
    roomy = [said(each) for each in run(bundled(), *wanted)]
    tight = bundled(num_pages=18, page_size=16, max_num_seqs=6)
    assert [said(each) for each in run(tight, *wanted)] == roomy
    assert tight.engine.stats().scheduler.num_preemptions


def test_drafts_change_nothing() -> None:
    """Of a text that goes round in circles, so that guesses are right, and the bound comes within one."""
    around = [5, OPEN, *[60, 61, 62, 63] * 8]
    loop = {"allowed_token_ids": [60, 61, CLOSE], "temperature": 0, "logit_bias": {60: 50, CLOSE: -100}}
    alone, drafted = bundled(), bundled(speculative_config={"method": "ngram", "num_speculative_tokens": 5})
    for budget in range(33, 44):
        wanted = params(budget, **loop)
        plain = said(run(alone, wanted, prompt=around)[0])
        assert said(run(drafted, wanted, prompt=around)[0]) == plain
        assert plain[0].index(CLOSE) == budget - 32
    assert drafted.engine.stats().spec_decode.num_accepted_tokens


@pytest.mark.parametrize("static", [False, True])
def test_on_a_device_behind_the_host_the_draw_waits_for_what_was_said(static: bool) -> None:
    found = []
    for overlap in (False, True):
        work = Work()
        facts: dict[str, Any] = {"overlap": overlap, "static_shapes": static}
        prepared = prepare(config(num_pages=40, max_num_seqs=5), behind(work, **facts))
        work.take(prepared.ranks.workers[0].ops)
        engine = launch(prepared, progress=False)
        work.begin()
        for index, budget in enumerate([3, None, 0, 7, None, 12]):
            marks = None if budget is None else MARKS
            asked = params(budget, max_tokens=20)
            engine.add(
                CoreRequest(
                    str(index), BEGUN, asked, (1, index), 20, reasoning_marker_ids=marks, open_reasoning_tokens=0
                )
            )
        said: dict[str, list[int]] = {}
        while engine.busy:
            for delta in engine.step():
                assert delta.error is None
                said.setdefault(delta.request_id, []).extend(delta.token_ids)
            engine.check_integrity()
        first = {what: work.log.index((what, step)) for what, step in [("launch", 2), ("wait", 1)]}
        assert (first["launch"] < first["wait"]) == overlap
        found.append(said)
    assert found[0] == found[1]
    ends = {name: ids.index(CLOSE) if CLOSE in ids else None for name, ids in found[0].items()}
    assert ends == {"0": 3, "1": None, "2": 0, "3": 7, "4": None, "5": 12}


@pytest.mark.parametrize("budget", [0, 6])
def test_an_answer_keeps_its_shape_behind_a_thought_that_was_cut(budget: int) -> None:
    pytest.importorskip("llguidance", reason="structured_outputs are an extra: pip install 'quintet-llm[structured]'")
    shape = {"grammar": f"start: <[{OPEN}]> /(?s:.*)/ <[{CLOSE}]> /[ab]{{3}}/"}
    client = bundled()
    for seed in range(20):
        wanted = params(budget, structured_outputs=shape, seed=seed, temperature=1.5, ignore_eos=False)
        [ids] = said(run(client, wanted, prompt=[5, 60])[0])
        at = ids.index(CLOSE)
        assert budget + 1 <= at <= budget + 5  # a character may have to be finished
        assert set(client.input_processor.tokenizer.decode(ids[at + 1 :])) <= {"a", "b"}  # type: ignore[union-attr]


def test_words_may_be_said_before_the_end_that_is_forced() -> None:
    end = "Time is up.</think>"
    client = bundled(reasoning_config={"reasoning_end_str": end + "\n\n"})
    [ids] = said(run(client, params(4, seed=3))[0])
    words = tokenizer().encode(end, add_special_tokens=False)
    assert ids[4 : 4 + len(words)] == words and CLOSE not in ids[4 + len(words) :]


def test_a_bound_that_cannot_be_kept_is_refused() -> None:
    with pytest.raises(ParameterError, match="whole number"):
        SamplingParams(thinking_token_budget=1.5)
    with pytest.raises(ParameterError, match="from -1"):
        SamplingParams(thinking_token_budget=-2)
    with pytest.raises(ParameterError, match="bad_words exclude"):
        run(bundled(), params(3, allowed_token_ids=[60, 61]))
    with pytest.raises(ParameterError, match="bad_words exclude"):
        run(bundled(), params(3, bad_words=["</think>"]))
    with pytest.raises(ParameterError, match="name a reasoning parser"):
        run(bundled(structured_outputs_config={"reasoning_parser": "none"}), params(3))
    with pytest.raises(ParameterError, match="as text and not as tokens"):
        run(bundled(structured_outputs_config={"reasoning_parser": "granite"}), params(3))


# ------------------------------------------------------------------------------------------------------- counting


def test_markers_are_not_counted() -> None:
    walk = ReasoningCounter(MARKS).advance([50, OPEN, 51, 52, 53, CLOSE, 54, OPEN, 55, CLOSE, 56])
    assert walk.num_tokens == 4 and not walk.inside
    assert ReasoningCounter(MARKS, 3).advance([50, 51]).num_tokens == 2  # those of the prompt are not the answer's


def test_markers_may_have_several_tokens() -> None:
    marks = ReasoningMarkerIds(((20, 21, 22),), ((23,), (20, 24)), (23,))
    walk = ReasoningCounter(marks).advance([20, 21, 22, 50, 51, 20, 24, 52])
    assert walk.num_tokens == 2 and not walk.inside
    assert ReasoningCounter(marks).advance([20, 21, 50]).num_tokens == 0


def test_looking_ahead_leaves_all_as_it_is() -> None:
    walk = ReasoningCounter(MARKS).advance([OPEN, 50])
    assert walk.after([51, CLOSE]).forced_token(0) is None and walk.after([51]).forced_token(2) == CLOSE
    assert walk.forced_token(2) is None and walk.num_tokens == 1


def test_a_marker_that_a_message_speaks_of_begins_no_thought() -> None:
    def begun(text: str) -> int:
        return open_reasoning_tokens(tokenizer(), THINK, MARKS, tokenizer().encode(text, add_special_tokens=False))

    assert begun("<|user|>What is <think>?<|end|><|assistant|>") == NOT_REASONING
    assert begun("<|user|>Hm.<|end|><|assistant|><think>") == 0
    assert begun("<|user|>Hm.<|end|><|assistant|><think>\n") == 1
    assert begun("<|assistant|><think></think>") == NOT_REASONING
    assert begun("<|assistant|><think>So.</think>Well, ") == begun("") == begun("Hm.") == NOT_REASONING
    assert begun("<think>So it") == len(tokenizer().encode("So it", add_special_tokens=False))


def test_the_markers_of_a_prompt_may_have_several_tokens() -> None:
    assert (
        open_reasoning_tokens(
            tokenizer(), THINK, ReasoningMarkerIds(((6, 20, 5),), ((CLOSE,),), (CLOSE,)), [6, 20, 5, 50, 51]
        )
        == 2
    )
    assert (
        open_reasoning_tokens(
            tokenizer(), THINK, ReasoningMarkerIds(((6, 20, 5),), ((CLOSE,),), (CLOSE,)), [20, 5, 50, 51]
        )
        == NOT_REASONING
    )


def test_markers_in_text_are_not_guessed() -> None:
    assert reasoning_marker_ids(tokenizer(), REASONING_PARSERS.get("granite")) is None
    assert isinstance(find_reasoning_markers(tokenizer(), REASONING_PARSERS.get("granite")), str)
    assert isinstance(find_reasoning_markers(None, THINK), str) and isinstance(
        find_reasoning_markers(tokenizer(), None), str
    )
    found = find_reasoning_markers(tokenizer(), THINK, ReasoningConfig(reasoning_start_str="<tool_call>"))
    assert not isinstance(found, str) and found.marks.opens == ((10,),)
