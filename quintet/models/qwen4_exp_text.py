"""Qwen4-Exp (Alibaba 2026), the text model: streams with gates, delta nets, attention to chosen blocks, n-grams."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from quintet.layers.attention.attention import AttentionSizes
from quintet.layers.attention.block_indexer import BlockIndexerSizes, MeanBlockIndexer
from quintet.layers.build import BuildContext, Layer, replicated
from quintet.layers.decoder import CausalLM, DecoderTrunk
from quintet.layers.hyper_connection import HyperTrunk
from quintet.layers.layer_state import StepState
from quintet.layers.linear import LMHead, column_parallel
from quintet.layers.moe.moe import SharedMoE, unstacked
from quintet.layers.norm import RMSNorm
from quintet.layers.rope import Rotary
from quintet.layers.ssm.delta_net import QWEN3_5, DeltaNet, GatedAttention
from quintet.layers.ssm.mamba import GatedNorm
from quintet.layers.ssm.ngrams import GroupedNorm, NGramLayer, NGramSizes
from quintet.models.qwen3_moe import mixture
from quintet.models.qwen3_next import deltas
from quintet.ops.streams import StreamGateSizes

RENAMED = {".linear_attn.": ".self_attn.", "model.hyper_connection_mixer.": "model.hc_head."}
COMPUTED = r"model\.layers\.\d+\.ple\.ple_embedding\.(layer_multipliers|ngram_heads_vocab_sizes|ngram_heads_offsets)"
INDEXER = r"model\.layers\.\d+\.self_attn\.indexer\..*"


class GatedStreams(Layer):
    """Streams x [T, N H] -> what a branch reads of them [T, H]: their mean, each normalised and times gates of its own
    numbers, by a product of low rank. With outputs, a weight of each stream for what the branch returns."""

    def __init__(self, build: BuildContext, config: Any, has_outputs: bool) -> None:
        super().__init__(build, "activate", "scale", "sigmoid_gate", "collapse_streams", "expand_streams")
        self._streams, self._rank, hidden = config.hc_count, config.hc_lowrank, config.hidden_size
        self.hc_norm = GroupedNorm(build, hidden, self._streams, config.rms_norm_eps)
        down = {"input_mix_weight_down": replicated(self._rank, build.size)}
        outputs = {"block_inject_weight": replicated(self._streams, build.size)} if has_outputs else {}
        self.down = column_parallel(build, self._streams * hidden, {**down, **outputs})
        wide = replicated(self._streams * hidden, build.size)
        self.up = column_parallel(build, self._rank, {"input_mix_weight_up": wide})
        self._gates = StreamGateSizes(self._streams, 0.0, 2.0)
        if has_outputs:
            self.ops.take("stream_gates")
        self.shares: Tensor
        self.scales: Tensor
        self.base: Tensor

    def constants(self) -> Mapping[str, Tensor]:
        """The share of each stream in their mean; scales and base of stream_gates()."""
        count = self._streams
        shares = torch.full((1, count), 1 / count)
        return {"shares": shares, "scales": torch.full((2,), 1 / count), "base": torch.zeros(2 * count)}

    def forward(self, x: Tensor) -> Tensor:
        return self._read(self.hc_norm(x))[0]

    def collapse(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the branch's input [T, H], and the weights for expand()."""
        read, logits = self._read(self.hc_norm(x))
        logits = torch.cat([logits, logits], 1).float()
        return read, self.ops.stream_gates(logits, self.scales, self.base, self._gates)

    def expand(self, x: Tensor, output: Tensor, gates: Tensor) -> Tensor:
        """Streams before the branch and its output [T, H] -> streams."""
        streams: Tensor = self.ops.expand_streams(x, output, gates)
        return streams

    def _read(self, normed: Tensor) -> tuple[Tensor, Tensor]:
        down, logits = self.down(normed).tensor_split([self._rank], dim=-1)
        low = self.ops.activate(self.ops.scale(down.contiguous(), 1 / self._streams), "silu")
        gated = self.ops.sigmoid_gate(normed, self.up(low))
        return self.ops.collapse_streams(gated, self.shares, self._streams), logits


