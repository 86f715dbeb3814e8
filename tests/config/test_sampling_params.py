"""Sampling parameters: what is refused, in which words, and what is kept."""

import copy
import pickle
import subprocess
import sys

import msgspec
import numpy as np
import pytest

from quintet.sampling_params import (
    BeamSearchParams,
    ParameterError,
    RequestOutputKind,
    SamplingParams,
    StructuredOutputsParams,
)

NAN, INF = float("nan"), float("inf")
BAD = {
    "n": [0, -1, 129, True, 1.0, "1", None, 10**5000],
    "presence_penalty": [2.1, -2.1, NAN, INF, True, "0", None, 10**400],
    "frequency_penalty": [2.1, -2.1, NAN, -INF, False, [], None],
    "repetition_penalty": [0, -1, 0.001, 101, NAN, INF, True, "1.1", None],
    "temperature": [-0.1, NAN, INF, 1e5, True, "hot", None, 1j],
    "top_p": [0, -0.5, 1.01, NAN, INF, True, "0.9", None],
    "top_k": [-2, 1.5, True, "50", 2**31, None, 10**400],
    "min_p": [-0.1, 1.1, NAN, True, "0", None],
    "seed": [1.5, True, "7", 2**64, -(2**63) - 1, NAN],
    "stop": [[""], "", ["a", 1], 5, ["x" * 1025], ["x"] * 65, {"a": 1}, b"x"],
    "stop_token_ids": [[-1], [1.5], [True], 5, "12", list(range(1025)), [2**31]],
    "bad_words": [[""], ["a", None], 5, ["x" * 1025], ["x"] * 65],
    "ignore_eos": [1, 0, "true", None],
    "max_tokens": [0, -1, 1.5, True, "16", 2**31],
    "min_tokens": [-1, 1.5, True, "1", None, 17],
    "logprobs": [-2, True, 1.5, "5", [], 2**31],
    "prompt_logprobs": [-2, True, 1.5, "5"],
    "logprob_token_ids": [[], [-1], [True], [1.5], "5", 5, list(range(129)), [2**31]],
    "flat_logprobs": [1, None, "yes"],
    "prompt_logprob_token_ids": [[], [[]], [1], "5", 5, [[-2]], [[True]], [[1.5]], [[2**31]]],
    "prompt_logprob_start": [-1, True, 1.5, 3],
    "routed_experts_prompt_start": [-1, True, 1.5],
    "trace_decode_token_ids": [[], (), {1}, "5", 5, [-1], [True], [1.5], [2**31]],
    "detokenize": [1, None],
    "skip_special_tokens": ["no", 0],
    "keep_special_tokens": [[-1], 5, "12", list(range(1025))],
    "spaces_between_special_tokens": ["no", 0, None],
    "include_stop_str_in_output": [1, "yes"],
    "output_kind": ["DELTA", 1, None],
    "truncate_prompt_tokens": [0, -2, True, 1.5],
    "truncation_side": ["up", None, 1],
    "stream_interval": [0, -1, 1.5, "2"],
    "logit_bias": [{1: 101}, {1: NAN}, {-1: 1}, {"a": 1}, {True: 1}, [1], dict.fromkeys(range(1025), 0), {"1e3": 1}],
    "allowed_token_ids": [[], [-1], [True], "5", 5, {"a"}],
    "thinking_token_budget": [-2, 1.5, True, "9", 2**31],
    "structured_outputs": [
        {},
        {"json": {}, "regex": "a"},
        {"regx": "a"},
        {"structural_tag": 3},
        {"choice": []},
        {"choice": "yes"},
        {"json": 3},
        {"json_object": False},
        {"regex": "a", "disable_any_whitespace": 1},
        "a",
        [],
    ],
    "repetition_detection": [
        "x",
        [],
        3,
        {1: 2},
        {"max_pattern_size": 3},
        {"min_pattern_size": 2},
        {"max_pattern_size": 1025, "min_count": 2},
        {"max_pattern_size": -1},
        {"max_pattern_size": 2, "min_pattern_size": 3, "min_count": 2},
        {"min_counts": 2},
        {"max_pattern_size": True, "min_count": 2},
    ],
    "extra_args": [[], "x", {1: 2}, {str(i): 0 for i in range(65)}],
}


@pytest.mark.parametrize("name, index", [(name, i) for name, values in BAD.items() for i in range(len(values))])
def test_a_bad_value_is_refused_by_the_name_of_its_field(name, index):
    value = BAD[name][index]
    with pytest.raises(ParameterError) as caught:
        SamplingParams(**{name: value})
    assert caught.value.parameter == name
    assert str(caught.value).startswith(f"{name} ")
    assert len(str(caught.value)) < 300


def test_every_field_has_bad_values_in_the_table_and_words_for_help():
    fields = SamplingParams.__dataclass_fields__
    assert set(BAD) == set(fields)
    assert all(f.metadata["help"] for f in [*fields.values(), *BeamSearchParams.__dataclass_fields__.values()])


def test_the_shape_of_an_output_is_read_from_a_dict_and_survives_the_wire():
    params = SamplingParams(structured_outputs={"json": {"type": "object"}, "disable_any_whitespace": True})
    assert params.structured_outputs == StructuredOutputsParams(json={"type": "object"}, disable_any_whitespace=True)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams) == params
    params.structured_outputs = {"regex": "a"}
    params.check(10, 10)
    assert params.structured_outputs == StructuredOutputsParams(regex="a")


