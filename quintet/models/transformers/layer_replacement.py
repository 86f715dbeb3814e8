"""Replaces transformers' modules that equal one of our layers, and collects the tensors of the others."""

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from quintet.layers.build import BuildContext, Layer, replicated
from quintet.layers.decoder import rounded
from quintet.layers.linear import CheckpointLayout, ColumnParallelLinear
from quintet.layers.quantization import QuantizationPlan
from quintet.models.transformers.layers import (
    HFColumnParallelLinear,
    HFEmbedding,
    HFExperts,
    HFLMHead,
    HFRMSNorm,
    HFTable,
    Loose,
    Running,
)
from quintet.models.transformers.tp_plan import TensorParallelPlan
from quintet.models.transformers.trace import ForwardTrace, alike, alike_experts, alike_table, only_looked_up
from quintet.models.transformers.weight_names import WeightNames
from quintet.ops.activation import KINDS
from quintet.ops.norm import rms_norm

ROUTERS = re.compile(r"(.*\.)?(gate|router|router\.\w+|shared_expert_gate)")  # products that choose experts: exact
CONV1D = "transformers.pytorch_utils.Conv1D"  # GPT-2's product, with a weight stored as [in, out]


def float32_modules(theirs: Any, dtype: torch.dtype) -> list[str]:
    """Returns the names of modules that transformers keeps in float32 beside weights of this type. Read from the class:
    the method that says it came after transformers 5.0."""
    kept = list(theirs._keep_in_fp32_modules or ()) if dtype == torch.float16 else []
    return kept + list(theirs._keep_in_fp32_modules_strict or ()) * (dtype in (torch.float16, torch.bfloat16))


