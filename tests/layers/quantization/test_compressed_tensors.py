"""compressed-tensors' schemes by its packing rules, which module has which, and what is refused."""

from typing import Any

import pytest
import torch
from torch import Tensor

from quintet.interface.weights import PLAIN, ShardRange
from quintet.layers.quantization import QuantizationPlan
from quintet.layers.quantization.module_patterns import compile_pattern, regex_names, wildcard_names
from tests.helpers.checkpoints.quantized_files import plan_of, read_out

SIZES = OUTPUTS, INPUTS = 24, 96
INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True}
FP8 = {"num_bits": 8, "type": "float", "strategy": "channel"}


def said(weights: Any, fmt: str = "pack-quantized", targets: Any = ("Linear",), **more: Any) -> dict[str, Any]:
    group = {"targets": list(targets), "weights": weights, **more.pop("group", {})}
    return {"quant_method": "compressed-tensors", "format": fmt, "config_groups": {"group_0": group}, **more}


def loosely(values: Tensor, bits: int) -> Tensor:
    """int32: as many numbers as a word has room for, from the lowest, none across two words."""
    each = 32 // bits
    rows = []
    for row in values.tolist():
        words = [sum(n << bits * i for i, n in enumerate(row[at : at + each])) for at in range(0, len(row), each)]
        rows.append([word - (1 << 32) if word >> 31 else word for word in words])
    return torch.tensor(rows, dtype=torch.int32)


@pytest.mark.parametrize("bits", [3, 4, 5, 6, 7])
def test_words_that_no_number_crosses_are_read_too(bits: int) -> None:
    """As before compressed-tensors 0.13."""
    values = torch.randint(0, 2**bits, SIZES)
    tensors = {"a.0.b.weight_packed": loosely(values, bits), "a.0.b.weight_scale": torch.rand(OUTPUTS, 3)}
    found = plan_of(said({**INT4, "num_bits": bits}), tensors)
    want = (values - 2 ** (bits - 1)) * tensors["a.0.b.weight_scale"].repeat_interleave(32, 1)
    for cut in [ShardRange((0, OUTPUTS), (0, INPUTS)), ShardRange((3, 9), (16, 80)), ShardRange((1, 2), (5, 64))]:
        share = read_out(found, "a.0.b", SIZES, tensors, cut)
        assert torch.equal(share, want[slice(*cut.outputs), slice(*cut.inputs)])


def test_nibbles_of_an_odd_number_of_inputs_are_read() -> None:
    """No matrix of 4 bits has half a byte: it is floats."""
    values, scales = torch.randint(0, 16, (OUTPUTS, 97)), torch.rand(OUTPUTS, 1)
    tensors = {"a.0.b.weight_packed": loosely(values, 4), "a.0.b.weight_scale": scales}
    found = plan_of(said({**INT4, "strategy": "channel", "group_size": None}), tensors)
    assert torch.equal(read_out(found, "a.0.b", (OUTPUTS, 97), tensors), (values - 8) * scales)


def ordered() -> tuple[dict[str, Tensor], Tensor]:
    values, groups = torch.randint(0, 16, SIZES), torch.arange(INPUTS)[torch.randperm(INPUTS)] // 32
    scales = torch.rand(OUTPUTS, 3)
    tensors = {
        "a.0.b.weight_packed": loosely(values, 4),
        "a.0.b.weight_scale": scales,
        "a.0.b.weight_g_idx": groups.to(torch.int32),
    }
    return tensors, (values - 8) * scales[:, groups]


def test_groups_may_have_an_order_of_their_own() -> None:
    """actorder "group": also for a rank that has some of the inputs, whose share is floats then."""
    tensors, want = ordered()
    found = plan_of(said({**INT4, "actorder": "group"}), tensors)
    assert torch.equal(read_out(found, "a.0.b", SIZES, tensors), want)
    reader = found.plan.reader("a.0.b")
    assert reader is not None and reader.format(ShardRange((0, 8), (0, INPUTS))).act_order
    assert reader.format(ShardRange((0, 8), (0, 48))) == PLAIN
    assert torch.equal(read_out(found, "a.0.b", SIZES, tensors, ShardRange((0, 8), (20, 48))), want[:8, 20:48])


@pytest.mark.parametrize("wrong", [-1, 3, 2**31 - 1])
def test_an_order_that_is_none_is_refused(wrong: int) -> None:
    tensors, _ = ordered()
    tensors["a.0.b.weight_g_idx"][7] = wrong
    with pytest.raises(ValueError, match=r"a\.0\.b\.weight_g_idx does not deal 96 inputs into 3 groups of 32"):
        read_out(plan_of(said(INT4), tensors), "a.0.b", SIZES, tensors)


def held(config: dict[str, Any], *modules: str, there: Any = ()) -> list[str]:
    """Which of the modules a configuration has quantized, of files that hold nothing."""
    plan = plan_of(config, {name: torch.zeros(1) for name in there}).plan
    return [module for module in modules if plan.reader(module) is not None]


