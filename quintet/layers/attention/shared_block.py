"""A transformer block with weights that several layers share, each with adapters and a cache of its own (Zamba 2)."""

from dataclasses import dataclass

from torch import Tensor, nn

from quintet.layers.attention.attention import AttentionSizes, SelfAttention
from quintet.layers.build import BuildContext, Shards, even_shards, replicated, split_heads
from quintet.layers.layer_state import StepState
from quintet.layers.linear import CheckpointLayout, column_parallel, row_parallel
from quintet.layers.mlp import GatedMLP
from quintet.layers.norm import RMSNorm
from quintet.layers.rope import Rotary


@dataclass(frozen=True)
class SharedBlockUse:
    """One layer's of a block: where its weights stand in the checkpoint, and which of their adapters are this one's."""

    path: str
    number: int
    rank: int  # of the adapters


class Adapter(nn.Module):
    """up(down(x)), beside a product: `splits` are of its outputs."""

    def __init__(self, build: BuildContext, use: SharedBlockUse, inputs: int, name: str, splits: list[Shards]) -> None:
        super().__init__()
        source = f"/{use.path}.{name}.{use.number}"
        self.down = column_parallel(build, inputs, {f"{source}.0": replicated(use.rank, build.size)})
        outputs = {str(number): split for number, split in enumerate(splits)}
        self.up = column_parallel(build, use.rank, outputs, stored=CheckpointLayout(fused=f"{source}.1"))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.up(self.down(x))
        return out


class AdaptedAttention(SelfAttention):
    """Attention over inputs wider than its outputs; q, k and v have an adapter each, where there are some."""

    def __init__(
        self, build: BuildContext, shape: AttentionSizes, rotary: Rotary | None, hidden: int, use: SharedBlockUse | None
    ) -> None:
        super().__init__(build, shape, rotary)
        queries, keys = (each.times(shape.head_dim) for each in split_heads(shape.heads, shape.kv_heads, build.size))
        self.out = row_parallel(build, queries, (shape.output, hidden))
        self._ops, adapters = build.ops.take("add"), []
        if use is not None:
            splits = {"q": queries, "k": keys, "v": keys}
            names = {each: f"self_attn.linear_{each}_adapter_list" for each in splits}
            adapters = [Adapter(build, use, shape.hidden, names[each], [split]) for each, split in splits.items()]
        self.adapters = nn.ModuleList(adapters)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = super().project(x)
        if not self.adapters:
            return q, k, v
        of_q, of_k, of_v = (adapter(x) for adapter in self.adapters)
        add = self._ops.add
        return add(of_q.view(q.shape), q), add(of_k.view(k.shape), k), add(of_v.view(v.shape), v)


class AdaptedMLP(GatedMLP):
    """A gated feed-forward with an adapter beside gate and up."""

    def __init__(self, build: BuildContext, sizes: tuple[int, int], kind: str, bias: bool, use: SharedBlockUse) -> None:
        """sizes: of what comes in and out, and between."""
        super().__init__(build, *sizes, kind, bias, CheckpointLayout(fused="gate_up_proj"))
        name, split = "feed_forward.gate_up_proj_adapter_list", even_shards(sizes[1], build.size)
        self.adapter = Adapter(build, use, sizes[0], name, [split, split])
        self.ops.take("add")

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.ops.gated(self.ops.add(self.adapter(x), self.gate_up(x)), self.kind))


class SharedBlock(nn.Module):
    """x [T, 2 hidden] -> [T, hidden]: norm, attention, norm, feed-forward, without residuals.

    What `first` has, an earlier use of the same block, is this one's too: its weights are there once.
    """

    def __init__(
        self, norms: tuple[RMSNorm, RMSNorm], attention: AdaptedAttention, feed: AdaptedMLP, first: "SharedBlock | None"
    ) -> None:
        super().__init__()
        self.input_layernorm, self.pre_ff_layernorm = norms
        self.self_attn, self.feed_forward = attention, feed
        if first is not None:
            self.input_layernorm, self.pre_ff_layernorm = first.input_layernorm, first.pre_ff_layernorm
            attention.qkv, attention.out = first.self_attn.qkv, first.self_attn.out
            feed.gate_up, feed.down = first.feed_forward.gate_up, first.feed_forward.down

    def forward(self, x: Tensor, cache: StepState) -> Tensor:
        x = self.self_attn(self.input_layernorm(x), cache)
        out: Tensor = self.feed_forward(self.pre_ff_layernorm(x))
        return out
