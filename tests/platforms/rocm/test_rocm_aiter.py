"""AITER on the ROCm platform: calls bind to its recorded signatures, trials catch what errs, layers fall back."""

import importlib.util
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from quintet.conformance.harness.batches import AttentionRequest, RandomKVCache, spec
from quintet.engine.client import EngineClient
from quintet.interface.weights import Matrix, WeightFormat
from quintet.ops import Op, bind
from quintet.ops.quantize import attributes, quantize
from quintet.platforms.gpu import providers
from quintet.platforms.gpu.fp8_fnuz import FN, FNUZ, as_fnuz
from quintet.platforms.rocm import PLATFORM, aiter
from quintet_tools.checkpoints.tiny import FAMILIES, make
from tests.helpers.platforms.triton import needs_triton
from tests.platforms.gpu.test_sleep import SETTINGS
from tests.platforms.gpu.test_sleep import tokens as decoded
from tests.platforms.rocm.aiter_recorded import SIGNATURES, Library, signature
from tests.platforms.rocm.test_rocm_platform import client, fake_platform

__all__ = ["client"]  # a fixture
providers.register()  # as a device that is opened does: ours serves what AITER does not
BF16 = torch.bfloat16
SPECS: dict[str, dict[str, Any]] = {
    "plain": {}, "window": {"window": 20}, "soft-cap": {"softcap": 5.0}, "sinks": {"sinks": True},
    "small pages": {"page_size": 8}, "large pages": {"page_size": 32},
}  # fmt: skip


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    made = Library()
    monkeypatch.setattr(aiter, "library_function", made.part)
    return made


def use(monkeypatch: pytest.MonkeyPatch, *missing: str, wrong: str = "") -> Library:
    made = Library(*missing, wrong=wrong)
    monkeypatch.setattr(aiter, "library_function", made.part)
    return made


def test_every_part_that_is_used_was_recorded() -> None:
    assert set(SIGNATURES) | {"ActivationType"} == set(aiter.PARTS)
    assert all(len(commit) == 40 for recorded in SIGNATURES.values() for _, commit, _ in recorded)
    with pytest.raises(TypeError, match="missing a required argument: 'epsilon'"):
        signature(SIGNATURES["rms_norm"][0][2]).bind(1, 2)


def test_it_is_registered_first_in_the_order_and_for_nothing_else() -> None:
    first = {op for op, order in PLATFORM.op_priority.items() if order[0] == "aiter"}
    assert first == set(aiter.OPS) == {name for name, op in Op.registry.items() if "aiter" in op.providers}
    assert all(PLATFORM.op_priority[op][1:] == tuple(providers.PRIORITY[op]) for op in first)


def test_without_it_the_reason_says_where_it_comes_from() -> None:
    aiter.library_function.cache_clear()
    if importlib.util.find_spec("aiter") is None:
        assert aiter.library_function("rms_norm") == "AITER is not installed (github.com/ROCm/aiter)"


def test_another_package_of_that_name_and_one_that_breaks_are_no_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyPI's aiter is about asynchronous iterators."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name == "aiter")
    monkeypatch.setitem(sys.modules, "aiter", ModuleType("aiter"))
    aiter.library_function.cache_clear()
    assert aiter.library_function("rms_norm") == "this aiter has no rms_norm; PyPI's is another package"
    assert aiter.library_function("fused_moe").startswith("AITER's fused_moe cannot be imported: ModuleNotFoundError")
    aiter.library_function.cache_clear()


