"""RoBERTa (Liu et al. 2019, and XLM-RoBERTa, CamemBERT), the trunk: BERT, positions begin behind the padding's."""

from typing import Any

from quintet.layers.build import BuildContext
from quintet.layers.embedding import PositionEmbedding
from quintet.layers.encoder import Encoder
from quintet.models.bert import NAMES

FLASH = (  # of the layout that Jina's reranker v2 has
    ("emb_ln.", "norm."),
    ("encoder.layers.", "layers."),
    (".mixer.out_proj.", ".attention.o_proj."),
    (".mixer.Wqkv.", ".attention.qkv_proj."),
    ("mlp.fc1.", "mlp.up_proj."),
    ("mlp.fc2.", "mlp.down_proj."),
    (".norm1.", ".attention_norm."),
    (".norm2.", ".norm."),
)


class RobertaModel(Encoder):
    """Learned positions: the first is padding_idx + 1."""

    names = (*FLASH, *NAMES)
    prefixes = ("roberta.", "camembert.")

    @classmethod
    def max_text_length(cls, config: Any) -> int | None:
        count: int = config.max_position_embeddings - _first(config)
        return count

    def positions(self, config: Any, build: BuildContext, width: int) -> PositionEmbedding | None:
        first = _first(config)
        return PositionEmbedding(build, config.max_position_embeddings - first, width, first)


def _first(config: Any) -> int:
    return int(config.pad_token_id or 0) + 1
