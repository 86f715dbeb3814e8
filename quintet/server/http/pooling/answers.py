"""Answers of numbers: what is in their JSON, beside the numbers, which come written."""

import msgspec
from msgspec import UNSET, Raw, UnsetType

from quintet.server.http.tally import CachedTokens


class PoolingUsage(msgspec.Struct, kw_only=True):
    """Tokens of all texts of a request; none are drawn."""

    prompt_tokens: int
    total_tokens: int
    completion_tokens: int = 0
    prompt_tokens_details: CachedTokens


class Embedding(msgspec.Struct, kw_only=True):
    """One text's."""

    object: str = "embedding"
    index: int
    embedding: Raw  # a list of numbers, or base64


class Embeddings(msgspec.Struct, kw_only=True):
    """In the order of the input."""

    id: str
    object: str = "list"
    created: int
    model: str
    data: list[Embedding]
    usage: PoolingUsage


class Pooled(msgspec.Struct, kw_only=True):
    """One text's numbers."""

    object: str = "pooling"
    index: int
    data: Raw  # a list of numbers, one of these for each token, or base64


class PooledList(msgspec.Struct, kw_only=True):
    """In the order of the input."""

    id: str
    object: str = "list"
    created: int
    model: str
    data: list[Pooled]
    usage: PoolingUsage


class Plugged(msgspec.Struct, kw_only=True):
    """What an IO processor made."""

    request_id: str | None = None
    created_at: int
    data: Raw


class Classes(msgspec.Struct, kw_only=True):
    """One text's."""

    index: int
    label: str | None  # of the likeliest
    probs: Raw
    num_classes: int


class Classification(msgspec.Struct, kw_only=True):
    """In the order of the input."""

    id: str
    object: str = "list"
    created: int
    model: str
    data: list[Classes]
    usage: PoolingUsage


class Score(msgspec.Struct, kw_only=True):
    """One pair's."""

    index: int
    object: str = "score"
    score: float


class Scores(msgspec.Struct, kw_only=True):
    """In the order of the pairs."""

    id: str
    object: str = "list"
    created: int
    model: str
    data: list[Score]
    usage: PoolingUsage


class RankedDocument(msgspec.Struct):
    """As it was given."""

    text: str


class Ranked(msgspec.Struct, kw_only=True):
    """One document."""

    index: int  # in the request
    relevance_score: float
    document: RankedDocument | UnsetType = UNSET


class InputTokens(msgspec.Struct):
    """Of all texts."""

    input_tokens: int


class ApiVersion(msgspec.Struct):
    """Of Cohere's API."""

    version: str


class Meta(msgspec.Struct):
    """Cohere's way to tell usage."""

    api_version: ApiVersion
    billed_units: InputTokens
    tokens: InputTokens


class Ranking(msgspec.Struct, kw_only=True):
    """Documents, the best first."""

    id: str
    model: str
    results: list[Ranked]
    usage: PoolingUsage
    meta: Meta


class CohereEmbeddings(msgspec.Struct, kw_only=True):
    """Of each type that was asked for, in the order of the texts."""

    id: str
    response_type: str = "embeddings_by_type"
    embeddings: dict[str, list[Raw]]
    texts: list[str]
    meta: Meta
