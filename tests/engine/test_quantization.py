"""Which form each product of a model has, by its path; what a checkpoint's quantization is taken for, or refused."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from quintet.conformance.harness.linear_layers import CanonicalReader
from quintet.interface.platform import SingleRank
from quintet.interface.weights import PLAIN, CheckpointSlice, Matrix, ShardRange, StoredTensor, Weight, WeightFormat
from quintet.layers.build import BuildContext, finalize, replicated
from quintet.layers.linear import LMHead, column_parallel, row_parallel
from quintet.layers.quantization import ONLINE, QuantizationPlan
from quintet.layers.quantization import module_patterns as patterns
from quintet.layers.quantization.checkpoint_config import CheckpointQuantization, read_quantization_config
from quintet.layers.quantization.group_scales import shard_format
from quintet.ops import bind
from quintet.ops.quantize import attributes, canonical, concat_outputs, quantize

AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}


class Model(nn.Module):
    """Two blocks of two products, and a head."""

    def __init__(self, build: BuildContext) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.ModuleDict(self._block(build)) for _ in range(2))
        self.lm_head = LMHead(build, 256, 32)

    def _block(self, build: BuildContext) -> dict[str, nn.Module]:
        halves = {name: replicated(128, 1) for name in ("gate_proj", "up_proj")}
        return {
            "gate_up": column_parallel(build, 256, halves),
            "down": row_parallel(build, replicated(256, 1), ("down_proj", 256)),
        }


def settled(**asked: Any) -> dict[str, WeightFormat]:
    """path -> form, of every product."""

    def attention(spec: Any) -> Any:
        raise AssertionError("nothing attends")

    model = Model(BuildContext(bind({}), attention, SingleRank(), torch.float32, 16, 64, QuantizationPlan(**asked)))
    finalize(model)
    return {path: module.format for path, module in model.named_modules() if hasattr(module, "format")}


def test_floats_stay_floats_if_nothing_is_asked_for() -> None:
    assert set(settled().values()) == {PLAIN}


def test_the_head_has_eight_bits_and_others_what_was_asked_for() -> None:
    forms = settled(online=ONLINE["int4"])
    assert forms.pop("lm_head.linear").kind == "int8" and {fmt.kind for fmt in forms.values()} == {"int4"}


@pytest.mark.parametrize(
    ("ignored", "plain"),
    [
        (["blocks.1"], {"blocks.1.gate_up", "blocks.1.down"}),
        (["down_proj"], {"blocks.0.down", "blocks.1.down"}),
        (["blocks.0.down_proj"], {"blocks.0.down"}),
        (["re:.*blocks.1.*_proj$"], {"blocks.1.gate_up", "blocks.1.down"}),
        (["own_proj", "block", "blocks.1.down"], set()),  # whole names, or nothing
        (["lm_head"], set()),
    ],
)
@pytest.mark.parametrize("said", [AWQ, FP8], ids=["awq", "fp8"])
def test_modules_that_a_checkpoint_left_out_stay_floats(
    said: dict[str, Any], ignored: list[str], plain: set[str]
) -> None:
    key = "modules_to_not_convert" if said is AWQ else "ignored_layers"
    forms = settled(checkpoint=read_quantization_config({**said, key: ignored}))
    assert {path for path, fmt in forms.items() if fmt.plain} == plain | {"lm_head.linear"}


def test_a_form_that_a_platform_does_not_keep_is_read_as_floats() -> None:
    forms = settled(checkpoint=read_quantization_config(FP8), supported_kinds=frozenset({"int8"}))
    assert set(forms.values()) == {PLAIN}


def torchao_of(modules: dict[str, Any]) -> dict[str, Any]:
    said = {"_type": "FqnToConfig", "_data": {"fqn_to_config": modules}}
    return {"quant_method": "torchao", "quant_type": {"default": said}}


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"quant_method": "eetq"}, "quantized by eetq, which quintet does not read; it reads .*awq, .*fp8"),
        ({"bits": 4}, "quantized by without a name"),
        ({**AWQ, "bits": 3}, "AWQ with 3 bits"),
        ({**AWQ, "version": "gemm4"}, "layout 'gemm4'"),
        ({**AWQ, "group_size": 20}, "group_size 20 is not"),
        ({**FP8, "weight_block_size": 128}, "weight_block_size 128; quintet reads blocks"),
        ({**FP8, "weight_block_size": [128, 20]}, "its second a multiple of 16"),
        ({**FP8, "activation_scheme": "none"}, "activation_scheme 'none'"),
        ({**FP8, "fmt": "e3m4"}, "fmt e3m4"),
        ({**AWQ, "modules_to_not_convert": ["(a+)+b"]}, r"leaves out '\(a\+\)\+b', which is no module's name"),
        ({**AWQ, "modules_to_not_convert": [7]}, "leaves out 7"),
        ({**AWQ, "modules_to_not_convert": [".*" * 30 + "Z"]}, "could take long to match"),
        ({**AWQ, "version": ["gemm"]}, "layout"),
        ({"quant_method": "quark", "global_quant_config": {"weight": {"dtype": ["a"]}}}, r"weights as \"\['a'\]\""),
        ({"quant_method": "gguf", "types": {"a": ["Q4_0"]}}, r"tensors of type \['Q4_0'\]"),
        (torchao_of({"re:" + ".*" * 30 + "Z": None}), "could take long to match"),
    ],
)
def test_what_is_not_read_is_refused_by_name(said: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_quantization_config(said)


def test_a_share_that_cuts_a_group_has_smaller_ones() -> None:
    fmt = WeightFormat("int4", 4, 16, 128)
    assert shard_format(fmt, ShardRange((0, 8), (128, 384))) == fmt
    assert shard_format(fmt, ShardRange((0, 8), (64, 192))).group == 64
    assert (
        shard_format(WeightFormat("fp8", 8, 16, 128, dtype=torch.float8_e4m3fn), ShardRange((0, 8), (128, 300))).group
        == 128
    )
    assert shard_format(WeightFormat("int4", 4, 16, 0), ShardRange((0, 8), (8, 17))) == PLAIN  # half a byte
    assert shard_format(fmt, ShardRange((0, 8), (8, 136))) == PLAIN  # groups of 8 are too small
    assert shard_format(WeightFormat("int4", 4, 16, 0), ShardRange((0, 8), (8, 16))).group == 0


def test_parts_are_quantized_as_their_whole_is() -> None:
    x = {"a": torch.randn(16, 64), "b": torch.randn(8, 64)}
    parts = tuple(CheckpointSlice(name, tuple(each.shape), ((0, len(each)),)) for name, each in x.items())
    for fmt in ONLINE.values():
        got = canonical(Weight("weight", parts, 0, 0, torch.float32, "linear", fit(fmt)), x)
        want = quantize(torch.cat([*x.values()]), fit(fmt))
        assert got.format == want.format and set(attributes(got)) == {"weight", "scales"}
        assert all(torch.equal(each, attributes(want)[name]) for name, each in attributes(got).items())


def fit(fmt: WeightFormat) -> WeightFormat:
    return WeightFormat(fmt.kind, fmt.bits, fmt.activations, min(fmt.group, 64))


def test_matrices_of_one_form_are_joined() -> None:
    def made(outputs: int) -> Matrix:
        zeros: Tensor = torch.ones(outputs, 1, dtype=torch.uint8)
        fmt = WeightFormat("int4", 4, 16, 32, zeros=True)
        return Matrix(torch.zeros(outputs, 16, dtype=torch.uint8), torch.ones(outputs, 1), zeros, format=fmt)

    whole_matrix = concat_outputs([made(3), made(5)])
    assert [len(each) for each in attributes(whole_matrix).values()] == [8, 8, 8]


class Mixed:
    """A plan of the tests': modules whose names end in a key are held in its form, others in floats."""

    def __init__(self, **held: WeightFormat) -> None:
        self.held = held

    def reader(self, module: str) -> Any:
        return next((CanonicalReader(fmt) for end, fmt in self.held.items() if module.endswith(end)), None)


