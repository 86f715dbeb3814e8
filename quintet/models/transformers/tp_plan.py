"""Applies transformers' tensor parallelism plan to our products; it refuses what no product of ours implements."""

import re
from dataclasses import replace
from typing import Any

from torch import nn

from quintet.interface.types import AttentionSpec
from quintet.layers.build import BuildContext, even_shards, replicated
from quintet.models.transformers.construct import Unsupported
from quintet.models.transformers.layers import HFColumnParallelLinear, HFRowParallelLinear

SHARED = ("colwise", "rowwise")


class TensorParallelPlan:
    """Tensor parallelism plan of one model for this many ranks."""

    def __init__(self, theirs: Any, build: BuildContext) -> None:
        self._build, self._config = build, theirs.config
        prefix = "" if theirs.base_model is theirs else f"{theirs.base_model_prefix}."
        base = getattr(theirs.config, "base_model_tp_plan", None) or {}
        self._styles = {_pattern(prefix + name): style for name, style in base.items()}
        self._done: set[re.Pattern[str]] = set()
        if build.size > 1 and not base:
            raise Unsupported(theirs.config, "its config has no plan for tensor parallelism (base_model_tp_plan)")

    def shared(self, spec: AttentionSpec) -> AttentionSpec:
        """A rank's share of the heads."""
        size = self._build.size
        if spec.kv_heads % size:
            raise Unsupported(self._config, f"{size} ranks cannot share its {spec.kv_heads} KV heads evenly")
        return replace(spec, heads=spec.heads // size, kv_heads=spec.kv_heads // size)

    def product(self, path: str, build: BuildContext, sizes: tuple[int, int], bias: bool) -> nn.Module:
        """Builds a rank's share of a product of (inputs, outputs)."""
        (inputs, outputs), name, size = sizes, path.rpartition(".")[2], build.size
        style = self._style(path)
        if size == 1 or style not in SHARED:
            return HFColumnParallelLinear(build, replicated(inputs, size), {name: replicated(outputs, size)}, bias)
        if style == "rowwise":
            return HFRowParallelLinear(build, even_shards(inputs, size), {name: replicated(outputs, size)}, bias)
        return HFColumnParallelLinear(build, replicated(inputs, size), {name: even_shards(outputs, size)}, bias)

    def _style(self, path: str) -> str | None:
        for pattern, style in self._styles.items():
            if pattern.fullmatch(path):
                self._done.add(pattern)
                return style
        return None

    def check(self) -> None:
        """Unserved where the plan shares out what no product of ours is."""
        if self._build.size == 1:
            return
        left = {style for pattern, style in self._styles.items() if pattern not in self._done or style not in SHARED}
        # whole on every rank, for which our gradients would care and our steps do not
        left -= {"replicated_with_grad_allreduce", "embedding_rowwise"}
        if left:
            raise Unsupported(self._config, f"its plan for tensor parallelism wants {', '.join(sorted(left))}")


def _pattern(name: str) -> re.Pattern[str]:
    return re.compile(re.escape(name).replace(r"\*", r"\d+"))
