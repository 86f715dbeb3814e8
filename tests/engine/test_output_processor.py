"""Token deltas become the outputs that users read."""

import msgspec
import numpy as np
import pytest

from quintet.chat.prompts import Prompt
from quintet.engine.output_processor import OutputProcessor
from quintet.engine.request import FinishReason
from quintet.lora.request import LoRAReference, LoRARequest
from quintet.media import encoder_text
from quintet.media.items import MediaItem, WireArray
from quintet.outputs import TokenDelta, TokenLogprobs, child_ids
from quintet.sampling_params import RequestOutputKind, SamplingParams
from tests.helpers.checkpoints import tokenizers as builders

CUMULATIVE, DELTA, FINAL_ONLY = RequestOutputKind
TEXT = "the quick brown fox jumps"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return builders.byte_level(tmp_path_factory.mktemp("output"))


@pytest.fixture
def ids(tokenizer):
    return tokenizer.encode(TEXT, add_special_tokens=False)


@pytest.fixture
def processor(tokenizer):
    return OutputProcessor(tokenizer)


def run(processor, request_id, ids, reason=FinishReason.LENGTH, **last):
    """One token per delta; the last one says the reason. Returns the outputs of each and the aborts of all."""
    outputs, aborts = [], []
    for place, token_id in enumerate(ids, 1):
        ended = {"finish_reason": reason, **last} if place == len(ids) else {}
        processed = processor.process([TokenDelta(request_id, [token_id], **ended)])
        outputs += processed.outputs
        aborts += processed.aborts
    return outputs, aborts


def test_cumulative_outputs_grow(processor, ids):
    assert processor.add("a", SamplingParams(output_kind=CUMULATIVE), [1, 2], Prompt([1, 2], "prompt")) == ["a"]
    outputs, aborts = run(processor, "a", ids)
    assert [each.outputs[0].token_ids for each in outputs] == [ids[: n + 1] for n in range(len(ids))]
    assert [TEXT.startswith(each.outputs[0].text) for each in outputs] == [True] * len(ids)
    last = outputs[-1]
    assert (last.outputs[0].text, last.finished, last.outputs[0].finish_reason) == (TEXT, True, "length")
    assert (last.request_id, last.prompt, last.prompt_token_ids) == ("a", "prompt", [1, 2])
    assert [each.finished for each in outputs[:-1]] == [False] * (len(ids) - 1)
    assert outputs[0].outputs[0].token_ids == ids[:1]  # what was given out stays as it was
    assert not aborts
    assert len(processor) == 0


def test_deltas_joined_are_the_whole(processor, ids):
    processor.add("a", SamplingParams(output_kind=DELTA, logprobs=0), [1])
    deltas = [TokenDelta("a", [each], logprobs=[TokenLogprobs([each], [-0.5], 1)]) for each in ids]
    deltas[-1].finish_reason = FinishReason.LENGTH
    outputs = [output for delta in deltas for output in processor.process([delta]).outputs]
    completions = [each.outputs[0] for each in outputs]
    assert "".join(each.text for each in completions) == TEXT
    assert sum((each.token_ids for each in completions), []) == ids
    assert [list(at)[0] for each in completions for at in each.logprobs] == ids
    assert completions[-1].cumulative_logprob == -0.5 * len(ids)


@pytest.mark.parametrize("kind", [DELTA, CUMULATIVE])
def test_a_stream_may_come_several_tokens_at_a_time(tokenizer, ids, kind):
    """The first at once, the rest so many tokens apart, and what is left when it ends."""
    processor = OutputProcessor(tokenizer, interval=3)
    ids = (ids * 3)[:9]
    processor.add("a", SamplingParams(output_kind=kind), [1])
    outputs, _ = run(processor, "a", ids)
    lengths = [len(each.outputs[0].token_ids) for each in outputs]
    assert lengths == ([1, 3, 3, 2] if kind is DELTA else [1, 4, 7, 9])
    assert (
        "".join(each.outputs[0].text for each in outputs) if kind is DELTA else outputs[-1].outputs[0].text
    ) == tokenizer.decode(ids)


def test_a_completion_that_ends_is_told_at_once(tokenizer, ids):
    processor = OutputProcessor(tokenizer, interval=100)
    first, second = processor.add("a", SamplingParams(output_kind=DELTA, n=2), [1])
    processor.process([TokenDelta(first, ids[:1]), TokenDelta(second, ids[:1])])
    assert not processor.process([TokenDelta(first, ids[1:2]), TokenDelta(second, ids[1:2])]).outputs
    (output,) = processor.process([TokenDelta(first, ids[2:3], FinishReason.LENGTH)]).outputs
    assert {each.index: each.token_ids for each in output.outputs} == {0: ids[1:3], 1: ids[1:2]}


