"""Whole prompts by cuDNN: which steps and layers it serves, and that its results are the specification's; torch's plain
attention stands in for it where there is no GPU."""

import logging
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from quintet import SamplingParams
from quintet.chat.prompts import Prompt
from quintet.config import EngineConfig
from quintet.conformance.harness.batches import AttentionRequest, RandomKVCache, spec
from quintet.conformance.harness.worker_runner import random_prompts
from quintet.engine.client import EngineClient
from quintet.interface.platform import Capabilities
from quintet.interface.types import HostBatch, HostGroup, MaxShape, ShapeBucket
from quintet.ops import Op, bind
from quintet.platforms import SelectedPlatform
from quintet.platforms.cuda import cudnn_attention
from quintet.platforms.cuda.platform import CUDA
from quintet.platforms.gpu.attention import MIXED, SINGLE, UNPLANNED, WHOLE_PROMPT, PlannerRegistry
from quintet_tools.checkpoints.tiny import variant
from tests.helpers.platforms.run_model import Runner
from tests.helpers.platforms.triton import needs_triton
from tests.platforms.gpu.fake_torch import FakeGPU, FakeRuntime, fake_platform

DEVICE = needs_triton()
BF16, HOST = torch.bfloat16, torch.device("cpu")
EXTENT = MaxShape(ShapeBucket(32, 4, 4, (4,)), 16, 97)


class Library:
    """In cuDNN's place; it notes the shapes that it is given."""

    def __init__(self, times: float = 1.0) -> None:
        self.shapes: list[tuple[int, ...]] = []
        self._times = times

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        self.shapes.append(tuple(q.shape))
        assert all(each.stride(-1) == 1 and each.dim() == 4 for each in (q, k, v))
        assert k.shape == v.shape and k.shape[2] == q.shape[2]
        found = functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
        return found * self._times


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    """For steps of 32 tokens on."""
    made = Library()
    monkeypatch.setattr(cudnn_attention, "by_cudnn", made)
    monkeypatch.setattr(cudnn_attention, "MIN_TOKENS", 32)
    return made


def test_sizes_are_parts_of_the_largest_step_and_few_tokens_are_padded() -> None:
    assert cudnn_attention.sizes(4096) == (4096,) and cudnn_attention.sizes(2048) == ()
    sizes = cudnn_attention.sizes(8192)
    assert sizes == (4096, 5120, 6144, 7168, 8192)
    served = {each: cudnn_attention.size_for(each, sizes) for each in (512, 3800, 3840, 4096, 4097, 7681, 8192, 8193)}
    assert served == {
        512: None, 3800: None, 3840: 4096, 4096: 4096, 4097: None, 7681: 8192, 8192: 8192, 8193: None,
    }  # fmt: skip


