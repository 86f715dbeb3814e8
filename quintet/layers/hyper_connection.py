"""Hyper-connections: several residual streams, mixed by small learned weights before and after each branch of a block.

Zhu et al. 2024; with doubly stochastic matrices (Xie et al. 2026) in DeepSeek-V4 and GLM-5-Next, without in HY V4.

The N streams of a token lie side by side, [T, N H], from the embedding to the head that joins them. A pipeline stage
hands on all of them: what it receives is read as [T, N H] again. Everything that weighs streams is float32.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from quintet.interface.weights import CheckpointSlice, Matrix, Weight
from quintet.layers.build import BuildContext, Layer, replicated, vector_weight
from quintet.layers.decoder import BlockFactory, DecoderTrunk, norm_eps, run_layers, select_output_rows
from quintet.layers.layer_state import StepState
from quintet.layers.norm import RMSNorm
from quintet.layers.pipeline import Stage, drop_other_layers
from quintet.ops.streams import StreamGateSizes


@dataclass(frozen=True)
class HyperConnectionSizes:
    """Sizes of a model's hyper-connections, under the names of the configs (`hc_`...)."""

    hidden: int
    streams: int  # hc_mult
    norm_eps: float  # of the norm of what the weights are computed of
    eps: float  # hc_eps
    magnitude: float  # of the weights of outputs
    output_eps: float = 0.0  # added to the weights of outputs
    iterations: int = 0  # hc_sinkhorn_iters; 0: streams are not mixed with each other

    @classmethod
    def from_config(cls, config: Any) -> "HyperConnectionSizes":
        """DeepSeek's and GLM's connections have Sinkhorn iterations, HY's a magnitude."""
        iterations, eps = getattr(config, "hc_sinkhorn_iters", 0), config.hc_eps
        if config.hc_mult < 1:
            raise ValueError(f"{config.model_type} with hc_mult {config.hc_mult} has no stream; correct config.json")
        return cls(
            hidden=config.hidden_size,
            streams=config.hc_mult,
            norm_eps=norm_eps(config),
            eps=eps,
            magnitude=getattr(config, "hc_magnitude", 2.0),
            output_eps=0.0 if iterations else eps,
            iterations=iterations,
        )

    @property
    def gates(self) -> StreamGateSizes:
        """Constants of the op stream_gates."""
        return StreamGateSizes(self.streams, self.eps, self.magnitude, self.output_eps, self.iterations)


class StreamGates(Layer):
    """Streams [T, N H] -> weights of inputs, outputs and streams [T, K] float32 (see the op stream_gates).

    The checkpoint has `fn` [K, N H], `base` [K] and a `scale` of each kind, under the module's path and a prefix.
    """

    def __init__(self, build: BuildContext, sizes: HyperConnectionSizes, kinds: int, prefix: str = "") -> None:
        """kinds: 1 has weights of inputs; 2 of outputs, too; 3 of streams, too."""
        super().__init__(build, "widen", "linear", "stream_gates")
        count = sizes.streams
        self._build, self._sizes, self._prefix, self._kinds = build, sizes, prefix, kinds
        self._width, self._inputs = sum((count, count, count * count)[:kinds]), count * sizes.hidden
        exact = replace(build, dtype=torch.float32)
        self.norm = RMSNorm(exact, self._inputs, sizes.norm_eps, has_weight=False)
        self.fn: Tensor
        self.base: Tensor
        self.scale: Tensor

    def weights(self, path: str) -> list[Weight]:
        build, start, every = self._build, f"{path}.{self._prefix}", replicated(self._width, self._build.size).ranges
        part = CheckpointSlice(f"{start}fn", (self._width, self._inputs), every)
        return [
            Weight("fn", (part,), 0, build.rank, torch.float32, "linear"),
            vector_weight(build, f"{start}base", self._width, torch.float32, name="base"),
            vector_weight(build, f"{start}scale", self._kinds, torch.float32, name="scale"),
        ]

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(self.ops.widen(x, x.shape[0], False))
        logits = self.ops.linear(normed, Matrix(self.fn), None, (self._width,))
        gates: Tensor = self.ops.stream_gates(logits, self.scale, self.base, self._sizes.gates)
        return gates


