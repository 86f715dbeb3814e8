"""Whisper (Radford et al. 2022), Distil-Whisper: a decoder of text whose layers read what an encoder hears."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from quintet.layers.attention.attention import SelfAttention
from quintet.layers.attention.cross import CrossAttention
from quintet.layers.build import BuildContext, Layer, even_shards
from quintet.layers.decoder import CausalLM, refuse, run_layers, select_output_rows
from quintet.layers.embedding import PositionEmbedding, VocabParallelEmbedding
from quintet.layers.layer_state import LayerMixer, StepState
from quintet.layers.linear import LMHead, column_parallel, row_parallel
from quintet.layers.mlp import activation_name
from quintet.layers.norm import LayerNorm
from quintet.models.encoders.whisper import EPS, WhisperEncoder, attention_sizes, canonical_name, with_plain_products


class WhisperDecoderLayer(Layer):
    """Attention to the text before, to the encoder's rows, and feed-forward, each behind a norm."""

    def __init__(self, config: Any, build: BuildContext) -> None:
        super().__init__(build, "add", "activate")
        width, inner = config.d_model, even_shards(config.decoder_ffn_dim, build.size)
        sizes = attention_sizes(width, config.decoder_attention_heads)
        self.self_attn_layer_norm = LayerNorm(build, width, EPS)
        self.self_attn = SelfAttention(build, sizes, None)
        self.encoder_attn_layer_norm = LayerNorm(build, width, EPS)
        self.encoder_attn = CrossAttention(build, sizes)
        self.final_layer_norm = LayerNorm(build, width, EPS)
        self.fc1 = column_parallel(build, width, {"fc1": inner}, True)
        self.fc2 = row_parallel(build, inner, ("fc2", width), True)
        self._kind = activation_name(config.activation_function)

    def forward(self, x: Tensor, cache: StepState) -> Tensor:
        add = self.ops.add
        x = add(self.self_attn(self.self_attn_layer_norm(x), cache), x)
        x = add(self.encoder_attn(self.encoder_attn_layer_norm(x), cache), x)
        out: Tensor = add(self.fc2(self.ops.activate(self.fc1(self.final_layer_norm(x)), self._kind)), x)
        return out


class WhisperDecoder(nn.Module):
    """Token and position embeddings, blocks, a last norm."""

    def __init__(self, config: Any, build: BuildContext) -> None:
        super().__init__()
        self._ops, self._build = build.ops.take("add", "take_rows"), build
        self.embed_tokens = VocabParallelEmbedding(build, config.vocab_size, config.d_model)
        self.embed_positions = PositionEmbedding(build, config.max_target_positions, config.d_model)
        self.layers = nn.ModuleList(WhisperDecoderLayer(config, build) for _ in range(config.decoder_layers))
        self.layer_norm = LayerNorm(build, config.d_model, EPS)

    def forward(self, cache: StepState) -> tuple[Tensor, list[Tensor]]:
        batch = cache.batch
        x = self._ops.add(self.embed_tokens.embed(batch), self.embed_positions(batch.positions))
        x, taps = run_layers(self.layers, x, cache, self._build)
        return self.layer_norm(select_output_rows(x, cache, self._ops)), taps


class WhisperForConditionalGeneration(CausalLM):
    """The decoder and its head, which is the token embedding; the worker builds the encoder beside it."""

    trunk_name = "model.decoder"
    supports_pipeline = False
    config_counts_layers = False  # num_hidden_layers is the encoder's number
    encoder_class = WhisperEncoder
    ignored_tensors = (  # the encoder's
        *CausalLM.ignored_tensors,
        r"model\.encoder\..*",
        r"model\.decoder\.layers\.\d+\.encoder_attn\.(k_proj|v_proj)\..*",
    )

    def __init__(self, config: Any, build: BuildContext) -> None:
        super().__init__(build)
        refuse(config, "scale_embedding")
        self.model = nn.ModuleDict({"decoder": WhisperDecoder(config, build)})
        source = "/model.decoder.embed_tokens" if build.ties_head(config) else "/lm_head"
        self.lm_head = LMHead(build, config.d_model, config.vocab_size, source)

    canonical = staticmethod(canonical_name)  # no other name depends on the class

    def gathered(self, entries: Mapping[str, Any]) -> Mapping[str, Any]:
        """Keys get a bias of zeros."""
        return with_plain_products(entries)

    @classmethod
    def max_text_length(cls, config: Any) -> int | None:
        length: int = config.max_target_positions
        return length

    @property
    def cross_mixers(self) -> list[LayerMixer]:
        """Mixers of the layers' cross-attention, in order."""
        layers: Any = self.get_submodule("model.decoder.layers")
        return [layer.encoder_attn.mixing for layer in layers]
