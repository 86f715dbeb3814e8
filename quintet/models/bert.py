"""BERT (Devlin et al. 2019), the trunk: tokens see both ways, nothing is kept, and hidden states come out."""

from quintet.layers.encoder import Encoder

NAMES = (  # (a checkpoint's, the modules')
    ("embeddings.word_embeddings.", "words."),
    ("embeddings.position_embeddings.", "places."),
    ("embeddings.token_type_embeddings.", "types."),
    ("embeddings.LayerNorm.", "norm."),
    ("encoder.layer.", "layers."),
    ("attention.self.query.", "attention.q_proj."),
    ("attention.self.key.", "attention.k_proj."),
    ("attention.self.value.", "attention.v_proj."),
    ("attention.output.dense.", "attention.o_proj."),
    ("attention.output.LayerNorm.", "attention_norm."),
    (".intermediate.dense.", ".mlp.up_proj."),
    (".output.dense.", ".mlp.down_proj."),
    (".output.LayerNorm.", ".norm."),
)


class BertModel(Encoder):
    """Learned positions, and segments."""

    names = NAMES
    prefixes = ("bert.",)
