"""Models that are quantized while they are loaded, on each platform, against transformers' with such weights."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from quintet import SamplingParams
from quintet.config import EngineConfig
from quintet.conformance.harness.worker_runner import random_prompts
from quintet.interface.platform import Capabilities, Platform
from quintet.interface.weights import CheckpointSlice, ShardRange, WeightFormat
from quintet.layers.quantization import QuantizationPlan
from quintet.layers.quantization.online import (
    OnlineQuantization,
    RoundedWeights,
    format_for_inputs,
    online_quantization,
)
from quintet.ops.linear import linear
from quintet.ops.quantize import quantize
from quintet.platforms.cpu import PLATFORM as CPU
from quintet_tools.checkpoints.tiny import PLAIN, VOCAB, Tiny, make
from tests.helpers.platforms import tpu
from tests.helpers.platforms.engines import engine
from tests.helpers.platforms.run_model import Runner
from tests.platforms.gpu.fake_torch import FakeGPU, FakeRuntime

SIZES = {
    **PLAIN, "hidden_size": 128, "intermediate_size": 192, "num_attention_heads": 8, "num_key_value_heads": 4,
    "head_dim": 16, "num_hidden_layers": 2,
}  # fmt: skip
NAMES = ["fp8", "fp8_per_tensor", "fp8_per_block", "bitsandbytes"]


class Specified(torch.nn.Module):
    """A product by the specification."""

    def __init__(self, module: torch.nn.Linear, fmt: WeightFormat) -> None:
        super().__init__()
        self.matrix = quantize(module.weight.detach(), format_for_inputs(fmt, module.in_features))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = linear.reference(x.reshape(-1, x.shape[-1]), self.matrix, None, (len(self.matrix.values),))
        return y.reshape(*x.shape[:-1], -1)


@torch.no_grad()
def rounded(tiny: Tiny, wanted: OnlineQuantization) -> Tiny:
    """The reference with the weights that a wish makes, and activations as its products take them."""
    model = copy.deepcopy(tiny.reference)
    for name, module in list(model.named_modules()):
        fmt = wanted.head if name == "lm_head" else wanted.format_for(name)
        if isinstance(module, torch.nn.Linear) and fmt is not None:
            (outputs, inputs), source = module.weight.shape, f"{name}.weight"
            cut, part = (
                ShardRange((0, outputs), (0, inputs)),
                CheckpointSlice(source, (outputs, inputs), ((0, outputs),)),
            )
            if fmt.activations == 8:
                model.set_submodule(name, Specified(module, fmt))
                continue
            module.weight.copy_(RoundedWeights(fmt).floats(part, cut, {source: module.weight.detach()}))
    return Tiny(tiny.folder, tiny.config, model)


def agrees(wanted: OnlineQuantization, platform: Platform, kinds: set[str], off: float) -> None:
    """Of the platform's logits, and of what its products are held in."""
    tiny, facts = make("llama", SIZES), type(platform).probe()
    assert isinstance(facts, Capabilities)
    run = Runner(tiny, platform=platform, quantization=QuantizationPlan(wanted, None, facts.weight_formats))
    held = {module.format.kind for module in run.worker.model.modules() if hasattr(module, "format")}
    assert held == kinds
    known, prompts = rounded(tiny, wanted), random_prompts(3, (23, 1, 40), VOCAB)
    for prompt, logits in zip(prompts, run.prompts(prompts), strict=True):
        want = known.logits(prompt)
        torch.testing.assert_close(logits, want, rtol=0, atol=off * float(want.std()))


@pytest.mark.parametrize("name", NAMES)
def test_on_cpus(name: str) -> None:
    facts = CPU.probe()
    assert isinstance(facts, Capabilities)
    wanted = online_quantization(name).without_activation_quantization()
    assert wanted.format is not None
    off = 0.15 if wanted.format.codebook else 2e-3  # nf4's table is of whole numbers in our products
    agrees(wanted, CPU(), {"plain", *({wanted.format.kind} & facts.weight_formats)}, off)


@pytest.mark.grid(cases=1)
@pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")
@pytest.mark.parametrize(("name", "off"), [("fp8", 2e-3), ("fp8_per_tensor", 0.2), ("bitsandbytes", 2e-3)])
def test_on_gpus_by_triton(name: str, off: float) -> None:
    from tests.helpers.platforms.triton import needs_triton

    needs_triton()
    wanted = online_quantization(name)
    assert wanted.format is not None
    kept = wanted.format.kind in FakeGPU.probe().weight_formats  # type: ignore[union-attr]
    members = {"_fake": FakeRuntime(), "op_priority": {f"linear:{wanted.format.kind}": ("triton",)}}
    platform = type("WithKernels", (FakeGPU,), members)(EngineConfig(max_num_seqs=4))
    agrees(wanted, platform, {"plain", *[wanted.format.kind] * kept}, off)


@pytest.mark.slow
@tpu.needs_jax
@pytest.mark.parametrize(
    ("name", "off"), [("fp8", 2e-3), ("fp8_per_block", 0.2), ("w4a8", 0.1), ("bitsandbytes", 2e-3)]
)
def test_on_tpus_by_jax(name: str, off: float) -> None:
    wanted, platform = online_quantization(name), tpu.platform()
    assert wanted.format is not None
    kept = wanted.format.kind in type(platform).probe().weight_formats
    agrees(wanted, platform, {"plain", *["w8a8"] * bool(wanted.head), *[wanted.format.kind] * kept}, off)


# ---------------------------------------------------------------------------------------------------- whole engines


AO = {"_type": "Int8WeightOnlyConfig", "_data": {}}


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"quantization": "int4"}, "quantization int4: "),
        ({"quantization": "bitsandbytes", "load_format": "bitsandbytes"}, "quantization bitsandbytes: "),
        ({"quantization": "fp8"}, "quantization fp8: "),
        ({"quantization": "torchao", "hf_overrides": {"quantization_config_dict_json": AO}}, "quantization torchao: "),
    ],
)
def test_an_engine_says_what_has_become_of_the_weights(settings: dict[str, Any], said: str) -> None:
    tiny = make("llama", SIZES)
    (prompt,) = random_prompts(3, (23,), VOCAB)
    with engine(tiny, **settings) as llm:
        prepared = llm._client.engine_plan
        (reason,) = [each for each in prepared.reasons if each.startswith(said)]
        greedy = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, detokenize=False)
        (answer,) = llm.generate([{"prompt_token_ids": prompt}], greedy, use_tqdm=False)
        wanted = prepared.sizes.quantization.online
    assert isinstance(wanted, OnlineQuantization)
    assert "8 products as" in reason or "8 rounded to" in reason or "weights" in reason
    assert reason.endswith("the head in 8 bits" if settings["quantization"] == "int4" else "the head as it is")
    assert answer.outputs[0].token_ids[0] == int(rounded(tiny, wanted).logits(prompt)[-1].argmax())