class HyperConnection(StreamGates):
    """The connection of a block's branch (attn_hc, ffn_hc): the branch reads one stream and writes into all."""

    def __init__(self, build: BuildContext, sizes: HyperConnectionSizes) -> None:
        super().__init__(build, sizes, 3 if sizes.iterations else 2)
        self.ops.take("collapse_streams", "expand_streams")

    def collapse(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Streams [T, N H] -> the branch's input [T, H], and the weights for expand()."""
        gates = self(x)
        return self.ops.collapse_streams(x, gates, self._sizes.streams), gates

    def expand(self, x: Tensor, output: Tensor, gates: Tensor) -> Tensor:
        """Streams before the branch and its output [T, H] -> streams [T, N H]."""
        streams: Tensor = self.ops.expand_streams(x, output, gates)
        return streams


class HyperHead(StreamGates):
    """Joins the streams behind the last block: [T, N H] -> [T, H] (hc_head)."""

    def __init__(self, build: BuildContext, sizes: HyperConnectionSizes) -> None:
        super().__init__(build, sizes, 1, "hc_")
        self.ops.take("collapse_streams")

    def forward(self, x: Tensor) -> Tensor:
        joined: Tensor = self.ops.collapse_streams(x, super().forward(x), self._sizes.streams)
        return joined


class MeanHead(Layer):
    """The mean of the streams: [T, N H] -> [T, H] (GLM-5-Next)."""

    def __init__(self, build: BuildContext, sizes: HyperConnectionSizes) -> None:
        super().__init__(build, "collapse_streams")
        self._streams = sizes.streams
        self.shares: Tensor

    def constants(self) -> Mapping[str, Tensor]:
        return {"shares": torch.full((1, self._streams), 1 / self._streams)}

    def forward(self, x: Tensor) -> Tensor:
        mean: Tensor = self.ops.collapse_streams(x, self.shares, self._streams)
        return mean


class HyperBlock(nn.Module):
    """Llama's block with a connection of its own for each branch, in the place of residuals."""

    def __init__(self, config: Any, build: BuildContext, attention: nn.Module, mlp: nn.Module) -> None:
        super().__init__()
        sizes = HyperConnectionSizes.from_config(config)
        self.attn_hc, self.ffn_hc = HyperConnection(build, sizes), HyperConnection(build, sizes)
        self.input_layernorm = RMSNorm(build, config.hidden_size, norm_eps(config))
        self.self_attn = attention
        self.post_attention_layernorm = RMSNorm(build, config.hidden_size, norm_eps(config))
        self.mlp = mlp

    def forward(self, x: Tensor, cache: StepState) -> Tensor:
        """Streams [T, N H] -> streams."""
        one, gates = self.attn_hc.collapse(x)
        x = self.attn_hc.expand(x, self.self_attn(self.input_layernorm(one), cache), gates)
        one, gates = self.ffn_hc.collapse(x)
        return self.ffn_hc.expand(x, self.feed(self.post_attention_layernorm(one), cache), gates)

    def feed(self, x: Tensor, cache: StepState) -> Tensor:
        """The feed-forward of x [T, H]; experts that tokens' ids choose (hash routing) override it."""
        out: Tensor = self.mlp(x)
        return out


class HyperTrunk(DecoderTrunk):
    """A step -> normalised hidden states of its rows: the embedding of a token begins every stream, and a head joins
    them behind the last block."""

    def __init__(
        self, config: Any, build: BuildContext, block: BlockFactory, head: type[HyperHead | MeanHead] = HyperHead
    ) -> None:
        """block: makes modules called as HyperBlock is. head: called with (build, sizes)."""
        if build.requested_outputs.aux_hidden_states:
            raise ValueError(f"{config.model_type}'s layers have several streams: no taps of them are given")
        if build.row_store is not None and build.row_store.levels:
            raise ValueError(f"{config.model_type}'s layers have several streams: no rows are added between them")
        super().__init__(config, build, block)
        sizes = HyperConnectionSizes.from_config(config)
        self.hc_head = head(build, sizes)
        self._streams, self._width = sizes.streams, sizes.streams * sizes.hidden
        build.ops.take("repeat_streams")

    def keep_stage(self, stage: Stage) -> None:
        """Only what the stage has."""
        drop_other_layers(self, stage, ["embed_tokens"], "layers", ["hc_head", "norm"])

    def forward(self, cache: StepState) -> tuple[Tensor, list[Tensor]]:
        build = self._build
        if build.stage.first:
            x = self._ops.repeat_streams(self.embed_tokens.embed(cache.batch), self._streams)
        else:
            given = cache.batch.inputs.intermediate_tensors
            assert given is not None, "nothing was handed on to this stage"
            x = given.view(build.dtype).reshape(-1, self._width)  # sent as it lies: [T, N H]
        x, taps = run_layers(self.layers, x, cache, build)
        if not build.stage.last:
            return x, taps
        return self.norm(self.hc_head(select_output_rows(x, cache, self._ops))), taps
