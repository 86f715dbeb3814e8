"""Options for the runner (generate or pooling), and for pooling hidden states into numbers."""

from dataclasses import dataclass
from typing import Any, ClassVar

from quintet.common.value_parsers import boolean, count, finite_number, id_list, one_of, optional
from quintet.config.schema.fields import Nested, choice_field, option

SEQUENCE = ("CLS", "LAST", "MEAN")  # one row of a text
TOKEN = ("ALL", "STEP")  # a row of each token
_upper = {kind.lower(): kind for kind in (*SEQUENCE, *TOKEN)}


def _dtype(value: Any) -> str:
    return str(one_of("float32", "model", auto="float32")(str(value).removeprefix("torch.")))


@dataclass(frozen=True)
class PoolerConfig(Nested):
    """Pooling of hidden states into numbers, if the checkpoint does not define it or is overridden; vLLM's names."""

    name: ClassVar[str] = "pooler_config"

    pooling_type: str | None = option(
        None, optional(one_of(*SEQUENCE, *TOKEN, **_upper)), "which hidden states count: of the first token, of the "
        "last, the mean; ALL, STEP: of each token", group="model", choices=(*SEQUENCE, *TOKEN),
    )  # fmt: skip
    seq_pooling_type: str | None = option(
        None,
        optional(one_of(*SEQUENCE, **_upper)),
        "the same for tasks of whole texts",
        group="model",
        choices=SEQUENCE,
    )
    tok_pooling_type: str | None = option(
        None, optional(one_of(*TOKEN, **_upper)), "the same for tasks of tokens", group="model", choices=TOKEN
    )
    normalize: bool | None = option(None, optional(boolean), "embeddings of length 1", group="model")
    use_activation: bool | None = option(
        None, optional(boolean), "classes as probabilities, and not as logits", group="model"
    )
    dimensions: int | None = option(None, optional(count()), "numbers of an embedding: its first ones", group="model")
    head_dtype: str = option(
        "float32", _dtype, "what heads are computed in; float32 alone", group="model", choices=("float32",)
    )
    logit_bias: float | None = option(
        None, optional(finite_number), "taken from logits before their activation", group="model", metavar="NUMBER"
    )
    step_tag_id: int | None = option(
        None, optional(count(0)), "token whose rows are given, with pooling_type STEP", group="model", metavar="ID"
    )
    returned_token_ids: tuple[int, ...] | None = option(
        None, optional(id_list), "columns of each row that are given", group="model", metavar="IDS"
    )
    enable_chunked_processing: bool = option(
        False, boolean, "embed texts that are longer than the model takes in pieces, and give the mean of these, "
        "weighted by their tokens", group="model",
    )  # fmt: skip
    max_embed_len: int | None = option(
        None, optional(count()), "most tokens of such a text", group="model", metavar="TOKENS"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.head_dtype != "float32":
            raise ValueError(f"{self.name}.head_dtype={self.head_dtype!r}: heads are computed in float32; leave it out")
        if self.max_embed_len is not None and not self.enable_chunked_processing:
            raise ValueError(
                f"{self.name}.max_embed_len bounds what is embedded in pieces; set enable_chunked_processing"
            )

    def type_for(self, of_tokens: bool) -> str | None:
        """The pooling type for texts, or for their tokens; None: not set."""
        own = self.tok_pooling_type if of_tokens else self.seq_pooling_type
        general = self.pooling_type if self.pooling_type in (TOKEN if of_tokens else SEQUENCE) else None
        return own or general


@dataclass(frozen=True)
class PoolingOptions:
    """Output of the model: text or numbers."""

    runner: str = choice_field(
        "auto", "auto", "generate", "pooling", draft="generate", help="what the model gives: text, or numbers "
        "(embeddings, classes, scores); auto: as its files say", group="model",
    )  # fmt: skip
    convert: str = choice_field(
        "auto", "auto", "none", "embed", "classify", "reward", help="what a model that gives text is made into with "
        "runner=pooling; auto: as its files say, else embed", group="model",
    )  # fmt: skip
