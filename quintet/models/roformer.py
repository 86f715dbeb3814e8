"""RoFormer (Su et al. 2021), the trunk: BERT whose queries and keys turn, neighbours together."""

from typing import Any

from quintet.layers.build import BuildContext
from quintet.layers.decoder import refuse
from quintet.layers.embedding import PositionEmbedding
from quintet.layers.encoder import Encoder
from quintet.layers.rope import Rotary, head_dim
from quintet.models.bert import NAMES

TURNS = {"rope_type": "default", "rope_theta": 10000.0}


class RoFormerModel(Encoder):
    """Rotary positions, and segments; word embeddings may be narrower than layers."""

    prefixes = ("roformer.",)
    names = (*NAMES, ("embeddings_project.", "widened."))
    ignored_tensors = (*Encoder.ignored_tensors, r"encoder\.embed_positions\.weight")

    def __init__(self, config: Any, build: BuildContext) -> None:
        refuse(config, "is_decoder", "rotary_value")
        super().__init__(config, build)

    def positions(self, config: Any, build: BuildContext, width: int) -> PositionEmbedding | None:
        return None

    def rotary(self, config: Any, build: BuildContext) -> Rotary | None:
        return Rotary(build, head_dim(config), TURNS, config.max_position_embeddings, interleaved=True)
