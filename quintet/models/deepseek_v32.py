"""DeepSeek-V3.2 and GLM-5 (DeepSeek-AI 2025; Z.ai 2026): DeepSeek-V3, and each token sees what an indexer chooses."""

from typing import Any

from torch import nn

from quintet.layers.attention.indexer import IndexerSizes, TokenIndexer
from quintet.layers.build import BuildContext
from quintet.layers.rope import Rotary
from quintet.models.deepseek_v3 import DeepseekV3ForCausalLM

INDEXER = r"model\.layers\.\d+\.self_attn\.indexer\..*"


class DeepseekV32ForCausalLM(DeepseekV3ForCausalLM):
    """DeepSeek-V3 whose tokens see index_topk tokens at most, which a layer's indexer chooses. Where no request is
    longer, attention is DeepSeek-V3's, and the indexers' weights are not read. Layers of GLM-5 without an indexer
    ("shared") see what the last one before chose."""

    _of_indexers: Rotary  # shared by the layers, where it is not attention's

    def __init__(self, config: Any, build: BuildContext) -> None:
        self._sparse = build.max_model_len > self.visible_tokens(config)
        kinds = [kind for kind in self._indexers(config) if kind]
        if self._sparse and "shared" in kinds and (kinds[0] == "shared" or len(build.stage.counts) > 1):
            raise ValueError(
                f"layers of {config.model_type} see what an indexer of the layers before chose (indexer_types), which "
                "pipeline stages do not hand on, and the first has one; leave pipeline_parallel_size out, or set "
                f"max_model_len to {self.visible_tokens(config)} or less"
            )
        first = getattr(config, "first_k_dense_replace", None)
        dense = [first is None or index < first for index in range(config.num_hidden_layers)]
        if first is not None and list(config.mlp_layer_types) != ["dense" if each else "sparse" for each in dense]:
            raise ValueError(
                f"mlp_layer_types is {config.mlp_layer_types}, and {config.model_type} here has "
                f"{config.first_k_dense_replace} dense layers (first_k_dense_replace) before all others"
            )
        super().__init__(config, build)
        self.recordable = self.recordable and not self._sparse  # indexers are torch's
        self.ignored_tensors = (*self.ignored_tensors, *(() if self._sparse else (INDEXER,)))

    def _attention(self, config: Any, build: BuildContext, index: int, rotary: Rotary | None) -> nn.Module:
        if not self._sparse:
            return super()._attention(config, build, index, rotary)
        full = self._indexers(config)[index] == "full"
        indexer, sizes = self._indexer(config, build, rotary) if full else None, self._latent_sizes(config)
        return self.latent_attention(build, sizes, rotary, self.visible_tokens(config), indexer)

    def _indexer(self, config: Any, build: BuildContext, rotary: Rotary | None) -> TokenIndexer:
        """Builds a layer's indexer; `rotary` is attention's."""
        if config.model_type != "glm_moe_dsa":  # turns halves, where attention turns neighbours
            if not hasattr(self, "_of_indexers"):
                trained = config.max_position_embeddings
                self._of_indexers = Rotary(build, config.qk_rope_head_dim, config.rope_parameters, trained)
            rotary = self._of_indexers
        return TokenIndexer(build, IndexerSizes.from_config(config), rotary)

    @staticmethod
    def visible_tokens(config: Any) -> int:
        """Returns the number of tokens that one sees at most."""
        count: int = config.index_topk
        return count

    @staticmethod
    def _indexers(config: Any) -> list[str]:
        """Returns "full" or "shared" for each layer, "" for one that sees all."""
        return list(getattr(config, "indexer_types", None) or ["full"] * config.num_hidden_layers)

    @staticmethod
    def neighbours(config: Any) -> bool:
        return True
