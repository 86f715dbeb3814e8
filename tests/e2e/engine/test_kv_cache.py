"""A KV cache in int8, fp8 and int4 end to end: more tokens in the same memory, and nearly the same numbers."""

import functools
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from quintet import LLM, SamplingParams
from quintet.config import BUNDLED, EngineConfig
from quintet.conformance.harness.worker_runner import random_prompts
from quintet.engine.executor.model_part import ModelSizes
from quintet.engine.executor.worker import Worker
from quintet.engine.startup import prepare
from quintet.interface.types import INT4
from quintet.layers.attention.kv_scales import KVScales
from quintet_tools.checkpoints.tiny import FAMILIES, PLAIN, SERVED, Tiny, make, variant
from tests.e2e.engine.test_bundled import CASES, GREEDY, alike, as_expected
from tests.helpers.platforms.run_model import Runner

CACHED = {"int8": torch.int8, "fp8": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2, "int4": INT4}


@functools.cache
def bundled(cached: str) -> LLM:
    return LLM(
        BUNDLED, device="cpu", dtype="float32", use_tqdm=False, kv_cache_memory_bytes="64M", kv_cache_dtype=cached
    )


def pages(dtype: str, cached: str) -> tuple[int, int]:
    """How many fit in 4 MiB, and the size of one."""
    sizes = {"kv_cache_memory_bytes": 4 << 20, "max_model_len": "auto"}
    plan = prepare(EngineConfig(device="cpu", dtype=dtype, kv_cache_dtype=cached, **sizes)).memory_plan
    return plan.num_pages, plan.model_memory.page_bytes


@pytest.mark.parametrize(("dtype", "bytes_"), [("float32", 4), ("bfloat16", 2)])
def test_the_plan_counts_the_smaller_pages(dtype: str, bytes_: int) -> None:
    (plain, page), (int8, int8_page), (fp8, fp8_page), wide, (int4, int4_page) = (
        pages(dtype, each) for each in ("auto", *CACHED)
    )
    assert wide == (fp8, fp8_page)
    config = prepare(EngineConfig(device="cpu")).hf_config
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    assert fp8_page * bytes_ == page
    assert int8_page * bytes_ * dim == page * (dim + 4)  # a scale of four bytes for each row of numbers
    assert int4_page * bytes_ * dim == page * (dim // 2 + 4 * -(-dim // 32))  # codes, and two numbers for 32 of them
    assert int4 == (4 << 20) // int4_page > fp8
    assert fp8 == (4 << 20) // fp8_page > int8 == (4 << 20) // int8_page > plain == (4 << 20) // page


@pytest.mark.parametrize("cached", CACHED)
def test_the_cache_that_is_made_has_the_planned_size(cached: str) -> None:
    tiny = variant("llama", "plain")
    run = Runner(tiny)
    made = Worker(run.worker.platform, tiny.config, ModelSizes(torch.float32, 16, SERVED, kv_dtype=CACHED[cached]))
    made.load(tiny.folder, 10, [], progress=False)
    assert (
        sum(each.nbytes for each in made._state)
        == 10 * made.kv_cache_layout.page_bytes
        < 10 * run.worker.kv_cache_layout.page_bytes // 2
    )
    assert {each.dtype for each in made._state} == {CACHED[cached]}


@pytest.mark.parametrize("cached", CACHED)
def test_the_bundled_model_does_everything_right(cached: str) -> None:
    """But for what 4 bits lose: one sum, when this was written."""
    llm, wrong = bundled(cached), []
    for options, cases in alike(CASES):
        outputs = llm.chat([case["messages"] for case in cases], GREEDY, use_tqdm=False, **options)
        texts = [(case, output.outputs[0].text) for case, output in zip(cases, outputs, strict=True)]
        wrong += [f"{case['name']}: {text!r}" for case, text in texts if not as_expected(text, case["expect"])]
    assert len(wrong) <= 2 * (cached == "int4"), f"{len(wrong)} of {len(CASES)}:\n" + "\n".join(wrong)


def scores(cached: str, prompt: str) -> Tensor:
    """Log-probabilities of the prompt's tokens."""
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    (output,) = bundled(cached).generate(prompt, params, use_tqdm=False)
    assert output.prompt_logprobs is not None
    return torch.tensor([next(iter(each.values())).logprob for each in output.prompt_logprobs if each])


@pytest.mark.parametrize(("cached", "most"), [("int8", 0.02), ("fp8", 0.2), ("fp8_e5m2", 0.4), ("int4", 0.4)])
def test_log_probabilities_hardly_move(cached: str, most: float) -> None:
    """The mean over a text's tokens of how far they do."""
    text = "Once upon a time there was a little dog. The dog liked to run in the park with a girl. One day, it rained."
    moved = (scores(cached, text) - scores("auto", text)).abs()
    assert 0 < float(moved.mean()) <= most


@pytest.mark.parametrize(("cached", "most"), [("int8", 0.02), ("fp8", 0.15), ("fp8_e5m2", 0.3), ("int4", 0.3)])
@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3"])
def test_logits_hardly_move(family: str, cached: str, most: float) -> None:
    """Of random weights, relative to the spread of the logits; the prompt whole, and a token at a time."""
    tiny, prompt = variant(family, next(iter(FAMILIES[family]))), random_prompts(3, (60,), 101)[0]
    want = Runner(tiny).prompts([prompt])[0]
    run = Runner(tiny, kv_dtype=CACHED[cached])
    got = run.prompts([prompt])[0]
    assert 0 < float((got - want).std() / want.std()) <= most
    steps = [run.step({"one": [token]})["one"] for token in prompt]
    assert torch.equal(torch.cat(steps), got)


# ------------------------------------------------------------------------------------------------------------- scales


def scaled(tmp_path: Path, factor: float, names: Sequence[str], per_head: bool = False) -> tuple[Tiny, Tiny]:
    """A model of large K and V, which others make up for; and the same with scales in its checkpoint, called so."""
    tiny = make("llama", {**PLAIN, "num_attention_heads": 4, "num_key_value_heads": 2})
    tensors = load_file(tiny.folder / "model.safetensors")
    for name in [each for each in tensors if each.endswith(("k_proj.weight", "v_proj.weight"))]:
        tensors[name] = tensors[name] * factor
    for name in [each for each in tensors if each.endswith(("q_proj.weight", "o_proj.weight"))]:
        tensors[name] = tensors[name] / factor  # so that nothing else changes
    for place, scales in (("plain", False), ("scaled", True)):
        (tmp_path / place).mkdir()
        shutil.copy(tiny.folder / "config.json", tmp_path / place)
        shape = (2,) if per_head else ()
        more = {
            f"model.layers.{layer}.self_attn.{name}": torch.full(shape, factor / 4)
            for layer in range(tiny.config.num_hidden_layers)
            for name in names
        }
        save_file(tensors | (more if scales else {}), tmp_path / place / "model.safetensors")
    return Tiny(tmp_path / "plain", tiny.config, tiny.reference), Tiny(tmp_path / "scaled", tiny.config, tiny.reference)


def logprobs(tiny: Tiny, **settings: Any) -> Tensor:
    small = {"dtype": "float32", "kv_cache_memory_bytes": "16M", "max_model_len": 128, "use_tqdm": False}
    llm = LLM(str(tiny.folder), device="cpu", skip_tokenizer_init=True, **small, **settings)
    (prompt,) = random_prompts(3, (60,), 101)
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, detokenize=False)
    (output,) = llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
    assert output.prompt_logprobs is not None
    return torch.tensor([next(iter(each.values())).logprob for each in output.prompt_logprobs if each])