@pytest.mark.parametrize(
    ("held", "names"),
    [
        (
            {"gate_proj": WeightFormat("int8", 8, 16, 32), "up_proj": WeightFormat("int4", 4, 16, 32)},
            [["gate_proj"], ["up_proj"]],
        ),
        ({"gate_proj": WeightFormat("int4", 4, 16, 32)}, [["gate_proj"], ["up_proj"]]),
        ({"_proj": WeightFormat("int4", 4, 16, 32, mins=True)}, [["gate_proj", "up_proj"]]),
        ({"_proj": WeightFormat("int4", 4, 16, 32, act_order=True)}, [["gate_proj"], ["up_proj"]]),
        (
            {"_proj": WeightFormat("table4", 4, 16, 32, codebook=tuple(map(float, range(16))))},
            [["gate_proj", "up_proj"]],
        ),
    ],
)
def test_outputs_in_other_forms_are_products_side_by_side(
    held: dict[str, WeightFormat], names: list[list[str]]
) -> None:
    def attention(spec: Any) -> Any:
        raise AssertionError("nothing attends")

    forms = QuantizationPlan(checkpoint=CheckpointQuantization("a test's", Mixed(**held)))
    model = Model(BuildContext(bind({}), attention, SingleRank(), torch.float32, 16, 64, forms))
    finalize(model)
    layer: Any = model.blocks[1]
    found = {
        path: module.weights(f"blocks.1.{path}")
        for path, module in layer.named_modules()
        if path.startswith("gate_up") and module.weights(f"blocks.1.{path}")
    }
    sources = [[part.source for part in weight.slices] for each in found.values() for weight in each]
    assert sources == [[f"blocks.1.{name}.weight" for name in piece] for piece in names]
    want = []
    for path, (weight,) in found.items():
        tensors = {name: made(on_file, name) for name, on_file in weight.stored.items()}
        plain = {"weight": weight.local(tensors)}
        layer.get_submodule(path).assign(plain if weight.format.plain else attributes(canonical(weight, tensors)))
        want.append(plain["weight"])
    x = torch.randn(3, 256, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(layer["gate_up"](x), x @ torch.cat(want).t(), rtol=1e-5, atol=1e-3)


def made(on_file: StoredTensor, name: str) -> Tensor:
    """Any numbers of the file's type; an order is one."""
    generator, dtype, shape = torch.Generator().manual_seed(len(name)), on_file.dtypes[0], on_file.shape
    assert shape is not None
    if name.endswith(".order"):
        return torch.randperm(shape[0], generator=generator, dtype=dtype)
    if dtype.is_floating_point:
        return torch.randn(shape, generator=generator)
    return torch.randint(0, 100, shape, generator=generator, dtype=dtype)


@pytest.mark.parametrize(("gate", "rows", "unclear"), [(96, 1, True), (352, 3, True), (160, 2, False), (64, 1, False)])
def test_scales_of_stacks_may_not_be_of_gate_and_up_at_once(gate: int, rows: int, unclear: bool) -> None:
    """Two blocks of 128 have gate's 96 rows and up's, and the 192 that transformers multiplies: which, nothing says."""
    stack = "model.layers.0.mlp.experts.gate_up_proj"
    files = {
        f"{GATE}.weight": StoredTensor((gate, 256), (torch.float8_e4m3fn,), name=stack),
        f"{GATE}.weight_scale_inv": StoredTensor((rows, 2), (torch.float32,), name=f"{stack}_scale_inv"),
    }
    found = read_quantization_config(FP8, lambda: files)
    assert found is not None
    if unclear:
        with pytest.raises(ValueError, match=rf"{stack}_scale_inv is of blocks of 128 rows, .* one by one"):
            found.plan.reader(GATE)
    else:
        assert found.plan.reader(GATE) is not None


GATE = "model.layers.0.mlp.experts.3.gate_proj"


class Counted:
    """A pattern that counts how often it is tried, and matches nothing."""

    def __init__(self) -> None:
        self.tries = 0

    def search(self, name: str) -> None:
        self.tries += 1


def test_long_lists_of_modules_are_looked_up_and_not_tried_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a mixture of 48 layers with 128 experts, whose routers and norms are each named."""
    kept = [f"model.layers.{i}.{name}" for i in range(48) for name in ("mlp.gate", "input_layernorm")]
    pattern, made = Counted(), list[str]()

    def expression(text: str, where: str) -> Any:
        made.append(text)
        return pattern

    monkeypatch.setattr(patterns, "compile_pattern", expression)
    found = read_quantization_config({**FP8, "modules_to_not_convert": [*kept, "visual.*", "lm_head"]})
    assert found is not None
    modules = [f"model.layers.{i}.mlp.experts.{expert}.up_proj" for i in range(48) for expert in range(8)]
    assert all(found.plan.reader(module) is not None for module in modules)
    assert all(found.plan.reader(name) is None for name in kept)
    assert pattern.tries == len(modules)  # by the one pattern there is; what is looked up comes first
    assert len(set(made)) == 1 and len(made) <= 2  # checked when it is read, and compiled when it is used
