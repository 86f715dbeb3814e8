"""Adapters of every product of every family, against transformers and PEFT, in float32."""

from pathlib import Path

import pytest

from quintet_tools.checkpoints.tiny import FAMILIES, make
from tests.e2e.lora.adapters import PROMPTS, adapted, ask, assert_equal_to, logits_of, products, request_of, served

QUICK = ("llama", "gpt2", "phi3", "opt", "gemma3_text", "granitemoehybrid")
NOT_BY_PEFT = {"mamba", "mamba2", "gemma3n_text"}  # PEFT refuses their modules, or takes lists of modules for one
CASES = [
    pytest.param(family, variant, marks=[] if family in QUICK and not at else pytest.mark.slow)
    for family, variants in FAMILIES.items()
    for at, variant in enumerate(variants)
    if family not in NOT_BY_PEFT
]


@pytest.mark.parametrize(("family", "variant"), CASES)
def test_an_adapter_of_all_products_gives_the_tokens_of_peft(family: str, variant: str, tmp_path: Path) -> None:
    tiny = make(family, FAMILIES[family][variant])
    targets = set(products(tiny.reference)) - {"kv_b_proj"}  # of a latent, multiplied into q and out
    if getattr(tiny.reference.get_output_embeddings(), "bias", None) is not None:
        targets.discard("lm_head")  # PEFT saves its bias with the adapter, which is refused
    theirs = adapted(tiny.reference, targets, tmp_path / "adapter")
    ids = [*PROMPTS[0], 4]
    moved = (logits_of(theirs, ids) - tiny.logits(ids)).abs().max()
    assert moved > 0.1, "this adapter changes nothing that could be seen"
    with served(tiny, lora_target_modules="all") as llm:
        assert_equal_to(theirs, ask(llm, PROMPTS, request_of(tmp_path / "adapter")))
        assert_equal_to(tiny.reference, ask(llm, PROMPTS, None))


@pytest.mark.parametrize(
    "settings", [{"use_rslora": True}, {"rank_pattern": {"q_proj": 5}, "alpha_pattern": {"v_proj": 3}}]
)
def test_ranks_and_scales_are_those_of_the_file(settings: dict[str, object], tmp_path: Path) -> None:
    tiny = make("llama", FAMILIES["llama"]["plain"])
    theirs = adapted(tiny.reference, {"q_proj", "v_proj", "down_proj"}, tmp_path / "adapter", **settings)
    with served(tiny) as llm:
        assert_equal_to(theirs, ask(llm, PROMPTS, request_of(tmp_path / "adapter")))