Q, GATE, HEAD, LAST = "model.layers.0.self_attn.q_proj", "model.layers.0.mlp.gate_proj", "lm_head", "model.layers.1.x"


@pytest.mark.parametrize(
    ("targets", "ignore", "want"),
    [
        (["Linear"], [], [Q, GATE, LAST]),
        (["Linear"], ["lm_head", GATE], [Q, LAST]),
        (["Linear"], ["re:.*layers\\.1\\..*"], [Q, GATE]),
        (["re:.*(q|gate)_proj$"], [], [Q, GATE]),
        (["re:layers"], [], []),  # an expression begins where the name does
        ([Q], [], [Q]),
        (["q_proj"], [], []),
        (["lm_head"], [], [HEAD]),
        (["Linear"], ["re:.*language_model\\.layers\\.0.*"], [LAST]),  # as a model with towers calls it
        (["LlamaAttention"], [], []),
    ],
)
def test_targets_and_ignored_modules(targets: list[str], ignore: list[str], want: list[str]) -> None:
    assert held(said(INT4, targets=targets, ignore=ignore), Q, GATE, HEAD, LAST) == want


def test_a_head_is_of_the_products_if_its_file_holds_it_quantized() -> None:
    assert held(said(INT4), HEAD, there=["lm_head.weight_scale"]) == [HEAD]
    assert held(said(INT4, ignore=["lm_head"]), HEAD, there=["lm_head.weight_scale"]) == []


def test_a_modules_own_name_goes_before_patterns_and_these_before_its_class() -> None:
    groups = {
        "a": {"targets": ["Linear"], "weights": FP8, "format": "float-quantized"},
        "b": {"targets": ["re:.*q_proj"], "weights": INT4},
        "c": {"targets": [Q], "weights": {**INT4, "num_bits": 8}},
        "d": {"targets": [LAST], "weights": None, "input_activations": None},
    }
    plan = plan_of({**said(INT4), "config_groups": groups}, {}).plan
    readers = [plan.reader(module) for module in (Q, "model.layers.7.q_proj", GATE, LAST)]
    whole = ShardRange((0, 8), (0, 128))
    assert [each and each.format(whole).kind for each in readers] == ["int8", "int4", "fp8", None]


def test_products_of_eight_bits_leave_activations_where_a_platform_has_no_others() -> None:
    inputs = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}
    config = said({"num_bits": 8, "strategy": "channel"}, "int-quantized", group={"input_activations": inputs})
    found, cut = plan_of(config, {}), ShardRange((0, 8), (0, 64))
    kinds = {"w8a8": {"w8a8", "int8"}, "int8": {"int8"}, "plain": {"int4"}}
    for kind, kept in kinds.items():
        assert QuantizationPlan(None, found, frozenset(kept)).format_for(Q, cut)[0].kind == kind


@pytest.mark.parametrize(
    ("supported", "kind"),
    [({"int4"}, "plain"), ({"embedding"}, "plain"), ({"int4", "embedding"}, "int4"), (None, "plain")],
)
def test_a_table_stays_quantized_where_the_platform_looks_rows_up_in_its_format(
    supported: set[str] | None, kind: str
) -> None:
    found, cut = plan_of(said(INT4), {"lm_head.weight_scale": torch.zeros(1)}), ShardRange((0, 8), (0, 64))
    products = QuantizationPlan(None, found, None if supported is None else frozenset(supported))
    assert products.for_embedding().format_for(HEAD, cut)[0].kind == kind


@pytest.mark.parametrize(
    "pattern",
    [
        *(".?" * 40 + "Z", "(.|..)" * 40 + "Z", "(?:.*a|.*b)" * 6, ".{0,9}" * 9, "(?x)(.+) +Z", "(?sx:(.+) +Z)"),
        *("(a+)(?#[)+x]", "(a+)+", r"(a)\1", "(?P<a>.)(?P=a)", "(a{2,}){2}", "(" + "(.|..)" * 40, ".?" * 40 + ")"),
    ],
)
def test_patterns_with_too_many_ways_through_them_are_refused(pattern: str) -> None:
    with pytest.raises(ValueError, match="a list has the pattern .* which could take long to match"):
        compile_pattern(pattern, "a list")


@pytest.mark.parametrize(
    "pattern",
    [
        rf".*layers\.({'|'.join(map(str, range(64)))})\.(self_attn|mlp)\.(q|k|v|o|gate|up|down)_proj$",
        *(r".*\.experts\.[0-9]+?\.(gate|up)(_proj)?$", "(?i).*q_proj", r"^(?!.*(lm_head|embed)$).*[?+*)]?a{2}b"),
    ],
)
def test_patterns_that_people_write_are_taken(pattern: str) -> None:
    assert compile_pattern(pattern, "a list").match("model.layers.12.mlp.experts.7.down_proj.") is None


