"""int8 and int4 KV caches of models whose key projection has a large bias in a few channels (Qwen2.5)."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from quintet import LLM, SamplingParams
from quintet.conformance.harness.worker_runner import random_prompts
from quintet.interface.types import INT4
from quintet.layers.attention import key_scales
from quintet.layers.attention.key_scales import channel_scales
from quintet_tools.checkpoints.tiny import PLAIN, Tiny, make
from tests.helpers.platforms.run_model import Runner

SIZES = {**PLAIN, "hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}


@pytest.fixture
def biased(tmp_path: Path) -> Tiny:
    return with_biases(tmp_path, 1, 4)


def with_biases(tmp_path: Path, first: int, second: int) -> Tiny:
    """A Qwen2 of random weights in which two of the channels of each head of K are near 100."""
    tiny = make("qwen2", SIZES)
    tensors = load_file(tiny.folder / "model.safetensors")
    for name in [each for each in tensors if each.endswith("k_proj.bias")]:
        heads = tensors[name].reshape(2, -1)
        heads[:, first], heads[:, second] = 100.0, -80.0
        tensors[name] = heads.reshape(-1)
    shutil.copy(tiny.folder / "config.json", tmp_path)
    save_file(tensors, tmp_path / "model.safetensors")
    return Tiny(tmp_path, tiny.config, tiny.reference)


@pytest.mark.parametrize(("cached", "most"), [(torch.int8, 0.5), (INT4, 0.9)], ids=["int8", "int4"])
def test_logits_stay_nearer_to_those_of_a_float_cache(
    biased: Tiny, cached: torch.dtype, most: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = random_prompts(3, (60,), 101)[0]
    want = Runner(biased).prompts([prompt])[0]
    run = Runner(biased, kv_dtype=cached)
    got = run.prompts([prompt])[0]
    assert torch.equal(torch.cat([run.step({"one": [token]})["one"] for token in prompt]), got)
    monkeypatch.setattr(key_scales, "channel_scales", lambda bias, pairs: torch.ones_like(bias))
    alike = Runner(biased, kv_dtype=cached).prompts([prompt])[0]  # one scale for all channels
    assert 0 < float((got - want).std()) < most * float((alike - want).std())


def test_an_int4_cache_leaves_out_biases_that_rotary_hardly_turns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = with_biases(tmp_path, 31, 28)  # of heads of 64, whose last pairs are 31 and 63, 28 and 60
    prompt = random_prompts(3, (60,), 101)[0]
    want = Runner(slow).prompts([prompt])[0]
    got = Runner(slow, kv_dtype=INT4).prompts([prompt])[0]
    monkeypatch.setattr(key_scales, "SLOW", 0.0)
    kept = Runner(slow, kv_dtype=INT4).prompts([prompt])[0]
    assert 0 < float((got - want).std()) < 0.5 * float((kept - want).std())


@pytest.mark.parametrize("cached", ["int8", "int4"])
def test_two_ranks_give_the_tokens_of_one(biased: Tiny, cached: str) -> None:
    pytest.importorskip("quintet._cpu", reason="ranks on the CPU meet by the compiled extension")
    greedy = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, detokenize=False)
    settings = {
        "skip_tokenizer_init": True,
        "kv_cache_dtype": cached,
        "dtype": "float32",
        "kv_cache_memory_bytes": "16M",
    }
    found = []
    for ranks in (1, 2):
        llm = LLM(
            str(biased.folder), device="cpu", max_model_len=64, use_tqdm=False, tensor_parallel_size=ranks, **settings
        )
        [output] = llm.generate([{"prompt_token_ids": [5, 6, 7]}], greedy, use_tqdm=False)
        found.append(output.outputs[0].token_ids)
    assert found[0] == found[1]


def test_scales_are_powers_of_two_of_what_rotary_makes_of_a_pair() -> None:
    bias = torch.tensor([[60.0, 1.0, 80.0, -2.0], [0.0, 3.0, 0.0, 4.0]])
    assert channel_scales(bias, (2, 3, 0, 1)).tolist() == [
        [16.0, 1.0, 16.0, 1.0],
        [1.0] * 4,
    ]  # from 100 / 8


def test_a_channel_that_does_not_turn_is_its_own() -> None:
    assert channel_scales(torch.tensor([[64.0, 0.0]]), (0, 1)).tolist() == [[8.0, 1.0]]