def test_several_deltas_of_one_request_make_one_output(processor, ids):
    processor.add("a", SamplingParams(output_kind=DELTA), [1])
    deltas = [TokenDelta("a", ids[:2]), TokenDelta("a", []), TokenDelta("a", ids[2:], FinishReason.LENGTH)]
    (output,) = processor.process(deltas).outputs
    assert (output.outputs[0].token_ids, output.outputs[0].text) == (ids, TEXT)


def test_final_only_speaks_once(processor, ids):
    processor.add("a", SamplingParams(output_kind=FINAL_ONLY), [1])
    outputs, _ = run(processor, "a", ids)
    assert [(each.finished, each.outputs[0].text) for each in outputs] == [(True, TEXT)]


@pytest.mark.parametrize("kind", [CUMULATIVE, DELTA, FINAL_ONLY])
def test_n_completions_come_together(processor, ids, kind):
    children = processor.add("a", SamplingParams(n=3, output_kind=kind), [1])
    assert children == child_ids("a", 3) == ["a#0", "a#1", "a#2"]
    seen = []
    for place, child in enumerate((children[2], children[0], children[1])):
        seen += processor.process([TokenDelta(child, ids[: place + 1])]).outputs
        seen += processor.process([TokenDelta(child, [], FinishReason.STOP)]).outputs
    last = seen[-1]
    assert [each.finished for each in seen] == [False] * (len(seen) - 1) + [True]
    if kind is DELTA:
        assert [[each.index for each in output.outputs] for output in seen] == [[2], [2], [0], [0], [1], [1]]
    else:
        assert [each.index for each in last.outputs] == [0, 1, 2]
        assert [each.token_ids for each in last.outputs] == [ids[:2], ids[:3], ids[:1]]
    assert len(seen) == (1 if kind is FINAL_ONLY else 6)
    assert last.metrics.num_generation_tokens == 6


def test_a_stop_string_ends_the_request_and_aborts_it(processor, ids, tokenizer):
    stop = "brown"
    processor.add("a", SamplingParams(stop=stop), [1])
    outputs, aborts = run(processor, "a", ids)
    done = outputs[-1].outputs[0]
    assert aborts == ["a"]
    assert (done.text, done.finish_reason, done.stop_reason) == (TEXT.split(stop)[0], "stop", stop)
    assert tokenizer.decode(done.token_ids).rstrip("x fo").endswith(stop)  # the tokens that made it stay
    assert len(done.token_ids) < len(ids)
    assert processor.process([TokenDelta("a", [5], FinishReason.ABORT)]) == ([], [])  # the core's late answer


def test_tokens_after_a_stop_string_are_dropped_with_their_logprobs(processor, ids):
    processor.add("a", SamplingParams(stop="qu", logprobs=0), [1])
    logprobs = [TokenLogprobs([each], [-1.0], 1) for each in ids]
    processed = processor.process([TokenDelta("a", ids, FinishReason.LENGTH, logprobs=logprobs)])
    done = processed.outputs[0].outputs[0]
    assert processed.aborts == []  # the core had ended it already
    assert (done.finish_reason, done.stop_reason, done.text) == ("stop", "qu", "the ")
    assert len(done.logprobs) == len(done.token_ids) < len(ids)
    assert done.cumulative_logprob == -len(done.token_ids)


def test_a_stop_string_may_stay_in_the_text(processor, ids):
    processor.add("a", SamplingParams(stop="qu", include_stop_str_in_output=True), [1])
    assert processor.process([TokenDelta("a", ids)]).outputs[0].outputs[0].text == "the qu"


def test_min_tokens_lets_a_stop_string_pass(processor, ids):
    processor.add("a", SamplingParams(stop="the", min_tokens=2, max_tokens=50), [1])
    outputs, aborts = run(processor, "a", ids)
    assert not aborts
    assert outputs[-1].outputs[0].text == TEXT


