"""RemBERT (Chung et al. 2021), the trunk: BERT with word embeddings of another width than its layers."""

from typing import Any

from quintet.layers.build import BuildContext, replicated
from quintet.layers.decoder import refuse
from quintet.layers.encoder import Encoder
from quintet.layers.linear import column_parallel
from quintet.models.bert import NAMES


class RemBertModel(Encoder):
    """Learned positions, and segments."""

    prefixes = ("rembert.",)
    names = (("encoder.embedding_hidden_mapping_in.", "widened."), *NAMES)

    def __init__(self, config: Any, build: BuildContext) -> None:
        refuse(config, "is_decoder")
        config.embedding_size = config.input_embedding_size
        super().__init__(config, build)
        split = replicated(config.hidden_size, build.size)  # also where the width is the same
        self.widened = column_parallel(build, config.embedding_size, {"widened": split}, True)
