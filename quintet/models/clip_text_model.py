"""CLIP (Radford et al. 2021) and SigLIP (Zhai et al. 2023), the text tower: norms before each branch.

With the class of both towers, texts are projected, and rows of a picture's tower stand in their places as they are.
"""

from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from quintet.interface.types import Batch
from quintet.layers.attention.attention import AttentionSizes, SelfAttention
from quintet.layers.build import BuildContext, replicated
from quintet.layers.encoder import Encoder, plain_mlp
from quintet.layers.layer_state import StepState
from quintet.layers.linear import column_parallel
from quintet.layers.mlp import MLP
from quintet.layers.norm import LayerNorm
from quintet.layers.rope import Rotary

BOTH_TOWERS = ("CLIPModel", "SiglipModel", "Siglip2Model")
QUICK = 1.702  # of quick_gelu: x * sigmoid(1.702 x), which is silu(1.702 x) / 1.702


class _QuickMLP(nn.Module):
    """down(quick_gelu(up(x)))."""

    def __init__(self, mlp: MLP, build: BuildContext) -> None:
        super().__init__()
        self.up, self.down, self._ops = mlp.up, mlp.down, build.ops.take("activate", "scale")

    def forward(self, x: Tensor) -> Tensor:
        ops = self._ops
        out: Tensor = self.down(ops.scale(ops.activate(ops.scale(self.up(x), QUICK), "silu"), 1 / QUICK))
        return out


class CLIPEncoderLayer(nn.Module):
    """Attention and feed-forward, each behind a norm."""

    def __init__(self, config: Any, build: BuildContext, causal: bool) -> None:
        super().__init__()
        self._add, norm = build.ops.take("add").add, (build, config.hidden_size, config.layer_norm_eps)
        sizes = AttentionSizes.from_config(config, causal=causal, uses_kv_cache=False, bias=True, output_bias=True)
        # build.causal is of decoders; False: they keep nothing, as this does
        self.attention_norm, self.attention = LayerNorm(*norm), SelfAttention(replace(build, causal=True), sizes, None)
        quick = config.hidden_act == "quick_gelu"
        mlp = MLP(build, (config.hidden_size, config.intermediate_size), "silu", ("up_proj", "down_proj"))
        self.norm, self.mlp = LayerNorm(*norm), _QuickMLP(mlp, build) if quick else plain_mlp(config, build)

    def forward(self, x: Tensor, cache: StepState) -> Tensor:
        x = self._add(self.attention(self.attention_norm(x), cache), x)
        out: Tensor = self._add(self.mlp(self.norm(x)), x)
        return out


class CLIPTextModel(Encoder):
    """Causal in CLIP, and not in SigLIP."""

    ignored_tensors = (r".*embeddings\.position_ids", r"head\..*")
    prefixes = ("text_model.",)
    names = (
        ("embeddings.token_embedding.", "words."),
        ("embeddings.position_embedding.", "places."),
        ("encoder.layers.", "layers."),
        (".self_attn.out_proj.", ".attention.o_proj."),
        (".self_attn.", ".attention."),
        (".layer_norm1.", ".attention_norm."),
        (".layer_norm2.", ".norm."),
        (".mlp.fc1.", ".mlp.up_proj."),
        (".mlp.fc2.", ".mlp.down_proj."),
    )

    def __init__(self, config: Any, build: BuildContext) -> None:
        config.type_vocab_size = 0
        self._causal = config.model_type == "clip_text_model"
        super().__init__(config, build)
        self.norm, width = nn.Identity(), config.hidden_size
        self.final_layer_norm = LayerNorm(build, width, config.layer_norm_eps)
        self._build, self._place, self.projection = build, build.ops.take("place_rows").place_rows, None
        if any(each in BOTH_TOWERS for each in getattr(config, "architectures", None) or ()):
            name = "text_projection" if self._causal else "head"
            self.projection = column_parallel(build, width, {name: replicated(width, build.size)}, not self._causal)

    def block(self, config: Any, build: BuildContext, index: int, rotary: Rotary | None) -> nn.Module:
        return CLIPEncoderLayer(config, build, self._causal)

    def finished(self, x: Tensor, batch: Batch) -> Tensor:
        x, indices = self.final_layer_norm(x), batch.inputs.embed_indices
        x = x if self.projection is None else self.projection(x)
        if indices is not None and self._build.row_store is not None:
            x = self._place(x, self._build.row_store.rows, indices)
        return x
