"""The batch-invariant mode on the GPU platform, in Triton's interpreter: alone, batched, cut in chunks and padded, a
request has the same bits; and what cannot be kept is refused."""

from typing import Any

import pytest
import torch

from quintet.config import EngineConfig
from quintet.conformance.harness.batches import spec
from quintet.conformance.harness.worker_runner import random_prompts
from quintet.interface.types import MaxShape, ShapeBucket
from quintet.interface.weights import CheckpointSlice, Matrix, Weight, WeightFormat
from quintet.layers.quantization import ONLINE
from quintet.ops import Op, bind
from quintet.ops.quantize import attributes, quantize
from quintet.ops.registry import ProviderChoice
from quintet.platforms.gpu import providers
from quintet.platforms.gpu import weight_layout as packing
from quintet.platforms.gpu.comm import GroupCommunicator, InProcessStores
from quintet.platforms.null import PLATFORM as NULL
from quintet_tools.checkpoints.tiny import FAMILIES, make
from tests.helpers.platforms.run_model import Runner
from tests.helpers.platforms.triton import needs_triton
from tests.platforms.gpu.fake_torch import FakeGPU, FakeRuntime
from tests.platforms.gpu.test_comm import each_rank

if needs_triton().type != "cpu":
    pytest.skip("on a GPU the conformance kit asks this of whole engines", allow_module_level=True)
providers.register()
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")  # NumPy's, of masked lanes


# torch's elementwise functions on the host may round the last few numbers of a tensor otherwise than those before
BESIDE = ("write_kv", "embedding", "rms_norm", "add_rms_norm", "rotary", "pair_rotary", "gated")


def platform(**settings: Any) -> FakeGPU:
    """The ops that the mode is about, and what stands between them, by our kernels."""
    order = {name: providers.PRIORITY[name] for name in BESIDE}
    made = type("Invariant", (FakeGPU,), {"_fake": FakeRuntime(), "op_priority": order})
    return made(EngineConfig(batch_invariant=True, max_num_seqs=8, **settings))  # type: ignore[no-any-return]


def model(family: str) -> Any:
    whole = next(iter(FAMILIES[family].values()))
    types = whole.get("layer_types")
    settings = {**whole, "num_hidden_layers": 1} | ({"layer_types": types[:1]} if types else {})
    return make(family, settings | ({"first_k_dense_replace": 0} if "first_k_dense_replace" in whole else {}))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        ("llama", torch.float16),
        pytest.param("mixtral", torch.float32, marks=pytest.mark.sweep),
        pytest.param("deepseek_v2", torch.float32, marks=pytest.mark.slow),
    ],
)
def test_a_request_has_the_same_bits_alone_batched_padded_and_in_chunks(family: str, dtype: torch.dtype) -> None:
    tiny, (short, long) = model(family), random_prompts(3, (7, 21), 90)
    following = [[5], [17]]

    def steps(run: Runner, *given: dict[str, list[int]]) -> torch.Tensor:
        """The last outputs of the one that is looked at."""
        return [run.step(each) for each in given][-1]["it"]

    want = steps(Runner(tiny, dtype, platform=platform()), {"it": short}, *({"it": each} for each in following))
    ways = {
        "batched": [{"it": short, "other": long}, *({"other": [3], "it": each, "third": [9, 8]} for each in following)],
        "in chunks of one and more": [{"it": short[:1]}, {"it": short[1:6], "other": long}, {"it": short[6:]}]
        + [{"it": each} for each in following],
    }
    for way, given in ways.items():
        gpu = platform()
        got = steps(Runner(tiny, dtype, platform=gpu), *given)
        assert torch.equal(got, want), f"{way}: off by {float((got - want).abs().max()):.3g}"
        assert {choice.provider for choice in gpu._ops[0].bound if choice.op in providers.INVARIANT} == {"invariant"}


@pytest.mark.parametrize("kind", ["int8", "int4", "w8a8"])
def test_a_quantized_product_has_the_same_bits_for_any_number_of_rows(kind: str) -> None:
    """More rows than one tile has, and inputs that would be split for few."""
    fmt, generator = ONLINE[kind], torch.Generator().manual_seed(1)
    weight, x = torch.randn(48, 1024, generator=generator), torch.randn(70, 1024, generator=generator).half()
    packed = packing.pack(weight, fmt)
    matrix = Matrix(packed["weight"], packed["scales"], format=fmt)
    op = Op.registry[f"linear:{kind}"]
    got = op.providers["invariant"](x, matrix, None, (48,))
    each = torch.cat([op.providers["invariant"](x[at : at + 1], matrix, None, (48,)) for at in (0, 33, 69)])
    assert torch.equal(got[[0, 33, 69]], each)
    plain = attributes(quantize(weight, fmt))
    want = op.reference(x, Matrix(plain["weight"], plain["scales"], format=fmt), None, (48,))
    assert float((got - want).abs().max()) <= 0.01 * float(want.abs().max())


@pytest.mark.parametrize("turned", [False, True])
def test_products_equal_their_specifications(turned: bool) -> None:
    generator = torch.Generator().manual_seed(2)
    x, weight = (torch.randn(shape, generator=generator) for shape in ((5, 3, 24), (3, 40, 24)))
    given = weight.transpose(1, 2).contiguous() if turned else weight
    op, linear = Op.registry["by_heads"], Op.registry["linear"]
    got = op.providers["invariant"](x, given, 40, turned)
    torch.testing.assert_close(got, op.reference(x, given, 40, turned), rtol=1e-5, atol=1e-5)
    rows, bias = x[:, 0], weight[0, :, 0]
    for each in (None, bias):
        got = linear.providers["invariant"](rows, Matrix(weight[0]), each, (40,))
        torch.testing.assert_close(got, linear.reference(rows, Matrix(weight[0]), each, (40,)), rtol=1e-5, atol=1e-5)