NAMES = [
    ("k_scale", "v_scale"),
    ("attn.k_scale", "attn.v_scale"),
    ("k_proj.k_scale", "v_proj.v_scale"),
    ("k_proj.output_scale", "v_proj.output_scale"),
    ("kv_scale",),
]


@pytest.mark.parametrize("per_head", [False, True])
@pytest.mark.parametrize("names", NAMES)
def test_a_checkpoints_scales_save_what_fp8_would_cut_off(
    names: tuple[str, ...], per_head: bool, tmp_path: Path
) -> None:
    """Numbers beyond 448 are cut to it without them."""
    plain, with_scales = scaled(tmp_path, 4096.0, names, per_head)
    exact = logprobs(plain)
    off = {
        name: float((logprobs(each, kv_cache_dtype="fp8") - exact).abs().mean())
        for name, each in (("without", plain), ("with", with_scales))
    }
    assert off["with"] < off["without"] / 4
    assert torch.equal(logprobs(with_scales), exact)  # a cache in floats passes them over


def test_computed_scales_save_it_too(tmp_path: Path) -> None:
    plain, _ = scaled(tmp_path, 4096.0, ["k_scale", "v_scale"])
    exact, cut = logprobs(plain), logprobs(plain, kv_cache_dtype="fp8")
    computed = logprobs(plain, kv_cache_dtype="fp8", calculate_kv_scales=True)
    assert float((computed - exact).abs().mean()) < float((cut - exact).abs().mean()) / 4


def test_all_of_the_first_prompt_is_looked_at_however_it_is_cut(tmp_path: Path) -> None:
    """Steps that come again are replayed, and what is replayed looks at nothing."""
    plain, _ = scaled(tmp_path, 4096.0, ["k_scale", "v_scale"])
    whole, cut = computed_scales(plain), computed_scales(plain, max_num_batched_tokens=16, page_size=16)
    assert whole.keys() == cut.keys() and whole
    assert all(torch.equal(whole[name], cut[name]) for name in whole)


def computed_scales(tiny: Tiny, **settings: Any) -> dict[str, Tensor]:
    small = {"dtype": "float32", "kv_cache_memory_bytes": "16M", "max_model_len": 128, "max_num_seqs": 4, **settings}
    with LLM(
        str(tiny.folder), device="cpu", skip_tokenizer_init=True, use_tqdm=False, kv_cache_dtype="fp8",
        calculate_kv_scales=True, **small,
    ) as llm:  # fmt: skip
        layers = dict(llm._client.engine_plan.ranks.workers[0].model.named_modules())
        found = {path: each for path, each in layers.items() if isinstance(each, KVScales)}
        return {f"{path}.{name}": scale.clone() for path, each in found.items() for name, scale in each._scales.items()}


@pytest.mark.parametrize(("value", "shape"), [(0.0, ()), (float("nan"), (2,)), (1.0, (3,))])
def test_a_scale_that_cannot_be_is_named(value: float, shape: tuple[int, ...], tmp_path: Path) -> None:
    _, tiny = scaled(tmp_path, 4.0, ["k_scale", "v_scale"])
    tensors = load_file(tiny.folder / "model.safetensors")
    tensors["model.layers.1.self_attn.v_scale"] = torch.full(shape, value)
    save_file(tensors, tiny.folder / "model.safetensors")
    with pytest.raises(ValueError, match=r"layers\.1\.self_attn\.v_scale (is to be above 0|has 3 scales for 2 heads)"):
        logprobs(tiny, kv_cache_dtype="fp8")


def test_scales_are_not_computed_for_a_cache_that_has_none() -> None:
    with pytest.raises(ValueError, match="calculate_kv_scales is for kv_cache_dtype='fp8'"):
        EngineConfig(calculate_kv_scales=True)
