"""ELECTRA (Clark et al. 2020), the trunk: BERT with word embeddings that may be narrower than its layers."""

from quintet.layers.encoder import Encoder
from quintet.models.bert import NAMES


class ElectraModel(Encoder):
    """Learned positions, and segments."""

    names = (*NAMES, ("embeddings_project.", "widened."))
    prefixes = ("electra.",)
