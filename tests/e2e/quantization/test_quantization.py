"""The bundled model, quantized while it is loaded: how much of what it does right it still does, on each path."""

import functools
import subprocess
import sys

import pytest
import torch

from quintet import LLM, SamplingParams
from quintet.config import BUNDLED
from tests.e2e.engine.test_bundled import CASES, GREEDY, alike, as_expected

HOLD = {
    "int8": 0.97,
    "w8a8": 0.97,
    "int4": 0.93,
    "w4a8": 0.93,
}  # share of the cases, at least; all where this was tried


@functools.cache
def quantized(scheme: str, dtype: str) -> LLM:
    return LLM(BUNDLED, device="cpu", dtype=dtype, quantization=scheme, use_tqdm=False, kv_cache_memory_bytes="64M")


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("scheme", HOLD)
def test_most_of_the_behaviour_stays(scheme: str, dtype: str) -> None:
    llm, right = quantized(scheme, dtype), 0
    for options, cases in alike(CASES):
        outputs = llm.chat([case["messages"] for case in cases], GREEDY, use_tqdm=False, **options)
        right += sum(as_expected(o.outputs[0].text, c["expect"]) for o, c in zip(outputs, cases, strict=True))
    assert right >= HOLD[scheme] * len(CASES), f"{right} of {len(CASES)}"


@pytest.mark.parametrize("scheme", HOLD)
def test_a_quantized_model_is_smaller(scheme: str) -> None:
    plain = LLM(BUNDLED, device="cpu", use_tqdm=False, kv_cache_memory_bytes="64M")
    sizes = [llm._client.engine_plan.ranks.workers[0].weight_bytes for llm in (plain, quantized(scheme, "bfloat16"))]
    table = 2048 * 256 * 2  # the embedding stays as it is, beside a head of 8 bits
    assert sizes[1] < (0.56 if "8" == scheme[-1] and "4" not in scheme else 0.35) * (sizes[0] - table) + 2 * table


DRAWS = [{"temperature": 0}, {"seed": 3}, {"seed": 4, "top_p": 0.9, "top_k": 20, "repetition_penalty": 1.1}]


@pytest.mark.slow
def test_without_the_extension_the_reference_quantizes_multiplies_and_draws() -> None:
    """Slower, and to the same text."""
    code = (
        "import sys; sys.modules['quintet._cpu'] = None\n"
        "from quintet import LLM, SamplingParams\n"
        "llm = LLM(device='cpu', dtype='float32', quantization='int8', use_tqdm=False)\n"
        f"for given in {DRAWS}:\n"
        "    print(llm.generate('Once upon a time', SamplingParams(**given, max_tokens=24))[0].outputs[0].text)\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240)
    assert run.returncode == 0, run.stderr
    for given, came in zip(DRAWS, run.stdout.splitlines(), strict=True):
        want = quantized("int8", "float32").generate("Once upon a time", SamplingParams(**given, max_tokens=24))
        assert came == want[0].outputs[0].text


def test_weights_that_are_not_finite_are_refused_by_name() -> None:
    from quintet.interface.weights import CheckpointSlice, Weight
    from quintet.layers.quantization import ONLINE
    from quintet.platforms.cpu import PLATFORM

    part = CheckpointSlice("model.layers.0.mlp.down_proj.weight", (64, 64), ((0, 64),))
    weight = Weight("weight", (part,), 0, 0, torch.bfloat16, "linear", ONLINE["int4"])
    with pytest.raises(ValueError, match=r"model\.layers\.0\.mlp\.down_proj\.weight cannot be quantized: .*not finite"):
        PLATFORM().place(weight, {part.source: torch.full((64, 64), torch.nan)})
