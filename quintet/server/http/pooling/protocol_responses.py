"""Response types of the pooling routes; the numbers in them are already encoded."""

import msgspec
from msgspec import UNSET, Raw, UnsetType

from quintet.server.http.usage import CachedTokens


class PoolingUsage(msgspec.Struct, kw_only=True):
    """Tokens of all texts of a request; no tokens are generated."""

    prompt_tokens: int
    total_tokens: int
    completion_tokens: int = 0
    prompt_tokens_details: CachedTokens


class Embedding(msgspec.Struct, kw_only=True):
    """Embedding of one text."""

    object: str = "embedding"
    index: int
    embedding: Raw  # a list of numbers, or base64


class Embeddings(msgspec.Struct, kw_only=True):
    """Embeddings in the order of the input."""

    id: str
    object: str = "list"
    created: int
    model: str
    data: list[Embedding]
    usage: PoolingUsage


class Pooled(msgspec.Struct, kw_only=True):
    """Pooled output of one text."""

    object: str = "pooling"
    index: int
    data: Raw  # a list of numbers, one of these for each token, or base64


class PooledList(msgspec.Struct, kw_only=True):
    """Pooled outputs in the order of the input."""

    id: str
    object: str = "list"
    created: int
    model: str
    data: list[Pooled]
    usage: PoolingUsage


class Plugged(msgspec.Struct, kw_only=True):
    """Response of an IO processor."""

    request_id: str | None = None
    created_at: int
    data: Raw


class Classes(msgspec.Struct, kw_only=True):
    """Class probabilities of one text."""

    index: int
    label: str | None  # of the likeliest
    probs: Raw
    num_classes: int


class Classification(msgspec.Struct, kw_only=True):
    """Classifications in the order of the input."""

    id: str
    object: str = "list"
    created: int
    model: str
    data: list[Classes]
    usage: PoolingUsage


class Score(msgspec.Struct, kw_only=True):
    """Score of one pair."""

    index: int
    object: str = "score"
    score: float


class Scores(msgspec.Struct, kw_only=True):
    """Scores in the order of the pairs."""

    id: str
    object: str = "list"
    created: int
    model: str
    data: list[Score]
    usage: PoolingUsage


class RankedDocument(msgspec.Struct):
    """A document as in the request."""

    text: str


class Ranked(msgspec.Struct, kw_only=True):
    """Relevance score of one document."""

    index: int  # in the request
    relevance_score: float
    document: RankedDocument | UnsetType = UNSET


class InputTokens(msgspec.Struct):
    """Input tokens of all texts."""

    input_tokens: int


class ApiVersion(msgspec.Struct):
    """Version of Cohere's API."""

    version: str


class Meta(msgspec.Struct):
    """Usage in Cohere's format."""

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
    """Embeddings by requested type, in the order of the texts."""

    id: str
    response_type: str = "embeddings_by_type"
    embeddings: dict[str, list[Raw]]
    texts: list[str]
    meta: Meta
