"""A platform's own layers and models in the place of quintet's; and ops, which are bound before the first step."""

from typing import Any

import pytest
import torch
from torch import Tensor

from quintet.conformance.harness.worker_runner import random_prompts
from quintet.layers.build import replacements
from quintet.layers.mlp import GatedMLP
from quintet.layers.norm import RMSNorm
from quintet.models import model_class
from quintet.models.llama import LlamaForCausalLM
from quintet.platforms.cpu import PLATFORM as CPU
from quintet_tools.checkpoints.tiny import FAMILIES, VARIANTS, variant
from tests.helpers.platforms.run_model import Runner

PROMPTS = random_prompts(3, (9, 4), 101)


class DoubledMLP(GatedMLP):
    """Gives twice what it should."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class LoudLlamaForCausalLM(LlamaForCausalLM):
    """The last logit is the largest."""

    def head(self, x: Any) -> Any:
        logits = super().head(x)
        logits[:, -1] = 1e6
        return logits


class Overriding(CPU):
    """With both, by name."""

    name = "overriding"
    layers = {"GatedMLP": f"{__name__}:DoubledMLP"}
    models = {"llama": f"{__name__}:LoudLlamaForCausalLM"}


def test_a_platforms_layer_and_model_are_built_in_the_place_of_ours() -> None:
    run = Runner(variant("llama", "plain"), platform=Overriding())
    assert type(run.worker.model) is LoudLlamaForCausalLM
    mlps = [module for module in run.worker.model.modules() if isinstance(module, GatedMLP)]
    assert len(mlps) == 3 and {type(mlp) for mlp in mlps} == {DoubledMLP}
    assert all(int(logits.argmax(-1)[-1]) == 100 for logits in run.prompts(PROMPTS))


def test_only_its_own_engine_sees_them() -> None:
    run = Runner(variant("llama", "plain"))
    assert {type(module) for module in run.worker.model.modules()} & {LoudLlamaForCausalLM, DoubledMLP} == set()


def test_a_layer_replaces_what_it_extends_and_nothing_else() -> None:
    assert replacements({"GatedMLP": f"{__name__}:DoubledMLP"}) == {"GatedMLP": DoubledMLP}
    for path in (f"{__name__}:DoubledMLP", f"{__name__}:nothing", f"{__name__}:PROMPTS"):
        with pytest.raises(TypeError, match="cannot stand for the layer RMSNorm: it is no subclass of it"):
            replacements({RMSNorm.__name__: path})


def test_a_family_that_only_the_platform_knows() -> None:
    config = type("Config", (), {"model_type": "unheard-of"})
    assert model_class(config, {"unheard-of": f"{__name__}:LoudLlamaForCausalLM"}) is LoudLlamaForCausalLM
    with pytest.raises(ValueError, match="model type 'unheard-of' is not supported"):
        model_class(config, {"other": f"{__name__}:LoudLlamaForCausalLM"})


@pytest.mark.parametrize(("family", "name"), VARIANTS, ids=str)
def test_no_step_binds_an_op(family: str, name: str) -> None:
    """Probing may compile: it is over when the model is built."""
    assert name in FAMILIES[family]
    run = Runner(variant(family, name), torch.bfloat16)
    before = run.worker.ops.bound
    run.prompts(PROMPTS)
    assert run.worker.ops.bound == before