def test_a_stop_token_is_kept_as_token_and_not_as_text(processor, tokenizer, ids):
    eos = tokenizer.eos_ids[0]
    fox = tokenizer.encode(" fox", add_special_tokens=False)
    table = [
        (SamplingParams(), [*ids, eos], None, TEXT),
        (SamplingParams(skip_special_tokens=False), [*ids, eos], None, TEXT),
        (SamplingParams(skip_special_tokens=False, include_stop_str_in_output=True), [*ids, eos], None, TEXT + "</s>"),
        (SamplingParams(stop_token_ids=fox[-1:]), [*ids, *fox], fox[-1], TEXT + tokenizer.decode(fox[:-1])),
    ]
    for place, (params, given, stop_reason, text) in enumerate(table):
        processor.add(str(place), params, [1])
        outputs, _ = run(processor, str(place), given, FinishReason.STOP, stop_reason=stop_reason)
        done = outputs[-1].outputs[0]
        assert (done.text, done.token_ids, done.stop_reason, done.finish_reason) == (text, given, stop_reason, "stop")


def test_without_detokenization_there_is_no_text(processor, ids):
    processor.add("a", SamplingParams(detokenize=False, logprobs=1), [1])
    logprobs = [TokenLogprobs([ids[0], 7], [-1.0, -0.5], 2)]
    (output,) = processor.process([TokenDelta("a", ids[:1], FinishReason.LENGTH, logprobs=logprobs)]).outputs
    assert (output.outputs[0].text, output.outputs[0].token_ids) == ("", ids[:1])
    assert [each.decoded_token for each in output.outputs[0].logprobs[0].values()] == [None, None]
    bare = OutputProcessor(None)
    with pytest.raises(ValueError, match="no tokenizer"):
        bare.add("a", SamplingParams(), [1])
    bare.add("a", SamplingParams(detokenize=False), [1])


def test_logprobs_hold_the_sampled_token_and_the_likeliest(processor, tokenizer, ids):
    processor.add("a", SamplingParams(logprobs=2, prompt_logprobs=1), ids[:3])
    likely = [TokenLogprobs([ids[0], 9, 8], [-3.0, -0.1, -2.0], 5), TokenLogprobs([9, 9, 8], [-0.1, -0.1, -2.0], 1)]
    prompt = [TokenLogprobs([ids[1], 9], [-1.0, -0.5], 2)], [TokenLogprobs([ids[2], ids[2]], [-0.2, -0.2], 1)]
    assert processor.process([TokenDelta("a", [], prompt_logprobs=prompt[0])]) == ([], [])
    deltas = [
        TokenDelta("a", [ids[0]], logprobs=likely[:1], prompt_logprobs=prompt[1]),
        TokenDelta("a", [9], FinishReason.LENGTH, logprobs=likely[1:]),
    ]
    (output,) = processor.process(deltas).outputs
    first, second = output.outputs[0].logprobs
    assert {each: (at.logprob, at.rank) for each, at in first.items()} == {ids[0]: (-3.0, 5), 9: (-0.1, 1), 8: (-2, 2)}
    assert {each: (at.logprob, at.rank) for each, at in second.items()} == {9: (-0.1, 1), 8: (-2.0, 2)}
    assert list(first) == [ids[0], 9, 8]
    assert first[ids[0]].decoded_token == tokenizer.token_text(ids[0])
    assert output.outputs[0].cumulative_logprob == pytest.approx(-3.1)
    assert output.prompt_logprobs[0] is None
    assert [list(at) for at in output.prompt_logprobs[1:]] == [[ids[1], 9], [ids[2]]]
    assert len(output.prompt_logprobs) == len(output.prompt_token_ids)


def test_logprobs_not_asked_for_are_none(processor, ids):
    processor.add("a", SamplingParams(), [1])
    (output,) = processor.process([TokenDelta("a", ids[:1], FinishReason.LENGTH)]).outputs
    assert output.prompt_logprobs is None
    assert (output.outputs[0].logprobs, output.outputs[0].cumulative_logprob) == (None, None)


def test_prompt_logprobs_come_once_with_deltas(processor, ids):
    processor.add("a", SamplingParams(prompt_logprobs=0, output_kind=DELTA), ids[:2])
    prompt = [TokenLogprobs([ids[1]], [-1.0], 2)]
    first = processor.process([TokenDelta("a", ids[:1], prompt_logprobs=prompt)]).outputs[0]
    second = processor.process([TokenDelta("a", ids[1:2])]).outputs[0]
    assert (len(first.prompt_logprobs), second.prompt_logprobs) == (2, None)


def test_an_aborted_request_says_so_once(processor, ids):
    processor.add("a", SamplingParams(n=2, output_kind=FINAL_ONLY), [1])
    processor.process([TokenDelta("a#0", ids, FinishReason.LENGTH), TokenDelta("a#1", ids[:2])])
    processed = processor.abort(["a", "unknown"])
    assert processed.aborts == ["a#1"]
    assert [each.finish_reason for each in processed.outputs[0].outputs] == ["length", "abort"]
    assert processed.outputs[0].finished
    assert processor.abort("a") == ([], [])
    assert processor.process([TokenDelta("a#1", [1], FinishReason.ABORT)]) == ([], [])
    assert len(processor) == 0