ONLINE = {"config_groups": {"R4": {"type": "hadamard", "apply": [{"location": "input"}, {"location": "weight_input"}]}}}
FUSED = {"config_groups": {"R1": {"type": "hadamard", "apply": [{"location": "weight_output"}]}}}


def test_transforms_that_are_in_the_weights_ask_for_nothing() -> None:
    assert held(said(INT4, transform_config=FUSED), Q) == held(said(INT4, transform_config={}), Q) == [Q]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (said(INT4, transform_config=ONLINE), "transforms activations while it runs .transform_config at input"),
        (said(INT4, transform_config={"config_groups": {"a": {"apply": 5}}}), "transform_config at an unknown place"),
        (said(INT4, transform_config={"config_groups": [1]}), "transform_config at an unknown place"),
        (said(INT4, "marlin-24"), r"is sparse \(marlin-24\).*use the model's W4A16"),
        (said(INT4, sparsity_config={"format": "sparse-24-bitmask"}), r"is sparse \(sparse-24-bitmask\)"),
        (said(INT4, "dense"), "format dense: its weights are floats that were never packed"),
        (said(INT4, "fakequant"), "format fakequant: its weights are floats"),
        (said(INT4, "zipped"), "whole numbers in the format 'zipped'; quintet reads pack-quantized and int-quantized"),
        (said({**INT4, "num_bits": 12}), "12 bits; quintet reads 2 to 8"),
        (said({**INT4, "num_bits": 2**63}), f"num_bits {2**63}, which is none"),
        (said({**INT4, "group_size": 24}), "group_size 24; quintet reads multiples of 16"),
        (said({**INT4, "group_size": "many"}), "group_size 'many', which is none"),
        (said({**INT4, "group_size": None, "strategy": "attn_head"}), "the strategy 'attn_head'; quintet reads tensor"),
        (said({**FP8, "strategy": "block"}, "float-quantized"), "block_structure None, not two sizes"),
        (said({**FP8, "strategy": "block", "block_structure": [128, 20]}, "float-quantized"), "a multiple of 16"),
        (said({**FP8, "num_bits": 6}, "float-quantized"), "floats of 6 bits by channel .* reads float-quantized"),
        (said({**FP8, "symmetric": False}, "float-quantized"), "floats with zero points"),
        (said(INT4, targets="Linear") | {"config_groups": {"a": {"targets": "Linear", "weights": INT4}}}, "not a list"),
        (said(INT4) | {"config_groups": {"W4A16": ["Linear"]}}, "names a preset, not a scheme"),
        (said(INT4) | {"config_groups": ["Linear"]}, "not an object"),
        (said("int4"), "weights is 'int4', not an object"),
        (said(INT4, ignore="lm_head"), "ignore is 'lm_head', not a list"),
        (said(INT4, ignore=[7]), "ignore lists 7, which is no module's name"),
        (said(INT4, ignore=["re:(a+)+b"]), "could take long to match"),
        (said(INT4, targets=["re:*a"]), "is no regular expression"),
    ],
)  # fmt: skip
def test_what_is_not_read_is_refused_by_name(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as refused:
        plan_of(config, {})
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "pattern",
    [r"(a+)+$", r"(a|aa)*b", r"(?:.*,)+x", r"(.)\1", r".*a.*b.*c.*d.*e.*f", r"(a?){99}", r"((.*x)|.*y.*z.*).*.*.*",
     "a" * 9999],
)  # fmt: skip
def test_patterns_that_could_take_long_are_refused(pattern: str) -> None:
    with pytest.raises(ValueError, match="could take long to match|is no module's name"):
        regex_names([f"re:{pattern}"], "a list")


@pytest.mark.parametrize(
    ("pattern", "name"),
    [
        (r".*\.layers\.([0-9]|1[0-5])\.mlp\.(gate|up|down)_proj$", "model.layers.12.mlp.up_proj"),
        (r"^(?!.*lm_head).*proj", "model.q_proj"),
        (r".*(self_attn|mlp)\.(q|k|v|o|gate|up|down)_proj.*", "x.mlp.up_proj"),
        (r"model\.layers\.\d{1,2}\.(?:mlp)?.*[(+*]*", "model.layers.3.mlp.x"),
        (r"(?:a.*|b.*|c.*|d.*|e.*|f.*|g.*)", "great"),
    ],
)
def test_patterns_of_checkpoints_are_taken(pattern: str, name: str) -> None:
    assert regex_names([f"re:{pattern}"], "a list").has([name])


def test_wildcards_mean_whole_names() -> None:
    names = wildcard_names(["*lm_head", "model.layers.1.*", "a.b"], "a list")
    there = ["lm_head", "model.lm_head", "model.layers.1.x", "a.b"]
    assert all(names.has([each]) for each in there)
    assert not any(names.has([each]) for each in ["lm_head.x", "model.layers.11.x", "a.b.c", "a"])
