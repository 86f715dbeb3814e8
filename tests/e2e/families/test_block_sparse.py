"""Block-sparse attention (MiniMax-M3, Qwen4-Exp): requests of more tokens than the blocks that an indexer chooses."""

import copy
import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from quintet import LLM, SamplingParams
from quintet.conformance.harness.batches import AttentionRequest, RandomKVCache, spec
from quintet.conformance.harness.worker_runner import random_prompts
from quintet.engine.executor.model_part import ModelSizes
from quintet.engine.executor.worker import Worker
from quintet.interface.types import BlockChoiceSpec
from quintet.ops.sparse.blocks import choose_blocks
from quintet.platforms.cpu import PLATFORM
from quintet_tools.checkpoints.derived_families import KIN
from quintet_tools.checkpoints.tiny import VOCAB, Tiny, make
from tests.helpers.platforms.run_model import Runner

SERVED = 256
M3 = {**KIN["minimax_m3_vl_text"]["plain"], "max_position_embeddings": SERVED}
CONFIGS: dict[str, tuple[str, dict[str, Any], int]] = {  # family, entries, and the tokens that all blocks have
    "MiniMax-M3": ("minimax_m3_vl_text", M3, 32),
    "MiniMax-M3, one choice": ("minimax_m3_vl_text", {**M3, "index_n_heads": 1, "index_local_blocks": 2}, 32),
    "MiniMax-M3, blocks of pages": ("minimax_m3_vl_text", {**M3, "index_block_size": 32, "index_topk_blocks": 2}, 64),
}
RANKS = {"linear_num_key_heads": 2, "linear_num_value_heads": 4}  # which two ranks can share
QWEN4 = {**KIN["qwen4_exp_text"]["plain"], **RANKS, "max_position_embeddings": SERVED}
CONFIGS |= {
    "Qwen4-Exp": ("qwen4_exp_text", QWEN4, 27),
    "Qwen4-Exp, 4-grams, one stream more": (
        "qwen4_exp_text",
        {**QWEN4, "ngram_size": 4, "heads_per_ngram": 1, "hc_count": 4, "indexer_compress_ratio": 8},
        31,
    ),
}  # fmt: skip
ENGINES: dict[str, dict[str, Any]] = {
    "batched": {},
    "chunked": {"max_num_batched_tokens": 13, "max_num_seqs": 5},
    "preempted": {"num_pages": 24, "enable_prefix_caching": False},
    "two ranks": {"tensor_parallel_size": 2},
    "two stages": {"pipeline_parallel_size": 2},
}


@functools.cache
def tiny(name: str) -> Tiny:
    family, entries, _ = CONFIGS[name]
    return make(family, entries)


def lengths(name: str) -> tuple[int, ...]:
    """Shorter and longer than the tokens that an indexer covers."""
    covered = CONFIGS[name][2]
    return (150, 3, covered, covered + 1, 77)


def generated(name: str, prompts: list[list[int]], **settings: Any) -> list[list[int]]:
    llm = LLM(
        str(tiny(name).folder), device="cpu", dtype="float32", skip_tokenizer_init=True, use_tqdm=False,
        **{"num_pages": 100, **settings},
    )  # fmt: skip
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, detokenize=False)
    for _ in range(2):  # the second time beginnings are cached, and steps come again
        outputs = llm.generate([{"prompt_token_ids": each} for each in prompts], params, use_tqdm=False)
    llm.close()
    return [list(each.outputs[0].token_ids) for each in outputs]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", CONFIGS)
def test_tokens_equal_transformers(name: str, engine: str) -> None:
    prompts = random_prompts(4, lengths(name), VOCAB)
    found = generated(name, prompts, **ENGINES[engine])
    for prompt, tokens in zip(prompts, found, strict=True):
        reference = tiny(name).logits(prompt + tokens)
        assert reference[len(prompt) - 1 : -1].argmax(-1).tolist() == tokens


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_equal_transformers_and_bits_do_not_depend_on_the_batch(name: str) -> None:
    run, prompts = Runner(tiny(name), max_model_len=SERVED), random_prompts(1, lengths(name), VOCAB)
    for prompt, together in zip(prompts, run.prompts(prompts), strict=True):
        reference = tiny(name).logits(prompt)
        torch.testing.assert_close(together, reference, rtol=0, atol=1e-4 * float(reference.std()))
        alone = run.prompts([prompt])[0]
        chunks = [run.step({0: prompt[at : at + 7]})[0] for at in range(0, len(prompt), 7)]
        run.finish(0)
        assert torch.equal(alone, together) and torch.equal(alone, torch.cat(chunks))


