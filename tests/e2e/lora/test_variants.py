"""Adapters that are more than A and B beside products, against transformers and PEFT, alone and beside others."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel

from quintet import LoRARequest
from quintet_tools.checkpoints.tiny import FAMILIES, Tiny, make
from tests.e2e.lora.adapters import PROMPTS, adapted, ask, assert_equal_to, logits_of, request_of, served, tokens_of

BIASED = {**FAMILIES["llama"]["plain"], "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False}
PRODUCTS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
VARIANTS: dict[str, dict[str, Any]] = {
    "dora": {"target_modules": PRODUCTS, "use_dora": True},
    "dora of the head": {"target_modules": ["lm_head", "o_proj"], "use_dora": True, "use_rslora": True},
    "lora_bias": {"target_modules": PRODUCTS, "lora_bias": True},
    "embedding": {"target_modules": ["embed_tokens", "v_proj"]},
    "embedding alone": {"target_modules": ["embed_tokens"]},
    "embedding and head": {"target_modules": ["embed_tokens", "lm_head"], "rank_pattern": {"lm_head": 5}},
    "dora of the embedding": {"target_modules": ["embed_tokens", "up_proj"], "use_dora": True},
}
SHARED = [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}]
FAMILY_CASES = [  # fused products, Conv1D, a scaled and tied embedding, an embedding that is projected
    ("phi3", "plain", {"target_modules": ["qkv_proj", "gate_up_proj", "down_proj"], "use_dora": True}),
    ("gpt2", "plain", {"target_modules": ["c_attn", "c_proj", "c_fc"], "use_dora": True, "fan_in_fan_out": True}),
    ("gpt2", "plain", {"target_modules": ["wte", "c_fc"], "fan_in_fan_out": True}),
    ("gemma3_text", None, {"target_modules": ["embed_tokens", "q_proj"]}),
    ("gemma3_text", None, {"target_modules": ["embed_tokens", "q_proj", "down_proj"], "use_dora": True}),
    ("opt", None, {"target_modules": ["embed_tokens", "fc1", "fc2"], "use_dora": True}),
    ("qwen2", None, {"target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"], "lora_bias": True}),
]


@pytest.fixture(scope="module")
def tiny() -> Tiny:
    return make("llama", BIASED)


@pytest.fixture(scope="module")
def variants(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Any, LoRARequest]]:
    """PEFT's model of each, and its request; and one of plain LoRA."""
    found = {}
    for seed, (name, settings) in enumerate({**VARIANTS, "plain": {"target_modules": PRODUCTS}}.items()):
        folder = tmp_path_factory.mktemp("adapter") / name.replace(" ", "-")
        settings = dict(settings)
        found[name] = (
            adapted(tiny.reference, settings.pop("target_modules"), folder, seed, **settings),
            request_of(folder),
        )
    return found


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_tokens_are_those_of_peft(variant: str, tiny: Tiny, variants: dict[str, tuple[Any, LoRARequest]]) -> None:
    theirs, request = variants[variant]
    ids = [*PROMPTS[0], 4]
    assert (logits_of(theirs, ids) - tiny.logits(ids)).abs().max() > 0.1, "this adapter changes nothing to be seen"
    with served(tiny) as llm:
        for _ in range(3):  # steps that are recorded, proven and replayed
            assert_equal_to(theirs, ask(llm, PROMPTS, request))
            assert_equal_to(tiny.reference, ask(llm, PROMPTS, None))


def mixed_of(variants: dict[str, tuple[Any, LoRARequest]]) -> list[LoRARequest | None]:
    return [None, *(request for _, request in variants.values())]


def test_a_batch_of_all_equals_each_alone(tiny: Tiny, variants: dict[str, tuple[Any, LoRARequest]]) -> None:
    mixed = mixed_of(variants)
    with served(tiny, max_loras=len(variants), enable_prefix_caching=False) as llm:
        want = [tokens_of(ask(llm, [PROMPTS[0]], each))[0] for each in mixed]
        assert len({*map(tuple, want)}) > len(mixed) // 2, "most adapters say the same"
        for _ in range(3):
            assert tokens_of(ask(llm, [PROMPTS[0]] * len(mixed), mixed)) == want
    with served(tiny, max_loras=2, max_num_batched_tokens=4, max_num_seqs=4) as llm:  # chunks, and slots in turn
        assert tokens_of(ask(llm, [PROMPTS[0]] * len(mixed), mixed)) == want


@pytest.mark.parametrize("settings", SHARED, ids=lambda each: next(iter(each)))
def test_ranks_give_the_tokens_of_one(
    settings: dict[str, Any], tiny: Tiny, variants: dict[str, tuple[Any, LoRARequest]]
) -> None:
    mixed = mixed_of(variants)
    with served(tiny, max_loras=3) as llm:
        want = tokens_of(ask(llm, [PROMPTS[0]] * len(mixed), mixed))
    with served(tiny, max_loras=3, **settings) as llm:
        for _ in range(3):
            assert tokens_of(ask(llm, [PROMPTS[0]] * len(mixed), mixed)) == want


@pytest.mark.parametrize(("family", "variant", "settings"), FAMILY_CASES)
def test_other_families_give_the_tokens_of_peft(
    family: str, variant: str | None, settings: dict[str, Any], tmp_path: Path
) -> None:
    tiny = make(family, FAMILIES[family][variant or next(iter(FAMILIES[family]))])
    settings = dict(settings)
    theirs = adapted(tiny.reference, settings.pop("target_modules"), tmp_path / "adapter", **settings)
    with served(tiny) as llm:
        assert_equal_to(theirs, ask(llm, PROMPTS, request_of(tmp_path / "adapter")))
        assert_equal_to(tiny.reference, ask(llm, PROMPTS, None))


def test_dora_follows_the_weights_that_the_model_has(
    tiny: Tiny, variants: dict[str, tuple[Any, LoRARequest]], tmp_path: Path
) -> None:
    """Factors depend on the model's weights: with other files they are PEFT's on these, with no files it is refused."""
    other = copy.deepcopy(tiny.reference)
    torch.manual_seed(9)
    for parameter in other.parameters():
        parameter.data += 0.3 * parameter.data.std() * torch.randn_like(parameter)
    other.save_pretrained(tmp_path / "other")
    _, request = variants["dora"]
    theirs = PeftModel.from_pretrained(copy.deepcopy(other), request.lora_path).eval()
    with served(tiny) as llm:
        ask(llm, PROMPTS, request)
        llm.reload_weights(str(tmp_path / "other"))
        assert_equal_to(theirs, ask(llm, PROMPTS, request))
        llm.update_weights([("model.norm.weight", other.model.norm.weight.data.clone())], partial=True)
        with pytest.raises(ValueError, match="depend on the model's weights, which were replaced while the engine ran"):
            tokens_of(ask(llm, PROMPTS, request))
        assert tokens_of(ask(llm, PROMPTS, variants["embedding"][1]))