class GatedStreamBlock(nn.Module):
    """A branch that mixes tokens and experts, each with gates of the streams; in some layers n-grams before both."""

    def __init__(self, config: Any, build: BuildContext, mixer: nn.Module, index: int) -> None:
        super().__init__()
        self.ple: NGramLayer | None = None
        if index + 1 in config.ple_layer_ids:
            sizes = NGramSizes.from_config(config, config.ple_layer_ids.index(index + 1))
            self.ple = NGramLayer(build, sizes)
        self._ops = build.ops.take("add")
        self.attn_hyper_connection = GatedStreams(build, config, True)
        self.self_attn = mixer
        self.mlp_hyper_connection = GatedStreams(build, config, True)
        self.mlp = SharedMoE(build, mixture(config), config.shared_expert_intermediate_size)

    def forward(self, x: Tensor, cache: StepState) -> Tensor:
        """Streams [T, N H] -> streams."""
        if self.ple is not None:
            x = self._ops.add(self.ple(x, cache), x)
        one, gates = self.attn_hyper_connection.collapse(x)
        x = self.attn_hyper_connection.expand(x, self.self_attn(one, cache), gates)
        one, gates = self.mlp_hyper_connection.collapse(x)
        return self.mlp_hyper_connection.expand(x, self.mlp(one), gates)


class GatedStreamTrunk(HyperTrunk):
    """HyperTrunk whose streams are joined by gates, and not normalised behind that."""

    def __init__(self, config: Any, build: BuildContext, block: Any) -> None:
        if build.requested_outputs.aux_hidden_states:
            raise ValueError(f"{config.model_type}'s layers have several streams: no taps of them are given")
        DecoderTrunk.__init__(self, config, build, block, norm=nn.Identity())
        self.hc_head = GatedStreams(build, config, False)  # type: ignore[assignment]  # called as a HyperHead is
        self._streams, self._width = config.hc_count, config.hc_count * config.hidden_size
        build.ops.take("repeat_streams")


class SigmoidGatedNorm(GatedNorm):
    """The same whose gate is a sigmoid."""

    def __init__(self, build: BuildContext, width: int, eps: float) -> None:
        super().__init__(build, replicated(width, build.size), eps, "before the gate")
        self.ops.take("rms_norm", "sigmoid_gate")

    def forward(self, x: Tensor, gate: Tensor, width: int) -> Tensor:
        normed = self.ops.rms_norm(x.reshape(-1, width), self.weight, self._eps, 0.0).reshape(x.shape)
        out: Tensor = self.ops.sigmoid_gate(normed.to(gate.dtype), gate)
        return out


class Qwen4ExpForCausalLM(CausalLM):
    """Streams with gates in the place of residuals. Where no request is longer than the tokens that an indexer covers,
    attention is to all, and indexers are not read."""

    renamed_tensors = RENAMED
    unstacked = staticmethod(unstacked)
    recordable = False  # torch computes n-grams and norms of streams

    def __init__(self, config: Any, build: BuildContext) -> None:
        super().__init__(build)
        if config.indexer_n_heads is None or config.indexer_kv_heads != 1:
            raise ValueError(
                f"{config.model_type} with indexer_n_heads {config.indexer_n_heads} and indexer_kv_heads "
                f"{config.indexer_kv_heads} is not computed: its attention has an indexer of one key head"
            )
        self._sparse = build.max_model_len >= config.indexer_budget + config.indexer_compress_ratio
        rotary = Rotary.from_config(build, config, partial=True)

        def block(config: Any, build: BuildContext, index: int) -> GatedStreamBlock:
            linear = config.layer_types[index] == "linear_attention"
            mixer = delta_net(config, build) if linear else self._attention(config, build, rotary)
            return GatedStreamBlock(config, build, mixer, index)

        self.model = GatedStreamTrunk(config, build, block)
        self.lm_head = LMHead.from_config(build, config)
        self.ignored_tensors = (
            *CausalLM.ignored_tensors, r"mtp\..*", COMPUTED, *(() if self._sparse else (INDEXER,))
        )  # fmt: skip

    def _attention(self, config: Any, build: BuildContext, rotary: Rotary) -> GatedAttention:
        block, bias = config.indexer_compress_ratio, config.attention_bias
        count = config.indexer_budget // block
        chosen = {"chosen": count + 1, "chosen_block": block} if self._sparse else {}
        sizes = AttentionSizes.from_config(config, bias=bias, output_bias=bias, **chosen)
        attention = GatedAttention(build, sizes, rotary)
        attention.q_norm = RMSNorm(build, config.head_dim, config.rms_norm_eps, 1.0)
        attention.k_norm = RMSNorm(build, config.head_dim, config.rms_norm_eps, 1.0)
        if self._sparse:
            heads, dim = config.indexer_n_heads, config.indexer_head_dim
            of = BlockIndexerSizes(config.hidden_size, heads, dim, block, count, config.rms_norm_eps)
            attention.indexer = MeanBlockIndexer(build, of, rotary)
        return attention


def delta_net(config: Any, build: BuildContext) -> DeltaNet:
    """Builds a delta net; the gate behind it is silu or a sigmoid."""
    made = DeltaNet(build, deltas(config), QWEN3_5)
    if (config.output_gate_type or config.hidden_act) == "sigmoid":
        made.norm = SigmoidGatedNorm(build, config.linear_value_head_dim, config.rms_norm_eps)
    return made