def test_what_a_shape_may_be_is_named():
    with pytest.raises(ValueError, match="did you mean 'regex'"):
        StructuredOutputsParams(regx="a")
    with pytest.raises(ValueError, match="json and regex are given"):
        StructuredOutputsParams(json={}, regex="a")


def test_a_value_whose_repr_fails_is_refused_in_words():
    class Hostile:
        def __repr__(self):
            raise RuntimeError("no")

    with pytest.raises(ParameterError, match="temperature must be a number"):
        SamplingParams(temperature=Hostile())


@pytest.mark.parametrize(
    "name, nearest", [("temprature", "temperature"), ("max_token", "max_tokens"), ("topk", "top_k")]
)
def test_an_unknown_keyword_is_refused_with_the_nearest(name, nearest):
    with pytest.raises((TypeError, ValueError), match=f"'{name}'.*'{nearest}'"):
        SamplingParams(**{name: 1})


def test_an_unknown_attribute_is_refused():
    with pytest.raises(AttributeError):
        SamplingParams().max_token = 5


def test_defaults_are_those_of_vllm():
    p = SamplingParams()
    assert (p.n, p.temperature, p.top_p, p.top_k, p.min_p, p.max_tokens, p.min_tokens) == (1, 1.0, 1.0, 0, 0.0, 16, 0)
    assert (p.stop, p.stop_token_ids, p.bad_words, p.logprobs, p.seed) == ([], [], [], None, None)
    assert p.output_kind is RequestOutputKind.CUMULATIVE and not p.greedy


def test_values_take_one_form():
    p = SamplingParams(
        temperature=np.float32(1), top_k=np.int64(5), stop="a", stop_token_ids=(1, 2), logit_bias={"7": 1}, seed=-1,
        allowed_token_ids={3, 1}, max_tokens=None,
    )  # fmt: skip
    assert type(p.temperature) is float and type(p.top_k) is int
    assert (p.stop, p.stop_token_ids, p.logit_bias, p.seed) == (["a"], [1, 2], {7: 1.0}, None)
    assert p.allowed_token_ids == [1, 3] and p.max_tokens is None


def test_a_tiny_temperature_is_raised_and_zero_is_greedy(caplog):
    assert SamplingParams(temperature=0).greedy
    assert SamplingParams(temperature=1e-9).temperature == 0.01


@pytest.mark.parametrize(
    "wrong, name",
    [
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
        ({"stop": "x", "detokenize": False}, "stop"),
    ],
)
def test_fields_that_contradict_each_other_are_refused(wrong, name):
    with pytest.raises(ParameterError) as caught:
        SamplingParams(**wrong)
    assert caught.value.parameter == name


ADMISSION = [
    ({"stop_token_ids": [100]}, "stop_token_ids"),
    ({"logit_bias": {100: 1}}, "logit_bias"),
    ({"allowed_token_ids": [0, 100]}, "allowed_token_ids"),
    ({"logprobs": 21}, "logprobs"),
    ({"logprobs": -1}, "logprobs"),
    ({"prompt_logprobs": 21}, "prompt_logprobs"),
    ({"min_tokens": 65, "max_tokens": None}, "min_tokens"),
    ({"truncate_prompt_tokens": 65}, "truncate_prompt_tokens"),
]


@pytest.mark.parametrize("wrong, name", ADMISSION)
def test_admission_names_what_the_model_cannot_serve(wrong, name):
    with pytest.raises(ParameterError, match=f"^{name} ") as caught:
        SamplingParams(**wrong).check(vocab_size=100, max_model_len=64, max_logprobs=20)
    assert caught.value.parameter == name


def test_admission_lets_the_largest_through():
    params = SamplingParams(logprobs=20, prompt_logprobs=0, stop_token_ids=[99], logit_bias={99: 1}, min_tokens=16)
    params.check(vocab_size=100, max_model_len=64, max_logprobs=20)
    SamplingParams(logprobs=-1).check(vocab_size=100, max_model_len=64, max_logprobs=-1)
    SamplingParams(top_k=1000).check(vocab_size=100, max_model_len=64)


def test_admission_sees_what_was_set_after_construction():
    params = SamplingParams()
    params.top_p = NAN
    with pytest.raises(ParameterError, match="^top_p "):
        params.check(100, 64)


def test_copies_are_equal_and_share_nothing():
    params = SamplingParams(stop=["a"], extra_args={"k": [1]})
    for other in (params.clone(), copy.copy(params), pickle.loads(pickle.dumps(params))):  # noqa: S301
        assert other == params
    other = params.clone()
    other.stop.append("b")
    other.extra_args["k"].append(2)
    assert params.stop == ["a"] and params.extra_args == {"k": [1]}


def test_messages_carry_it_unchanged_and_checked():
    params = SamplingParams(stop="x", logit_bias={1: 2.0}, output_kind=RequestOutputKind.DELTA, seed=2**63)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams) == params
    with pytest.raises(msgspec.ValidationError, match="top_p "):
        msgspec.json.decode(b'{"top_p": 7}', type=SamplingParams)


def test_an_error_survives_pickling():
    error = pickle.loads(pickle.dumps(ParameterError("top_p", "is wrong")))  # noqa: S301
    assert error.parameter == "top_p" and str(error) == "top_p is wrong"


def test_beam_search_params():
    assert BeamSearchParams(beam_width=3, max_tokens=5).length_penalty == 1.0
    with pytest.raises(ParameterError, match="^beam_width "):
        BeamSearchParams(beam_width=0)
    with pytest.raises(ValueError, match="did you mean 'beam_width'"):
        BeamSearchParams(beam_with=2)


def test_importing_it_loads_no_torch():
    code = "import sys, quintet.sampling_params; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