@pytest.mark.parametrize("name", CONFIGS)
def test_requests_of_no_more_tokens_than_the_blocks_have_need_no_indexer(name: str) -> None:
    covered = CONFIGS[name][2]
    run, [prompt] = Runner(tiny(name), max_model_len=covered), random_prompts(1, (covered,), VOCAB)
    assert not any(each.endswith("indexer.queries") for each, _ in run.worker.model.named_modules())
    reference = tiny(name).logits(prompt)
    torch.testing.assert_close(run.prompts([prompt])[0], reference, rtol=0, atol=1e-4 * float(reference.std()))


def test_minimax_m3_reads_minimaxs_own_names(tmp_path: Path) -> None:
    """Those of the published files: experts one by one, gate and up apart, indexers' parts beside attention's."""
    made: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(tiny("MiniMax-M3").folder / "model.safetensors").items():
        own = name.replace(".indexer.", ".index_")
        if ".1.mlp." in own or ".2.mlp." in own:
            own = own.replace(".mlp.gate.e_score", ".mlp.e_score").replace(".mlp.", ".block_sparse_moe.")
        own = f"language_model.{own}"
        if own.endswith("gate_up_proj.weight"):
            for part, half in zip(("gate", "up"), tensor.chunk(2), strict=True):
                made[own.replace("gate_up", part)] = half.clone()
        elif own.endswith((".experts.gate_up_proj", ".experts.down_proj")):
            stem, word = own.rsplit(".", 1)
            for expert, matrix in enumerate(tensor):
                parts = dict(zip(("w1", "w3"), matrix.chunk(2), strict=True)) if word != "down_proj" else {"w2": matrix}
                made |= {f"{stem}.{expert}.{part}.weight": each.clone() for part, each in parts.items()}
        else:
            made[own] = tensor
    assert "language_model.model.layers.1.block_sparse_moe.experts.0.w1.weight" in made
    save_file(made, tmp_path / "model.safetensors")
    [prompt] = random_prompts(1, (60,), VOCAB)
    found = Runner(replace(tiny("MiniMax-M3"), folder=tmp_path), max_model_len=SERVED).prompts([prompt])[0]
    reference = tiny("MiniMax-M3").logits(prompt)
    torch.testing.assert_close(found, reference, rtol=0, atol=1e-4 * float(reference.std()))


def test_an_indexer_matters_behind_the_tokens_of_its_blocks() -> None:
    """Else the tests above would pass without one."""
    name = "MiniMax-M3"
    [prompt], every = random_prompts(1, (100,), VOCAB), copy.deepcopy(tiny(name).reference)
    for module in every.modules():
        if hasattr(module, "topk_blocks"):
            module.topk_blocks = SERVED
    dense = replace(tiny(name), reference=every).logits(prompt)
    found = Runner(tiny(name), max_model_len=SERVED).prompts([prompt])[0]
    torch.testing.assert_close(found[:32], dense[:32], rtol=0, atol=1e-4 * float(dense.std()))
    assert (found - dense)[32:].abs().max() > 0.1 * dense.std()


def test_a_key_that_is_not_a_number_is_chosen_and_fails_no_step() -> None:
    cache = RandomKVCache(spec(2, 1, 8, page_size=16, shared=8), [40])
    q, context = cache.batch({0: AttentionRequest(0, 40)})
    cache.kv[context.group.block_table[0, 0], 0, 0, 3] = torch.nan
    given = (q, cache.kv, context, BlockChoiceSpec("choose_blocks", 8, 4, 3, torch.float32, 16, 1))
    found = choose_blocks.providers["torch"](*given)
    assert torch.equal(found, choose_blocks.reference(*given)) and (found[8:] == 0).any(-1).all()


def test_platforms_without_chosen_blocks_serve_short_requests_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PLATFORM, "optional_spec_fields", PLATFORM.optional_spec_fields - {"chosen_blocks"})
    config = AutoConfig.for_model("minimax_m3_vl_text", **M3)
    Worker(PLATFORM(), config, ModelSizes(torch.float32, 16, 32))
    with pytest.raises(ValueError, match="set max_model_len to 32 or less, or use device='cpu'"):
        Worker(PLATFORM(), config, ModelSizes(torch.float32, 16, 33))


@pytest.mark.parametrize(
    ("entries", "error"),
    [
        ({"index_n_heads": 2}, "an indexer of 2 heads chooses blocks for 3 KV heads"),
        ({"index_local_blocks": 5}, "5 of 4 chosen blocks are the last ones"),
        ({"index_local_blocks": 0}, "0 of 4 chosen blocks are the last ones"),
        ({"swiglu_limit": 0.0}, "gates have the limit 0.0; it must be above 0"),
    ],
)
def test_indexers_that_are_not_computed_are_refused(entries: dict[str, int], error: str) -> None:
    config = AutoConfig.for_model("minimax_m3_vl_text", **{**M3, **entries})
    with pytest.raises(ValueError, match=error):
        Worker(PLATFORM(), config, ModelSizes(torch.float32, 16, SERVED))