class Replacing:
    """Puts our layers in the places of modules that are plainly what they are."""

    def __init__(
        self, theirs: Any, build: BuildContext, trace: ForwardTrace, names: WeightNames, running: Running
    ) -> None:
        self._theirs, self._build, self._trace, self._names, self._running = theirs, build, trace, names, running
        self.plan = TensorParallelPlan(theirs, build)
        self._tokens, self._head = theirs.get_input_embeddings(), theirs.get_output_embeddings()
        self._tied = self._head is not None and self._head.weight is self._tokens.weight
        self._paths = {module: path for path, module in theirs.named_modules()}
        self._fp32 = float32_modules(theirs, build.dtype)

    def replace(self) -> dict[str, Loose]:
        """-> what is left."""
        for module, path in self._paths.items():
            made = self._made(module, path)
            if made is not None:
                parent, _, name = path.rpartition(".")
                setattr(self._theirs.get_submodule(parent), name, made)
        self.plan.check()
        return loose_tensors(self._theirs, self._fp32)

    def _made(self, module: nn.Module, path: str) -> nn.Module | None:
        if self._in_float32(path):
            return None
        if module is self._head:
            return self._made_head(path)
        if module is self._tokens:
            return None if self._tied and not self._shares() else self._made_table(module)
        if isinstance(module, nn.Embedding) and only_looked_up(module, self._trace):
            return self._made_table(module)
        if type(module) is nn.Linear and self._is_product(module):
            sizes = module.in_features, module.out_features
            return self.plan.product(path, self._exact(path), sizes, module.bias is not None)
        if f"{type(module).__module__}.{type(module).__name__}" == CONV1D:
            return self._turned(module, path)
        return self._made_norm(module) or self._made_experts(module, path)

    def _made_head(self, path: str) -> nn.Module | None:
        head = self._head
        if type(head) is not nn.Linear or (self._tied and not self._shares()):
            return None
        source = self._paths[self._tokens] if self._tied else path
        shape = head.in_features, head.out_features
        return HFLMHead(self._build, shape, f"/{source}", head.bias is not None, self._running)

    def _shares(self) -> bool:
        """Returns whether the head and the embedding table can be ours, on the same weight."""
        plain = type(self._head) is nn.Linear and self._head.bias is None
        return plain and not self._in_float32(self._paths[self._head]) and self._made_table(self._tokens) is not None

    def _made_table(self, module: Any) -> HFEmbedding | HFTable | None:
        scale = 1.0 if type(module) is nn.Embedding else getattr(module, "embed_scale", None)
        if not isinstance(module, nn.Embedding) or scale is None or not alike_table(module, float(scale)):
            return None
        (count, width), scale = module.weight.shape, rounded(float(scale), self._build.dtype)
        if module is not self._tokens:
            return HFTable(self._build, count, width, scale)
        return HFEmbedding(self._build, count, width, scale, self._running)

    def _made_norm(self, module: nn.Module) -> nn.Module | None:
        found = (getattr(module, name, None) for name in ("variance_epsilon", "eps", "epsilon"))
        eps = next((each for each in found if isinstance(each, float)), None)
        held = dict(module.named_parameters())
        if eps is None or list(held) != ["weight"] or held["weight"].dim() != 1:
            return None
        width = held["weight"].shape[0]
        for offset in (0.0, 1.0):
            if alike(module, lambda x, weight, offset=offset: rms_norm(x, weight, eps, offset), width):  # type: ignore[misc]
                return HFRMSNorm(self._build, width, eps, offset)
        return None

    def _made_experts(self, module: Any, path: str) -> nn.Module | None:
        held = dict(module.named_parameters())
        if sorted(held) != ["down_proj", "gate_up_proj"] or held["down_proj"].dim() != 3:
            return None
        count, hidden, width = held["down_proj"].shape
        if held["gate_up_proj"].shape != (count, 2 * width, hidden):  # LongCat has experts that compute nothing
            return None
        config = self._theirs.config
        kinds = [getattr(config, name, None) for name in ("hidden_act", "hidden_activation", "activation_function")]
        kind = next((each for each in kinds if each in KINDS), None)
        if kind is None or not alike_experts(module, kind) or not self._names.separable(path):
            return None
        parent = path.rpartition(".")[2]
        return HFExperts(self._build, (hidden, width), kind, [f"{parent}.{expert}" for expert in range(count)])

    def _is_product(self, module: nn.Module) -> bool:
        """Returns whether only the module's own product uses the weight, and the weight has the build's dtype."""
        weight: Any = module.weight
        own = self._trace.products[id(weight)] > 0 and id(weight) not in self._trace.touched
        return own and weight.dtype == self._build.dtype

    def _exact(self, path: str) -> BuildContext:
        return replace(self._build, quantization=QuantizationPlan()) if ROUTERS.fullmatch(path) else self._build

    def _turned(self, module: Any, path: str) -> ColumnParallelLinear | None:
        inputs, outputs = module.weight.shape
        if self._build.size > 1:
            return None
        name = path.rpartition(".")[2]
        split = replicated(outputs, 1)
        return HFColumnParallelLinear(
            self._build, replicated(inputs, 1), {name: split}, True, CheckpointLayout(transposed=True)
        )

    def _in_float32(self, path: str) -> bool:
        return is_within(path, self._fp32)


def is_within(path: str, names: Sequence[str]) -> bool:
    """Returns whether a module or a tensor is one of these, or within one."""
    return any(re.search(rf"(^|\.){re.escape(key)}($|\.)", path) for key in names)


def loose_tensors(theirs: Any, float32: Sequence[str]) -> dict[str, Loose]:
    """Returns the tensors of transformers' modules that are none of our layers; those of `float32` are in float32."""
    found: dict[int, tuple[str, list[tuple[nn.Module, str]], Tensor, bool]] = {}
    for path, module in theirs.named_modules():
        if isinstance(module, Layer):
            continue
        unsaved = module._non_persistent_buffers_set
        for name, tensor in [*module._parameters.items(), *module._buffers.items()]:
            if tensor is not None:
                stored = name not in unsaved
                whole_name = f"{path}.{name}" if path else name
                found.setdefault(id(tensor), (whole_name, [], tensor, stored))[1].append((module, name))
    return {
        name: Loose(tuple(owners), tensor, stored, torch.float32 if is_within(name, float32) else tensor.dtype)
        for name, owners, tensor, stored in found.values()
    }
