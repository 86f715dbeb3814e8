"""What GPTQModel, AutoRound and AutoAWQ wrote: the weights and logits that those libraries have of the same files."""

from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from quintet import LLM, SamplingParams
from quintet.interface.platform import Capabilities
from quintet.interface.weights import CheckpointSlice, ShardRange
from quintet.layers.quantization import QuantizationPlan
from quintet.ops.quantized import dequantized
from quintet.platforms.cpu import PLATFORM
from tests.helpers.checkpoints.fixtures import DATA, plan, tiny, wanted
from tests.helpers.platforms.run_model import Runner

WRITTEN = ["gptq_ordered", "gptq_v1", "gptq_v2", "gptq_planes"]
WRITTEN += ["auto_round_gptq", "auto_round_raw", "auto_round_awq", "auto_round_five"]
WRITTEN += ["awq_gemm", "awq_gemv", "awq_gemv_fast", "awq_marlin"]


def shape(name: str, module: str) -> tuple[int, int]:
    """As config.json has it."""
    said, end = tiny(name).config, module.rpartition(".")[2]
    heads, hidden = said.head_dim or said.hidden_size // said.num_attention_heads, said.hidden_size
    return {
        "q_proj": (said.num_attention_heads * heads, hidden),
        "k_proj": (said.num_key_value_heads * heads, hidden),
        "v_proj": (said.num_key_value_heads * heads, hidden),
        "o_proj": (hidden, said.num_attention_heads * heads),
        "gate_proj": (said.intermediate_size, hidden),
        "up_proj": (said.intermediate_size, hidden),
        "down_proj": (hidden, said.intermediate_size),
        "lm_head": (said.vocab_size, hidden),
    }[end]


@pytest.mark.parametrize("name", WRITTEN)
def test_weights_are_what_the_library_makes_of_them(name: str) -> None:
    tensors, read, kept = load_file(DATA / name / "model.safetensors"), plan(DATA / name).plan, wanted(name)
    modules = set(kept) - {"ids", "logits"}
    assert modules
    for module in modules:
        outputs, inputs = shape(name, module)
        part, cut = (
            CheckpointSlice(f"{module}.weight", (outputs, inputs), ((0, outputs),)),
            ShardRange((0, outputs), (0, inputs)),
        )
        reader = read.reader(module)
        assert reader is not None
        found = reader.stored(part)
        assert all(tuple(tensors[each].shape) == on.shape for each, on in found.items())
        torch.testing.assert_close(reader.floats(part, cut, tensors)[::4], kept[module], rtol=1e-6, atol=1e-7)
        if not reader.format(cut).plain:
            known = dequantized(reader.matrix(part, cut, tensors))
            torch.testing.assert_close(known[::4], kept[module], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", WRITTEN)
def test_logits_are_those_of_the_librarys_weights(name: str) -> None:
    facts, want = PLATFORM.probe(), wanted(name)
    assert isinstance(facts, Capabilities)
    run = Runner(
        tiny(name), quantization=QuantizationPlan(checkpoint=plan(DATA / name), supported_kinds=facts.weight_formats)
    )
    (logits,) = run.prompts([want["ids"].tolist()])
    torch.testing.assert_close(logits, want["logits"], rtol=0, atol=2e-3 * float(want["logits"].std()))


@pytest.mark.parametrize("name", ["gptq_ordered", "auto_round_raw", "awq_gemv"])
def test_engines_run_them(name: str) -> None:
    want = wanted(name)
    greedy = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, detokenize=False)
    prompt: Any = {"prompt_token_ids": want["ids"].tolist()}
    small: dict[str, Any] = {"dtype": "float32", "kv_cache_memory_bytes": "16M", "max_model_len": 64}
    with LLM(str(DATA / name), device="cpu", skip_tokenizer_init=True, use_tqdm=False, **small) as llm:
        (output,) = llm.generate([prompt], greedy, use_tqdm=False)
    assert output.outputs[0].token_ids[0] == int(want["logits"][-1].argmax())