def test_what_was_held_back_is_given_when_a_request_is_aborted(processor, tokenizer):
    processor.add("a", SamplingParams(stop="foxes"), [1])
    processor.process([TokenDelta("a", tokenizer.encode("the fox", add_special_tokens=False))])
    assert processor.abort("a").outputs[0].outputs[0].text == "the fox"


def test_an_error_ends_its_own_request_alone(processor, ids):
    processor.add("a", SamplingParams(), [1])
    processor.add("b", SamplingParams(), [1])
    outputs = processor.process([TokenDelta("a", [], FinishReason.ERROR, error="boom"), TokenDelta("b", ids)]).outputs
    assert [(each.outputs[0].finish_reason, each.outputs[0].error) for each in outputs] == [
        ("error", "boom"),
        (None, None),
    ]
    failed = processor.fail("the engine is gone")
    assert [(each.request_id, each.outputs[0].error) for each in failed.outputs] == [("b", "the engine is gone")]
    assert failed.outputs[0].outputs[0].text == TEXT
    assert len(processor) == 0


def test_request_ids_are_unique_among_the_running(processor, ids):
    processor.add("a", SamplingParams(n=2), [1])
    for taken in ("a", "a#1"):
        with pytest.raises(ValueError, match=f"request id '{taken}' is in use"):
            processor.add(taken, SamplingParams(), [1])
    processor.abort("a")
    processor.add("a", SamplingParams(), [1])


def test_metrics_count_and_time(processor, ids):
    processor.add("a", SamplingParams(), ids, arrival=5.0)
    (output,) = processor.process([TokenDelta("a", ids[:1], num_cached=3, num_preemptions=1)]).outputs
    outputs, _ = run(processor, "a", ids[1:])
    metrics = outputs[-1].metrics
    assert (output.num_cached_tokens, metrics.num_cached_tokens, metrics.num_preemptions) == (3, 3, 1)
    assert (metrics.num_prompt_tokens, metrics.num_generation_tokens) == (len(ids), len(ids))
    assert 5.0 < metrics.first_token_time <= metrics.last_token_time <= metrics.finished_time
    assert metrics.time_to_first_token <= metrics.latency


def test_preemptions_add_up_over_deltas_and_completions(processor, ids):
    first, second = processor.add("a", SamplingParams(n=2), ids)
    said = [(first, 1), (first, 3), (second, 1), (first, 3), (second, 2)]
    deltas = [TokenDelta(engine_id, ids[:1], num_preemptions=total) for engine_id, total in said]
    outputs = [processor.process([delta]).outputs[0] for delta in deltas]
    assert outputs[-1].metrics.num_preemptions == 3 + 2


def test_deltas_travel_as_messages(processor, ids):
    delta = TokenDelta("a", ids, FinishReason.STOP, 7, [TokenLogprobs([1], [float("-inf")], 1)], None, 2, 1, None)
    (back,) = msgspec.msgpack.decode(msgspec.msgpack.encode([delta]), type=list[TokenDelta])
    assert back == delta
    processor.add("a", SamplingParams(logprobs=0), [1])
    assert processor.process([back]).outputs[0].outputs[0].finish_reason == "stop"


def test_outputs_have_the_adapter_and_the_text_of_the_encoder() -> None:
    processor = OutputProcessor(None)
    text = MediaItem(encoder_text.TEXT, b"d" * 16, {encoder_text.TOKENS: WireArray.of(np.array([7, 8]))}, ((0, 2),))
    source = Prompt([1], lora=LoRAReference("mine", "/adapter", b"digest", 3), encoder=text)
    processor.add("a", SamplingParams(detokenize=False), [1], source)
    (output,) = processor.process([TokenDelta("a", [5], FinishReason.LENGTH)]).outputs
    assert output.lora_request == LoRARequest("mine", 3, "/adapter") == output.outputs[0].lora_request
    assert output.encoder_prompt_token_ids == [7, 8] and output.encoder_prompt is None
    processor.add("b", SamplingParams(detokenize=False), [1])
    (output,) = processor.process([TokenDelta("b", [5], FinishReason.LENGTH)]).outputs
    assert output.lora_request is None and output.encoder_prompt_token_ids is None
