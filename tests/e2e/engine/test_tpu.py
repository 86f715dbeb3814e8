"""The TPU platform beside the CPU platform: the same tokens from the same models, on one device and on eight.

On JAX's CPU devices, in float32: two implementations add in another order, and half precision would show it.
"""

import subprocess
import sys
from typing import Any

import pytest
import torch

from quintet import SamplingParams
from quintet.chat.prompts import Prompt
from quintet.conformance.harness.worker_runner import random_prompts
from quintet_tools.checkpoints.tiny import FAMILIES, PLAIN, VARIANTS, VOCAB, Tiny, make, variant
from tests.e2e.engine.test_oracle import ENGINES, client, mix, run
from tests.helpers.platforms import tpu
from tests.helpers.platforms.null_engine import drain
from tests.helpers.platforms.run_model import Runner

pytestmark = tpu.needs_jax

PROMPTS = random_prompts(8, (23, 1, 40, 7), VOCAB)


def assert_same_tokens(tiny: Tiny, devices: int, share: float = 1e-4, **settings: Any) -> None:
    """`share`: of the logits' spread, by which they may differ."""
    wanted = Runner(tiny, **settings)
    got = Runner(tiny, platform=tpu.platform(devices), sizes=(128,), **settings)
    for ours, theirs in zip(got.prompts(PROMPTS), wanted.prompts(PROMPTS), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=share * float(theirs.std()))
    assert got.greedy(PROMPTS, 5) == wanted.greedy(PROMPTS, 5)


# the conformance kit holds the first of each family against transformers, and the CPU's tests hold all; what is left
# to see here is how layers are compiled, and many families are of the same layers
APART = (
    "gemma2", "gemma3n_text", "gpt2", "granitemoehybrid", "lfm2", "llama", "llama4_text", "mixtral", "opt",
    "qwen3_next",
)  # fmt: skip


def of_apart(family: str, *more: str) -> Any:
    return pytest.param(family, *more, marks=[] if family in APART else pytest.mark.sweep)


LATER = [of_apart(f, name) for f, name in VARIANTS if name != next(iter(FAMILIES[f]))]


@pytest.mark.grid(cases=3)
@pytest.mark.parametrize(("family", "name"), LATER)
def test_every_family_gives_the_cpu_platforms_tokens(family: str, name: str) -> None:
    """A recurrent state adds its tokens one after the other, so that what differs in the last digit grows with them."""
    assert_same_tokens(variant(family, name), 1, share=3e-4 if family == "qwen3_next" else 1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["kimi_linear", "olmo_hybrid"])
def test_delta_rules_of_kin_give_the_cpu_platforms_tokens(family: str) -> None:
    """A decay for each number of a key, and rates of learning above 1."""
    assert_same_tokens(variant(family, "plain"), 1, share=3e-4)


DIVISIBLE: dict[str, Any] = {
    "hidden_size": 64,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "intermediate_size": 96,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 32,
    "vocab_size": VOCAB + 3,
    "num_hidden_layers": 2,
}


@pytest.mark.slow
@pytest.mark.parametrize("family", map(of_apart, FAMILIES))
def test_on_eight_devices_what_does_not_divide_is_kept_whole(family: str) -> None:
    assert_same_tokens(variant(family, next(iter(FAMILIES[family]))), 8)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "mixtral", "olmo2", "olmoe", "phi3", "qwen3", "qwen2_moe", "qwen3_moe"])
def test_on_eight_devices_heads_and_features_are_cut(family: str) -> None:
    settings = {**FAMILIES[family]["plain"], **DIVISIBLE}
    settings.pop("head_dim", None)
    assert_same_tokens(make(family, settings), 8)


@pytest.mark.parametrize("page_size", [8, 32])
def test_page_sizes(page_size: int) -> None:
    assert_same_tokens(make("llama", PLAIN), 1, page_size=page_size)


@pytest.mark.slow
def test_layers_with_windows_give_pages_back_and_say_what_transformers_says() -> None:
    """Gemma 3: three groups share one tensor. In so few pages a request that kept all of them would find no room."""
    settings = {"max_model_len": 144, "page_size": 8, "max_num_seqs": 3, "max_num_batched_tokens": 32, "num_pages": 44}
    engine = client(
        ("gemma3_text", "plain", "float32", {}), "tpu", **settings, compilation_cache_dir=tpu.programs().name
    )
    worker = engine.engine_plan.ranks.workers[0]
    assert [kept.window for kept in worker.kv_cache_layout.groups] == [17, 17, None] and len(worker.layouts) == 1
    prompts = dict(enumerate(random_prompts(5, (5, 119, 33, 1, 70), VOCAB)))
    for key, prompt in prompts.items():
        params = SamplingParams(temperature=0, max_tokens=24, detokenize=False, ignore_eos=True)
        engine.add(str(key), Prompt(prompt), params)
    said = drain(engine)
    for key, prompt in prompts.items():
        ids = list(prompt)
        for _ in range(24):
            ids.append(int(variant("gemma3_text", "plain").logits(ids)[-1].argmax()))
        assert list(said[str(key)].outputs[0].token_ids) == ids[len(prompt) :]


@pytest.mark.slow
def test_the_bundled_model_says_the_same_on_both() -> None:
    """As a user would see it. In float32: in bfloat16 the platforms round elsewhere, and near ties fall either way."""
    command = [
        sys.executable,
        "-m",
        "quintet",
        "generate",
        "-q",
        "--max-tokens",
        "24",
        "--max-num-batched-tokens",
        "16",
        "--dtype",
        "float32",
    ]
    prompts = ["Once upon a time", "The capital of France is"]
    said = {}
    for device in ("cpu", "tpu"):
        flags = ["--device", device, "--compilation-cache-dir", tpu.programs().name]
        done = subprocess.run([*command, *flags, *prompts], capture_output=True, text=True, check=True)
        said[device] = done.stdout
    assert said["tpu"] == said["cpu"] and len(said["cpu"]) > 60


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "lfm2"])
def test_random_traffic_gets_the_cpu_platforms_tokens_and_compiles_nothing(family: str) -> None:
    """Every kind of sampling, arrivals at any time, chunks, preemption and the prefix cache, behind the host."""
    settings = {**ENGINES["preempted, cached, chunked"], "max_num_seqs": 8, "max_num_batched_tokens": 48}
    model = (family, "plain", "float32", dict[str, str]())
    engine = client(model, "tpu", **settings, compilation_cache_dir=tpu.programs().name)
    compiled, wanted = tpu.compilations(), client(model, **settings)
    for seed in range(3):
        ours, theirs = run(engine, mix(seed)), run(wanted, mix(seed))
        for name, (completions, _) in theirs.items():
            assert [each[:3] for each in ours[name][0]] == [each[:3] for each in completions], f"mix {seed}: {name}"
    assert compiled == []
    assert engine.engine.stats().scheduler.num_preemptions > 0
