"""GPTQ checkpoints and their kin from disk, against transformers' model of what they stand for."""

from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from quintet.conformance.check import NotSupported
from quintet.conformance.harness.worker_runner import random_prompts
from quintet_tools.checkpoints.tiny import PLAIN, VOCAB, Tiny, make
from tests.helpers.checkpoints.packed import gptq
from tests.helpers.platforms.engines import answers, continued, engine, forms_of, ranked
from tests.helpers.platforms.run_model import Runner

SIZES = {
    **PLAIN, "hidden_size": 128, "intermediate_size": 192, "num_attention_heads": 8, "num_key_value_heads": 4,
    "head_dim": 16, "num_hidden_layers": 2,
}  # fmt: skip
GPT2 = {
    "vocab_size": VOCAB, "n_embd": 128, "n_layer": 2, "n_head": 8, "n_positions": 128, "n_inner": 192,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
WHOLE_HEADS = {**SIZES, "num_key_value_heads": 8}
NEW_FALCON = {name: value for name, value in WHOLE_HEADS.items() if name != "head_dim"} | {
    "new_decoder_architecture": True,
    "num_kv_heads": 4,
    "bias": True,
}
DYNAMIC = {r"-:.*layers\.1\.mlp\..*": {}, r".*k_proj": {"bits": 8}, r"+:.*v_proj": {"bits": 2, "group_size": 32}}


def model(seed: int = 0, **more: Any) -> Tiny:
    return make("llama", {**SIZES, **more}, seed)


MADE: dict[str, Any] = {
    "2 bits": lambda seed=0: gptq(model(seed), 2, 32),
    "3 bits, asymmetric": lambda seed=0: gptq(model(seed), 3, 64, sym=False),
    "4 bits": lambda seed=0: gptq(model(seed), 4, 64),
    "4 bits of all, asymmetric": lambda seed=0: gptq(model(seed), 4, -1, sym=False, checkpoint_format="gptq_v2"),
    "4 bits in order": lambda seed=0: gptq(model(seed), 4, 32, desc_act=True),
    "8 bits": lambda seed=0: gptq(model(seed), 8, 32),
    "8 bits, asymmetric, in order": lambda seed=0: gptq(model(seed), 8, 64, sym=False, desc_act=True),
    "6 bits in planes": lambda seed=0: gptq(model(seed), 6, 64, checkpoint_format="gptq_p"),
    "biases": lambda seed=0: gptq(make("qwen2", SIZES, seed), 4, 64, sym=False),
    "inputs by outputs": lambda seed=0: gptq(make("gpt2", GPT2, seed), 4, 64, sym=False),
    "inputs by outputs, in order": lambda seed=0: gptq(make("gpt2", GPT2, seed), 8, 64, desc_act=True),
    "in strips": lambda seed=0: gptq(make("gpt_neox", WHOLE_HEADS, seed), 4, 64, sym=False),
    "strips of several heads": lambda seed=0: gptq(make("falcon", NEW_FALCON, seed), 8, 32),
    "some left out": lambda seed=0: gptq(model(seed), 4, 64, ["layers.1.mlp", "k_proj"]),
    "the head too": lambda seed=0: gptq(model(seed), 8, 32, lm_head=True),
}


@pytest.mark.parametrize("name", MADE)
def test_logits_are_those_of_what_the_checkpoint_stands_for(name: str) -> None:
    tiny = MADE[name]()
    prompts = random_prompts(3, (23, 1, 40), VOCAB)
    for prompt, logits in zip(prompts, Runner(tiny, quantization=forms_of(tiny)).prompts(prompts), strict=True):
        want = tiny.logits(prompt)
        torch.testing.assert_close(logits, want, rtol=0, atol=2e-3 * float(want.std()))


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize(
    "name",
    ["4 bits", "4 bits in order", "3 bits, asymmetric", "8 bits, asymmetric, in order", "in strips"],
)
def test_ranks_read_their_shares(name: str, ranks: int) -> None:
    """Where shares begin within groups and words, too."""
    tiny = MADE[name]()
    (prompt,) = random_prompts(3, (23,), VOCAB)
    want = tiny.logits(prompt)
    for logits in ranked(tiny, ranks, prompt):
        torch.testing.assert_close(logits, want, rtol=0, atol=2e-3 * float(want.std()))


# ---------------------------------------------------------------------------------------------------- whole engines


@pytest.mark.parametrize("name", ["4 bits", "4 bits in order", "the head too"])
def test_an_engine_reads_what_config_json_says(name: str) -> None:
    tiny = MADE[name]()
    with engine(tiny) as llm:
        assert answers(llm) == continued(tiny)
        assert any("checkpoint quantized by gptq" in each for each in llm._client.engine_plan.reasons)


def test_strips_whose_inputs_are_in_another_order_are_refused() -> None:
    tiny = gptq(make("gpt_neox", WHOLE_HEADS), 4, 32, desc_act=True)
    with pytest.raises(
        NotSupported, match=r"query_key_value is quantized with its inputs in another order \(desc_act\)"
    ):
        Runner(tiny, quantization=forms_of(tiny))


def test_biases_of_zeros_are_none() -> None:
    """AutoGPTQ gave every product one."""
    tiny = gptq(model(), 4, 64)
    tensors = load_file(tiny.folder / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.bias"
    save_file({**tensors, name: torch.zeros(192)}, tiny.folder / "model.safetensors")
    with engine(tiny) as llm:
        assert answers(llm) == continued(tiny)
    save_file({**tensors, name: torch.full((192,), 0.1)}, tiny.folder / "model.safetensors")
    with pytest.raises(ValueError, match=f"holds {name}, which this model has no place for"):
        engine(tiny)


BROKEN: list[tuple[str, Any, str]] = [
    ("qweight", lambda x: x[:-1], r"qweight is \[15, 192\], not \[16, 192\]"),
    ("qweight", lambda x: x.long(), "qweight is of I64, not of torch.int32"),
    ("qweight", lambda x: x[:0], r"qweight is \[0, 192\]"),
    ("scales", lambda x: x.int(), "scales is of torch.int32, not of floats"),
    ("scales", lambda x: x.repeat(2, 1), r"scales is \[4, 192\], not \[2, 192\]"),
    ("qzeros", lambda x: x[:, :3].contiguous(), r"qzeros is \[2, 3\], not \[2, 24\]"),
    ("g_idx", lambda x: x + 7, "g_idx says that an input is of group 8, and 128 inputs make groups 0 to 1"),
    ("g_idx", lambda x: x[:9] * 0, r"g_idx is \[9\], not \[128\]"),
    ("g_idx", lambda x: x.half(), "g_idx is of torch.float16, not of torch.int32"),
    ("g_idx", lambda x: x.view(2, 64), r"g_idx is \[2, 64\], not \[128\]"),
    ("qweight", None, r"lacks model\.layers\.0\.mlp\.up_proj"),
]


def named(value: Any) -> str:
    """Of a case; a function's name would hold its address."""
    return value[:30] if isinstance(value, str) else ""


@pytest.mark.parametrize(("end", "change", "message"), BROKEN, ids=named)
def test_tensors_that_do_not_fit_are_named(end: str, change: Any, message: str) -> None:
    tiny = gptq(model(), 4, 64, desc_act=True)
    tensors, name = load_file(tiny.folder / "model.safetensors"), f"model.layers.0.mlp.up_proj.{end}"
    broken = tensors.pop(name)
    if change is not None:
        tensors[name] = change(broken)
    save_file(tensors, tiny.folder / "model.safetensors")
    with pytest.raises(ValueError, match=message) as error:
        engine(tiny)
    assert "\n" not in str(error.value)
