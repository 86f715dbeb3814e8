"""Cross-attention: a decoder's tokens attend to the rows of an encoder, whose K and V lie in pages."""

from torch import Tensor, nn

from quintet.interface.types import AttentionSpec
from quintet.layers.attention.attention import AttentionSizes
from quintet.layers.build import BuildContext, split_heads
from quintet.layers.layer_state import StepState
from quintet.layers.linear import column_parallel, row_parallel


class CrossAttention(nn.Module):
    """x [T, hidden] -> [T, hidden]. It has queries and outputs alone: K and V are the encoder's to write."""

    def __init__(self, build: BuildContext, sizes: AttentionSizes) -> None:
        super().__init__()
        queries, keys = split_heads(sizes.heads, sizes.kv_heads, build.size)
        self.q = column_parallel(build, sizes.hidden, {sizes.names[0]: queries.times(sizes.head_dim)}, sizes.bias)
        outputs = (sizes.output, sizes.hidden)
        self.out = row_parallel(build, queries.times(sizes.head_dim), outputs, sizes.output_bias)
        self._head_dim = sizes.head_dim
        self.heads = range(*queries.ranges[build.rank])  # of the whole layer's, those of this rank
        self.spec = AttentionSpec(
            heads=queries.local(build.rank),
            kv_heads=keys.local(build.rank),
            head_dim=sizes.head_dim,
            scale=sizes.head_dim**-0.5 if sizes.scale is None else sizes.scale,
            dtype=build.dtype,
            page_size=build.page_size,
            kv_dtype=build.kv_dtype,
            causal=False,
            source="cross",
        )
        self.mixing = build.make_mixer(self.spec)
        self.mixing.kv_heads = sizes.kv_heads

    def forward(self, x: Tensor, cache: StepState) -> Tensor:
        q = self.q(x).reshape(x.shape[0], -1, self._head_dim)
        out: Tensor = self.out(self.mixing.read(q, cache).reshape(x.shape[0], -1))
        return out
