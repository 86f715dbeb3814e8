"""DeepSeek-V3.2 and GLM-5 (DeepSeek-AI 2025; Z.ai 2026): DeepSeek-V3 for requests of up to index_topk tokens."""

from typing import Any

from quintet.layers.build import BuildContext
from quintet.models.deepseek_v3 import DeepseekV3ForCausalLM


class DeepseekV32ForCausalLM(DeepseekV3ForCausalLM):
    """An indexer chooses index_topk tokens that each token attends to. In requests of up to that length it chooses all,
    and attention is DeepSeek-V3's. Longer ones are refused, and the indexer's weights are not read."""

    def __init__(self, config: Any, build: BuildContext) -> None:
        most, served = config.index_topk, build.max_model_len
        if served > most:
            raise ValueError(
                f"{config.model_type} looks at the {most} tokens that its indexer chooses (index_topk), which is not "
                f"computed here: in requests of up to {most} tokens these are all; set max_model_len to {most} or "
                f"less, and not {served}"
            )
        dense = [index < config.first_k_dense_replace for index in range(config.num_hidden_layers)]
        if list(config.mlp_layer_types) != ["dense" if each else "sparse" for each in dense]:
            raise ValueError(
                f"mlp_layer_types is {config.mlp_layer_types}, and {config.model_type} here has "
                f"{config.first_k_dense_replace} dense layers (first_k_dense_replace) before all others"
            )
        super().__init__(config, build)
        self.ignored_tensors = (*self.ignored_tensors, r"model\.layers\.\d+\.self_attn\.indexer\..*")

    @staticmethod
    def neighbours(config: Any) -> bool:
        return True