@pytest.mark.parametrize("op", aiter.OPS)
@pytest.mark.parametrize("fp8", [FN, FNUZ], ids=str)
def test_a_library_that_is_right_serves_and_one_that_errs_does_not(
    op: str, fp8: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs_triton()
    if fp8 == FNUZ and op != "linear:fp8a8":
        pytest.skip("the type is of products alone")
    monkeypatch.setattr(aiter, "facts", lambda: fake_platform(fp8)._facts())
    probe = Op.registry[op].probes["aiter"]
    used = dict(zip(aiter.OPS, ("rms_norm", "rmsnorm2d_fwd_with_add", "fused_moe", "gemm_a8w8"), strict=True))[op]
    made = use(monkeypatch)
    assert probe() is None and made.calls[used] == 1
    use(monkeypatch, wrong=used)
    assert "AITER's result is off by" in str(probe())
    use(monkeypatch, used)
    assert probe() == f"AITER lacks {used}"


def test_norms_of_heads_and_what_it_does_not_serve(library: Library) -> None:
    needs_triton()
    ops = {name: Op.registry[name] for name in ("rms_norm", "add_rms_norm")}
    x, weight = torch.randn(3, 2, 64).to(BF16), torch.randn(64).to(BF16)
    for case in (x, x.transpose(0, 1), torch.randn(3, 2, 128).to(BF16)[..., ::2]):
        got = ops["rms_norm"].providers["aiter"](case, weight, 1e-6, 0.0)
        assert torch.equal(got, ops["rms_norm"].reference(case, weight, 1e-6, 0.0))
        both = ops["add_rms_norm"].providers["aiter"](case, case, weight, 1e-6, 0.0)
        want = ops["add_rms_norm"].reference(case, case, weight, 1e-6, 0.0)
        assert all(map(torch.equal, both, want))
    assert library.calls == {"rms_norm": 3, "rmsnorm2d_fwd_with_add": 3}
    for args in ((x, weight, 1e-6, 1.0), (x.float(), weight.float(), 1e-6, 0.0)):  # Gemma's, and float32: ours
        ops["rms_norm"].providers["aiter"](*args)
    assert library.calls["rms_norm"] == 3


@pytest.mark.parametrize("kind", [FN, FNUZ], ids=str)
def test_products_with_a_bias_and_groups_which_are_ours(kind: torch.dtype, library: Library) -> None:
    needs_triton()
    x, bias, op = torch.randn(3, 256).to(BF16), torch.randn(128).to(BF16), Op.registry["linear:fp8a8"]
    for group, calls in ((0, 1), (128, 1)):
        fmt = WeightFormat("fp8a8", 8, 8, group, dtype=FN)
        found = attributes(quantize(torch.randn(128, 256), fmt))
        found = as_fnuz(found) if kind == FNUZ else found
        weight = Matrix(found["weight"], found["scales"], format=fmt)
        got = op.providers["aiter"](x, weight, bias, (128,))
        want = op.reference(x, weight, bias, (128,))
        torch.testing.assert_close(got, want, rtol=0.02, atol=0.02 * float(want.abs().max()))
        assert library.calls == {"gemm_a8w8": calls}


@pytest.mark.parametrize("name", SPECS)
def test_its_attention_is_given_what_gives_the_specifications_results(name: str, library: Library) -> None:
    """A mixed step with padding behind it, and one of single tokens, over pages as they lie."""
    of = spec(4, 2, 16, dtype=BF16, **SPECS[name])
    sinks = torch.linspace(-1, 2, 4).to(BF16) if of.sinks else None
    for requests in (
        [AttentionRequest(40, 1), AttentionRequest(0, 21)],
        [AttentionRequest(40, 1), AttentionRequest(3, 1)],
    ):
        cache = RandomKVCache(of, [r.cached + r.new for r in requests])
        q, context = cache.batch(dict(enumerate(requests)))
        want = Op.registry["paged_attention"].reference(q, cache.kv, context, of, sinks)
        got = aiter.attend(q, cache.kv, context, of, sinks)
        torch.testing.assert_close(got.float(), want.float(), rtol=0.02, atol=0.02)
    assert library.calls["unified_attention"] == 2 and aiter.trial(of, torch.device("cpu")) is None


def test_padding_gets_zeros(library: Library) -> None:
    of = spec(4, 2, 16, dtype=BF16)
    cache = RandomKVCache(of, [9])
    q, context = cache.batch({0: AttentionRequest(0, 9)})
    padded = torch.cat([q, torch.full_like(q[:3], float("nan"))])
    got = aiter.attend(padded, cache.kv, context, of, None)
    assert not got[9:].any() and not got[:9].isnan().any()


def test_a_trial_catches_what_errs(monkeypatch: pytest.MonkeyPatch) -> None:
    of = spec(4, 2, 16, dtype=BF16)
    use(monkeypatch, wrong="unified_attention")
    assert "is off by" in str(aiter.trial(of, torch.device("cpu")))
    use(monkeypatch, "unified_attention")
    assert aiter.trial(of, torch.device("cpu")) == "AITER lacks unified_attention"
    monkeypatch.setattr(aiter, "library_function", lambda name: lambda **given: 1 / 0)
    assert "fails on a small step: ZeroDivisionError" in str(aiter.trial(of, torch.device("cpu")))


@pytest.mark.parametrize(("arch", "why"), [("gfx942:sramecc+:xnack-", None), ("gfx1100", "no kernels for gfx1100")])
def test_compiled_kernels_are_tried_where_they_are(arch: str, why: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Elsewhere a launch may end the process, and no trial would come back to say so."""
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(gcnArchName=arch))
    said = aiter._of_chip(torch.device("cuda"))
    assert said is None if why is None else why in str(said)


def test_a_trial_takes_both_kernels(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library shares requests out where tables are wide and each brings one token; that one may fail alone."""
    seen: list[tuple[int, int]] = []
    real = aiter.library_function("unified_attention")

    def noting(**given: Any) -> Any:
        seen.append((given["max_seqlen_q"], given["max_seqlen_k"]))
        return real(**given)

    monkeypatch.setattr(aiter, "library_function", lambda name: noting)
    assert aiter.trial(spec(4, 2, 16, dtype=BF16), torch.device("cpu")) is None
    assert seen[0][0] > 1 and seen[1][0] == 1 and seen[1][1] > 512


def test_all_reasons_of_a_layer_are_told() -> None:
    assert aiter.refusals(spec(4, 2, 16, dtype=BF16)) == []
    assert "windows" in aiter.refusals(spec(4, 2, 16, dtype=BF16, window=8))[0]
    said = aiter.refusals(spec(4, 2, 16, dtype=torch.float32, kv_dtype=torch.int8, alibi=True))
    assert said == ["queries in torch.float32", "a cache in torch.int8", "slopes (ALiBi)"]


def test_an_engine_with_it_gives_the_tokens_of_one_without(client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention, norms and a mixture of experts, in bfloat16, from captured steps."""
    sizes = {"hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 1}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2}
    tiny = make("mixtral", {**next(iter(FAMILIES["mixtral"].values())), **sizes})
    without: EngineClient = client(tiny, fake_platform(), **SETTINGS, dtype="bfloat16")
    want = decoded(without)
    made = use(monkeypatch)
    platform = fake_platform()
    platform.op_priority = dict.fromkeys(("rms_norm", "add_rms_norm", "experts"), ("aiter",))
    for op in platform.op_priority:
        monkeypatch.setitem(Op.registry[op].probes, "aiter", lambda: None)
    engine: EngineClient = client(tiny, platform, **SETTINGS, dtype="bfloat16")
    assert decoded(engine) == want
    assert set(made.calls) == {"rms_norm", "rmsnorm2d_fwd_with_add", "fused_moe", "unified_attention"}
    assert platform._fake.replays > 0


def test_binding_names_what_was_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, "rms_norm")
    ops = bind({"rms_norm": ("aiter",)})
    assert ops.choice("rms_norm").provider == "reference"
    assert ops.choice("rms_norm").rejected == (("aiter", "AITER lacks rms_norm"),)