@pytest.mark.parametrize("dims", [(4, 2, 16, 16), (6, 1, 24, 8), (2, 2, 32, 32)], ids=str)
@pytest.mark.parametrize(("tokens", "size"), [(64, 64), (61, 64), (48, 48), (33, 64)])
def test_a_prompt_is_the_specifications(dims: tuple[int, ...], tokens: int, size: int, library: Library) -> None:
    """What lies behind its end, and on page 0, is NaN."""
    heads, kv_heads, dim, page_size = dims
    of = spec(heads, kv_heads, dim, page_size=page_size, dtype=BF16)
    cache = RandomKVCache(of, [tokens])
    q, context = cache.batch({0: AttentionRequest(0, tokens)})
    want = Op.registry["paged_attention"].reference(q, cache.kv, context, of, None)
    taken = context.group.block_table[0, : -(-tokens // page_size)].tolist()
    rest = [page for page in range(len(cache.kv)) if page not in taken]
    cache.kv[rest] = math.nan
    if behind := -tokens % page_size:
        cache.kv[taken[-1], :, :, -behind:] = math.nan
    got = cudnn_attention.attended(q, cache.kv, context, of, size)
    assert got.shape == want.shape and got.is_contiguous() and library.shapes == [(1, heads, size, dim)]
    torch.testing.assert_close(got.float(), want.float(), rtol=0.02, atol=0.02)


def host(news: list[int], cached: list[int], padding: int = 0) -> HostBatch:
    starts = np.cumsum([0, *news]).astype(np.int32)
    count = np.arange(starts[-1] + padding, dtype=np.int32)
    lengths = np.array(news, np.int32) + np.array(cached, np.int32)
    group = HostGroup(count, np.zeros((len(news), 8), np.int32), lengths)
    return HostBatch(count, count, count * 0, starts, starts[1:] - 1, (group,))


def test_a_step_is_whole_by_what_the_host_knows() -> None:
    planning = PlannerRegistry()
    for batch, kind in (
        (host([64], [0]), MIXED),
        (host([1], [3]), SINGLE),
    ):
        assert planning.plan(1, (None, None), batch, batch.groups[0])[0].shape == (0, kind, 1), "nobody serves them"
    planning.serves_whole_prompt = lambda tokens: tokens >= 32
    planning.captured_sizes = frozenset({(40, 1)})
    for batch, kind in (
        (host([64], [0]), WHOLE_PROMPT),
        (host([64], [16]), MIXED),
        (host([20], [0]), MIXED),
        (host([1], [0]), SINGLE),
        (host([64], [0], padding=3), WHOLE_PROMPT),
        (host([64], [0], padding=16), MIXED),
        (host([40], [0]), WHOLE_PROMPT),
        (host([32, 32], [0, 0]), MIXED),
        (host([64, 0, 0], [0, 0, 0]), WHOLE_PROMPT),
        (host([38], [9], padding=2), UNPLANNED),
        (host([38], [0], padding=2), WHOLE_PROMPT),
        (host([63, 1], [0, 9]), MIXED),
    ):
        assert planning.plan(7, (None, None), batch, batch.groups[0])[0].shape == (0, kind, 7)


def test_planners_plan_whole_prompts_too() -> None:
    """A group may have layers of theirs beside those that have a mixer for whole prompts."""
    asked: list[int] = []

    class Planner:
        def plan(self, number: int, batch: HostBatch, group: HostGroup) -> None:
            asked.append(number)

    planning, batch = PlannerRegistry(), host([64], [0])
    planning.serves_whole_prompt = lambda tokens: True
    planning.add(spec(4, 2, 16), Planner())
    assert planning.plan(3, (None, None), batch, batch.groups[0])[0].shape[1] == WHOLE_PROMPT and asked == [3]


def test_layers_that_it_does_not_serve() -> None:
    assert not cudnn_attention.refusals(spec(8, 2, 64, dtype=BF16))
    refused: dict[str, dict[str, Any]] = {
        "queries in torch.float32": {"dtype": torch.float32}, "a cache in torch.int8": {"kv_dtype": torch.int8},
        "heads of 256": {"dim": 256}, "heads of 20": {"dim": 20}, "a window": {"window": 9}, "chunks": {"chunk": 16},
        "a soft-cap": {"softcap": 5.0}, "sinks": {"sinks": True}, "slopes (ALiBi)": {"alibi": True},
        "a layer that is not causal": {"causal": False}, "V as a part of K": {"shared": 32},
    }  # fmt: skip
    for what, given in refused.items():
        dim = given.pop("dim", 64)
        assert what in cudnn_attention.refusals(spec(8, 1, dim, **{"dtype": BF16, **given})), what


def test_it_is_tried_before_it_serves(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    of = spec(4, 2, 16, dtype=BF16)
    assert cudnn_attention.trial(of, HOST, 64) is None
    monkeypatch.setattr(cudnn_attention, "by_cudnn", Library(1.1))
    assert "cuDNN's result is off by 0.1" in str(cudnn_attention.trial(of, HOST, 64))
    monkeypatch.setattr(cudnn_attention, "by_cudnn", lambda *_: 1 / 0)
    assert cudnn_attention.trial(of, HOST, 64) == "cuDNN fails on a prompt: ZeroDivisionError: division by zero"
    monkeypatch.undo()
    if DEVICE.type == "cpu":
        assert "cuDNN fails on a prompt: NotImplementedError" in str(cudnn_attention.trial(of, HOST, 64))


ORDER = {"paged_attention": ("triton",), "write_kv": ("triton",), "rotary_write_kv": ("triton",)}


def on_fake(**settings: Any) -> CUDA:
    """The CUDA platform on a device of the host's memory."""
    fake = FakeRuntime()
    members = {
        "_make_runtime": classmethod(lambda cls: fake), "_facts": FakeGPU.__dict__["_facts"], "op_priority": ORDER,
        "_fake": fake, "_asks": {}, "_flashinfer": lambda self: "not installed",
    }  # fmt: skip
    config = EngineConfig(max_num_seqs=4, max_num_batched_tokens=32, **settings)
    return type("CUDAOnTheHost", (CUDA,), members)(config)  # type: ignore[no-any-return]


def steps(platform: Any, *brought: dict[int, list[int]]) -> list[Tensor]:
    run = Runner(variant("llama", "plain"), torch.float16, platform=platform)
    return [rows for each in brought for rows in run.step(each).values()]


@pytest.mark.slow
@pytest.mark.skipif(DEVICE.type != "cpu", reason="a device of the host's memory")
def test_an_engines_whole_prompts_go_to_it_alone(library: Library, caplog: pytest.LogCaptureFixture) -> None:
    """Those of the largest step and those that are padded to it; not what follows them, nor two that come together, nor
    one whose beginning is cached."""
    *whole, first, second = random_prompts(4, [32, 31, 12, 20], 97)
    brought: list[dict[int, list[int]]] = [
        *({number: prompt} for number, prompt in enumerate(whole)), {0: [5] * 20}, {0: [5] * 12, 1: [7] * 20},
        {3: first, 4: second}, {1: [9] * 31},
    ]  # fmt: skip
    with caplog.at_level(logging.INFO):
        got = steps(on_fake(enforce_eager=True), *brought)
    tried, *served = library.shapes
    assert [each[2] for each in served] == [32] * 2 * 3 and tried[2] == 32, "three layers"
    assert "whole prompts by cuDNN: yes" in caplog.text
    for each, want in zip(got, steps(fake_platform(enforce_eager=True), *brought), strict=True):
        torch.testing.assert_close(each, want, rtol=0, atol=0.02 * float(want.std()))


@pytest.mark.sweep
@pytest.mark.skipif(DEVICE.type != "cpu", reason="a device of the host's memory")
def test_captured_steps_have_it_by_a_graph_of_their_own(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole prompts of 32, 31 and 30 tokens are one graph's, two that fill such a step another's."""
    found: list[list[Any]] = []
    for platform in (type(on_fake()), type(fake_platform())):
        facts = platform.probe()
        assert isinstance(facts, Capabilities)
        chosen = SelectedPlatform(platform, facts, "a test")
        monkeypatch.setattr("quintet.engine.startup.choose", lambda name, chosen=chosen: chosen)
        config = EngineConfig.from_kwargs(
            model=str(variant("llama", "plain").folder), device="fake", skip_tokenizer_init=True, dtype="float16",
            max_model_len=64, max_num_batched_tokens=32, max_num_seqs=4, warm_up=False, enable_prefix_caching=False,
        )  # fmt: skip
        engine = EngineClient(config, progress=False)
        *whole, first, second = random_prompts(5, [32, 31, 30, 12, 20], 97)
        found.append([answered(engine, each) for each in (*([prompt] for prompt in whole), [first, second])])
        if len(found) == 1:
            tried, *served = library.shapes
            assert len(served) == 3 * (2 + 1 + 1), "run and captured once, and replayed twice, in three layers"
            assert platform._fake.captures == 2 and platform._fake.replays == 2  # type: ignore[attr-defined]
    assert found[0] == found[1]


def answered(engine: EngineClient, prompts: list[list[int]]) -> list[list[int]]:
    """Each one's next token; they come at once."""
    params = SamplingParams(temperature=0, max_tokens=1, detokenize=False, ignore_eos=True)
    for number, prompt in enumerate(prompts):
        engine.add(str(number), Prompt(prompt), params)
    found = {}
    while engine.busy:
        found.update({each.request_id: list(each.outputs[0].token_ids) for each in engine.step() if each.finished})
    return [found[str(number)] for number in range(len(prompts))]


@pytest.mark.skipif(DEVICE.type != "cpu", reason="a device of the host's memory")
@pytest.mark.parametrize("settings", [{"batch_invariant": True}, {"attention_backend": "triton"}], ids=str)
def test_who_asks_for_other_attention_has_none_of_it(settings: dict[str, Any], library: Library) -> None:
    of = spec(4, 2, 16, dtype=BF16)
    for platform, count in ((on_fake(), 1), (on_fake(**settings), 0)):
        platform.open(0)
        library.shapes.clear()
        layer: Any = platform.mixer(of, bind(ORDER), 0)
        assert (layer._whole is not layer._inner) == bool(count) and len(library.shapes) == count
        assert (platform._planning[0].serves_whole_prompt is not None) == bool(count)


@pytest.mark.slow
@pytest.mark.skipif(DEVICE.type != "cpu", reason="a device of the host's memory")
def test_where_it_errs_our_kernels_have_all_steps(
    library: Library, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    wrong = Library(1.5)
    monkeypatch.setattr(cudnn_attention, "by_cudnn", wrong)
    with caplog.at_level(logging.INFO):
        steps(on_fake(), {0: [5] * 32})
    assert len(wrong.shapes) == 1, "its trial"
    assert "whole prompts by cuDNN: cuDNN's result is off by 0.5" in caplog.text


def test_the_plan_counts_what_a_prompt_takes(library: Library) -> None:
    of = spec(4, 2, 16, dtype=BF16)
    platform = on_fake()
    platform.open(0)
    before = platform._library_bytes([], EXTENT)
    platform.mixer(of, bind(ORDER), 0)
    assert platform._library_bytes([], EXTENT) - before == 2 * 32 * (4 + 2) * 16 * 2


@pytest.mark.skipif(DEVICE.type == "cpu", reason="no GPU")
@pytest.mark.parametrize("dims", [(32, 8, 128), (32, 8, 64), (8, 8, 80)], ids=str)
def test_the_library_itself_passes_its_trial(dims: tuple[int, int, int]) -> None:
    for dtype in (torch.bfloat16, torch.float16):
        assert cudnn_attention.trial(spec(*dims, dtype=dtype), DEVICE, 2048) is None