def test_sums_over_ranks_have_one_order_whatever_their_size() -> None:
    """1e8 and -1e8 leave what was added after them."""
    meeting, given = InProcessStores(), torch.tensor([[1e8], [1.0], [-1e8]])

    def work(rank: int) -> list[torch.Tensor]:
        group = torch.distributed.ProcessGroupGloo(meeting.store(rank, 3, "inproc://order"), rank, 3)
        comm = GroupCommunicator(group, rank, 3).in_rank_order()
        wide = given[rank].repeat(3)
        return [comm.all_reduce(given[rank].clone()), comm.all_reduce(wide.clone()), comm.reduce_scatter(wide, 0)]

    want = given[0] + given[1] + given[2]
    for alone, wide, own in each_rank(3, work):
        assert torch.equal(alone, want) and torch.equal(wide, want.repeat(3)) and torch.equal(own, want)


def test_what_takes_the_mode_back_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = EngineConfig(batch_invariant=True, attention_backend="gathered")
    with pytest.raises(ValueError, match="has an attention of its own, and attention_backend='gathered' was asked for"):
        FakeGPU.configure(asked)
    assert "unmeasured" in FakeGPU.configure(EngineConfig(batch_invariant=True))[1][-1]
    assert providers.batch_variant_ops([ProviderChoice("linear", "reference", "", (("invariant", "no GPU"),))]) == [
        "linear by reference (invariant: no GPU)"
    ]
    assert providers.batch_variant_ops([ProviderChoice("biased_experts", "triton", "")]) == ["biased_experts by triton"]
    assert providers.batch_variant_ops([ProviderChoice("gated_norm", "reference", "")]) == ["gated_norm by reference"]
    assert not providers.batch_variant_ops(
        [ProviderChoice("linear", "invariant", ""), ProviderChoice("rms_norm", "triton", "")]
    )
    gpu = platform()
    gpu._ops[0] = bind({}).take("linear")
    with pytest.raises(ValueError, match="batch_invariant=True is not kept by linear by reference; leave it out"):
        gpu.compile(torch.nn.Linear(1, 1), ())


def test_groups_that_no_tile_cuts_are_refused_before_a_request() -> None:
    from quintet.platforms.gpu.ops.quantized import _packed

    gpu = platform()
    gpu.open(0)
    values = torch.randn(4, 48)
    part = CheckpointSlice("layer.weight", (4, 48), ((0, 4),))
    for kind, bits, group in (("int8", 8, 24), ("int8", 8, 16), ("int8", 8, 48), ("int4", 4, 8), ("int4", 4, 16)):
        fmt = WeightFormat(kind, bits, 16, group)
        weight = Weight("weight", (part,), 0, 0, torch.float16, "linear", fmt)
        placed = packing.pack_matrix(attributes(quantize(values, fmt)), fmt)
        cut = _packed(values, Matrix(placed["weight"], placed["scales"], format=fmt), 4).part()
        assert packing.fits_tiles(48, fmt) == (not cut)
        if cut:
            gpu.place(weight, {"layer.weight": values})
            continue
        with pytest.raises(ValueError, match=f"layer.weight is in {kind} with groups of {group}, which our kernels do"):
            gpu.place(weight, {"layer.weight": values})


def test_the_plan_has_room_for_sums_in_rank_order() -> None:
    max_shape = MaxShape(ShapeBucket(64, 4, 4, (1,)), 16, 97)
    part = CheckpointSlice("layer.weight", (4, 48), ((0, 4),))
    weights = [Weight("weight", (part,), 0, 0, torch.bfloat16, "linear")]

    def took(**settings: Any) -> tuple[int, ...]:
        gpu = type("Planned", (FakeGPU,), {"_fake": FakeRuntime()})(EngineConfig(max_num_seqs=4, **settings))
        found = gpu.estimate(torch.nn.Module(), weights, max_shape)
        return found.workspace, found.captured

    alone, two = took(tensor_parallel_size=2), took(tensor_parallel_size=2, batch_invariant=True)
    each = 64 * 16 * (2 * 2 + 2 * 4)
    assert [b - a for a, b in zip(alone, two, strict=True)] == [each, each]
    assert took(batch_invariant=True) == took()


def test_a_platform_that_has_no_such_mode_says_so() -> None:
    from dataclasses import replace

    from quintet.engine.startup import prepare
    from quintet.platforms import SelectedPlatform

    facts = replace(NULL.probe(), batch_invariant=False)
    with pytest.raises(ValueError, match="batch_invariant=True: platform null does not give a request the same bits"):
        prepare(EngineConfig(batch_invariant=True), SelectedPlatform(NULL, facts, "a test"))
    assert FakeGPU.probe().batch_invariant_mode and not FakeGPU.probe().batch_invariant


def test_a_layer_that_no_kernel_serves_ends_the_mode() -> None:
    gpu = platform()
    gpu.open(0)
    with pytest.raises(ValueError, match="attention by Triton kernels: .* more than 512"):
        gpu.mixer(spec(2, 1, 1024), bind(gpu.op_priority), 0)
