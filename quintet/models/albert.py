"""ALBERT (Lan et al. 2020), the trunk: BERT with layers that share their weights, and narrower word embeddings."""

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from quintet.layers.build import BuildContext, replicated
from quintet.layers.encoder import Encoder
from quintet.layers.layer_state import StepState
from quintet.layers.linear import column_parallel
from quintet.layers.rope import Rotary


class AlbertLayerGroup(nn.Module):
    """Blocks that stand behind each other each time that their group comes."""

    def __init__(self, blocks: Iterable[nn.Module]) -> None:
        super().__init__()
        self.albert_layers = nn.ModuleList(blocks)

    def forward(self, x: Tensor, cache: StepState) -> Tensor:
        for block in self.albert_layers:
            x = block(x, cache)
        return x


class AlbertModel(Encoder):
    """Learned positions, and segments."""

    ignored_tensors = (*Encoder.ignored_tensors, r"(sop_classifier|predictions)\..*")
    config_counts_layers = False  # config.json counts how often layers run
    prefixes = ("albert.",)
    names = (
        ("embeddings.word_embeddings.", "words."),
        ("embeddings.position_embeddings.", "places."),
        ("embeddings.token_type_embeddings.", "types."),
        ("embeddings.LayerNorm.", "norm."),
        ("encoder.embedding_hidden_mapping_in.", "widened."),
        ("encoder.albert_layer_groups.", "layers."),
        (".attention.query.", ".attention.q_proj."),
        (".attention.key.", ".attention.k_proj."),
        (".attention.value.", ".attention.v_proj."),
        (".attention.dense.", ".attention.o_proj."),
        (".attention.LayerNorm.", ".attention_norm."),
        (".full_layer_layer_norm.", ".norm."),
        (".ffn_output.", ".mlp.down_proj."),
        (".ffn.", ".mlp.up_proj."),
    )

    def __init__(self, config: Any, build: BuildContext) -> None:
        super().__init__(config, build)
        if self.widened is None:  # of as many numbers, words go through a product nevertheless
            split = replicated(config.hidden_size, build.size)
            self.widened = column_parallel(build, config.embedding_size, {"widened": split}, True)
        groups, times = config.num_hidden_groups, config.num_hidden_layers
        self._order = [self.layers[int(index / (times / groups))] for index in range(times)]

    def blocks(self, config: Any) -> int:
        count: int = config.num_hidden_groups
        return count

    def order(self) -> Iterable[nn.Module]:
        return self._order

    def block(self, config: Any, build: BuildContext, index: int, rotary: Rotary | None) -> nn.Module:
        single = super().block
        return AlbertLayerGroup(single(config, build, index, rotary) for _ in range(config.inner_group_num))
