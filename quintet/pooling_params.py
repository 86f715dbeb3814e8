"""Parameters of one request to a pooling model: vLLM's names, each value checked when it is given."""

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from quintet.common import param_checks as values
from quintet.config.schema.docs import documented
from quintet.sampling_params import Checked, ParameterError, param

# What is asked of a text: one vector, one row of classes or one score for all of it, or one for each of its tokens.
OF_TEXTS = ("embed", "classify", "score")
OF_TOKENS = ("token_embed", "token_classify", "reward")
TASKS = (*OF_TEXTS, *OF_TOKENS)
MAX_RETURNED = 4096  # ids that may be named


def _task(value: Any) -> str | None:
    if value == "plugin":  # vLLM's word of an IO processor that leaves it to the model
        return None
    named = {"encode": "token_embed", "embedding": "embed"}.get(value, value) if isinstance(value, str) else value
    if named not in TASKS:
        raise ValueError(f"must be one of {', '.join(TASKS)}, not {values.shorten(value)}")
    return str(named)


def _mode(value: Any) -> str:
    if value not in ("cache_query", "score_doc"):
        raise ValueError(f"must be 'cache_query' or 'score_doc', not {values.shorten(value)}")
    return str(value)


@documented
@dataclass(slots=True)
class LateChunkingParams(Checked):
    """Late chunking: an embedding for each run of so many tokens, the mean of states that have seen the whole text."""

    _called = "late chunking parameter"

    chunk_size: int = param(0, values.positive, "tokens of a chunk, special ones among them; the last may be shorter")


@documented
@dataclass(slots=True)
class LateInteractionParams(Checked):
    """A query whose token vectors the engine keeps, or a document that is scored by them (MaxSim)."""

    _called = "late interaction parameter"

    mode: str = param("", _mode, "cache_query, or score_doc")
    query_key: str = param("", values.text, "name of the query")
    query_uses: int | None = param(
        None, values.optional(values.positive), "of cache_query: documents after which the query is given up"
    )

    def __post_init__(self) -> None:
        Checked.__post_init__(self)
        if not self.query_key:
            raise ParameterError("query_key", "must name the query")
        if self.mode == "cache_query" and self.query_uses is None:
            raise ParameterError("query_uses", "must be the number of the query's documents, where mode='cache_query'")


Kind = TypeVar("Kind", LateChunkingParams, LateInteractionParams)


def _of_kind(kind: type[Kind]) -> values.Parse:
    """Returns a parser to a checked object, of an object (it may have changed since it was made) or its fields."""

    def parse(value: Any) -> Kind | None:
        if value is None:
            return None
        if isinstance(value, kind):
            value.__post_init__()
            return value
        if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
            raise ValueError(f"must be a {kind.__name__} or a dict of its fields, not {values.shorten(value)}")
        try:
            return kind(**value)
        except (ValueError, TypeError) as error:
            raise ValueError(f"cannot be used: {error}") from None

    return parse


@documented
@dataclass(slots=True)
class PoolingParams(Checked):
    """Pooling parameters of one text; vLLM's names. None: as the model's files or pooler_config define."""

    _called = "pooling parameter"

    task: str | None = param(None, values.optional(_task), f"what is asked: {', '.join(TASKS)}")
    dimensions: int | None = param(
        None, values.optional(values.positive), "numbers of an embedding: its first ones, where the model was made so"
    )
    normalize: bool | None = param(None, values.optional(values.flag), "embeddings of length 1")
    use_activation: bool | None = param(
        None, values.optional(values.flag), "classes as probabilities, and not as logits; of embeddings: normalize"
    )
    truncate_prompt_tokens: int | None = param(
        None,
        values.optional(values.integer(-1, values.INT32)),
        "keep this many first tokens of a text, special ones included; -1: what the model takes",
    )
    step_tag_id: int | None = param(
        None, values.optional(values.token_id), "of each token's numbers, give those at this token alone"
    )
    returned_token_ids: list[int] | None = param(
        None, values.optional(values.list_of(values.token_id, MAX_RETURNED)), "of each row, give these columns alone"
    )
    skip_reading_prefix_cache: bool = param(False, values.flag, "compute what others have computed, too")
    late_chunking_params: LateChunkingParams | None = param(
        None, _of_kind(LateChunkingParams), "of token_embed: a vector for each chunk of tokens, the mean of theirs"
    )
    late_interaction_params: LateInteractionParams | None = param(
        None, _of_kind(LateInteractionParams), "of token_embed: keep a query's vectors, or score a document by them"
    )

    def __post_init__(self) -> None:
        Checked.__post_init__(self)
        if self.truncate_prompt_tokens == 0:
            raise ParameterError("truncate_prompt_tokens", "must keep at least 1 token, not 0; None keeps all")

    def clone(self) -> "PoolingParams":
        """A copy: changing either changes nothing of the other."""
        made = copy.copy(self)
        if made.returned_token_ids is not None:
            made.returned_token_ids = list(made.returned_token_ids)
        return made

    @property
    def of_tokens(self) -> bool:
        """True if each token has an output of its own."""
        return self.task in OF_TOKENS
