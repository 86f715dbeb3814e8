"""Request bodies of the pooling routes: OpenAI's and vLLM's embeddings, classes, scores; Cohere's and Jina's."""

from typing import Annotated, Any, ClassVar

from pydantic import Field, SkipValidation, WithJsonSchema

from quintet.server.http.inputs.body import Body, UnsupportedField
from quintet.server.http.openai.chat_protocol import Messages, TemplateFields
from quintet.server.http.openai.completions_protocol import TokenId
from quintet.server.http.pooling.encoding_format import COHERE_TYPES, DTYPES, ENDIANNESS, FORMATS

_NO_MEDIA = "embedding and scoring models take text alone"
_UNSUPPORTED: dict[str, UnsupportedField] = {
    "mm_processor_kwargs": UnsupportedField(_NO_MEDIA),
    "padding": UnsupportedField("texts are never padded here", ("do_not_pad",)),
    "images": UnsupportedField(_NO_MEDIA, ([],)),
}
_DOCUMENT = {"anyOf": [{"type": "string"}, {"type": "object", "properties": {"text": {"type": "string"}}}]}
Document = Annotated[Any, WithJsonSchema(_DOCUMENT)]
_CHUNKS = {"type": "object", "properties": {"chunk_size": {"type": "integer", "minimum": 1}}}
_PARTS = {"type": "object", "properties": {"content": {"type": "array"}}}
Documents = Annotated[Any, WithJsonSchema({"anyOf": [*_DOCUMENT["anyOf"], {"type": "array", "items": _DOCUMENT}]})]


class PoolingBody(Body):
    """Fields of all pooling requests."""

    model: str | None = Field(None, description="the model's name; none is the one that is served")
    user: str | None = Field(None, description="accepted, not used")
    request_id: str | None = Field(None, description="name of the request, in the answer's id and the log")
    priority: int | None = Field(
        None, ge=-(2**31), le=2**31 - 1, description="lower runs first, where the engine schedules by priority"
    )
    cache_salt: str | None = Field(
        None, min_length=1, max_length=1024, description="texts share cached pages with those of the same salt alone"
    )
    truncate_prompt_tokens: int | None = Field(
        None, ge=-1, description="tokens that are kept of a text, special ones included; -1: what the model takes"
    )
    truncation_side: str | None = Field(
        None, description="right keeps the first tokens, as if not given; left the last ones"
    )

    use_activation: bool | None = Field(
        None, description="classes as probabilities, embeddings of length 1; as the model's files say if not given"
    )

    unsupported_fields: ClassVar[dict[str, UnsupportedField]] = _UNSUPPORTED


class InputBody(PoolingBody, TemplateFields):
    """Request with texts, each pooled on its own, or with a conversation."""

    input: Annotated[str | list[str] | list[TokenId] | list[list[TokenId]] | None, SkipValidation] = Field(
        None, description="text, token ids, or a list of either"
    )
    messages: Messages = Field(None, description="instead of input: a conversation, written out by the chat template")
    add_special_tokens: bool | None = Field(
        None, description="let the tokenizer add its own; texts do, conversations have them in the template"
    )


class EncodedBody(InputBody):
    """Request with the encoding and dtype of the numbers."""

    encoding_format: str | None = Field(None, description=f"one of {', '.join(FORMATS)}; float if not given")
    embed_dtype: str | None = Field(
        None, description=f"type of numbers that are not JSON: one of {', '.join(DTYPES)}; float32 if not given"
    )
    endianness: str | None = Field(None, description=f"of those: one of {', '.join(ENDIANNESS)}; native if not given")
    dimensions: int | None = Field(
        None, description="numbers of each embedding: its first ones, where the model was made so"
    )
    normalize: bool | None = Field(None, description="embeddings of length 1; the same as use_activation")


class EmbeddingRequest(EncodedBody):
    """OpenAI's request, with vLLM's additions."""


class ClassificationRequest(InputBody):
    """vLLM's classification request."""


class PoolingRequest(EncodedBody):
    """vLLM's pooling request: any task of the model, or `data` for an IO processor."""

    task: str | None = Field(None, description="one of the model's tasks; its first if not given")
    data: Annotated[Any, WithJsonSchema({})] = Field(None, description="for the IO processor, instead of input")
    softmax: bool | None = Field(None, description="an older name of use_activation")
    late_chunking_params: Annotated[Any, WithJsonSchema(_CHUNKS)] = Field(
        None, description="of token_embed: a vector for each chunk of tokens, the mean of theirs"
    )


class ScoreRequest(PoolingBody):
    """vLLM's, with all field names: one of data_1, text_1 or queries; one of data_2, text_2, documents or items."""

    data_1: Documents = None
    data_2: Documents = None
    text_1: Documents = None
    text_2: Documents = None
    queries: Documents = None
    documents: Documents = None
    items: Documents = None
    max_tokens_per_query: int | None = Field(None, ge=0, description="tokens that are kept of each query; 0: all")
    max_tokens_per_doc: int | None = Field(None, ge=0, description="tokens that are kept of each document; 0: all")


class RerankRequest(PoolingBody):
    """Cohere's (versions 1 and 2) and Jina's rerank request, as in vLLM."""

    query: Document
    documents: Documents
    top_n: int | None = Field(None, ge=0, description="results that are given, the best first; all if not given, or 0")
    return_documents: bool | None = Field(None, description="whether results hold the document's text (true)")
    max_tokens_per_query: int | None = Field(None, ge=0, description="tokens that are kept of the query; 0: all")
    max_tokens_per_doc: int | None = Field(None, ge=0, description="tokens that are kept of each document; 0: all")

    unsupported_fields: ClassVar[dict[str, UnsupportedField]] = {
        **_UNSUPPORTED,
        "rank_fields": UnsupportedField("documents are ranked by their text", (["text"], [])),
        "max_chunks_per_doc": UnsupportedField("a document is ranked as a whole; max_tokens_per_doc cuts it", (1,)),
    }


class CohereEmbedRequest(Body):
    """Cohere's embed request, version 2."""

    model: str | None = Field(None, description="the model's name; none is the one that is served")
    texts: list[str] | None = Field(None, fail_fast=True, description="what becomes embeddings")
    inputs: Annotated[Any, WithJsonSchema({"type": "array", "items": _PARTS})] = Field(
        None, description='instead of texts: objects such as {"content": [{"type": "text", "text": ...}]}'
    )
    input_type: str | None = Field(
        None, description="search_query, search_document, or another name of a prompt of the model, which is put "
        "before each text",
    )  # fmt: skip
    embedding_types: list[str] | None = Field(
        None, fail_fast=True, description=f"some of {', '.join(COHERE_TYPES)}; float if not given"
    )
    output_dimension: int | None = Field(None, description="numbers of each embedding, where the model was made so")
    max_tokens: int | None = Field(None, ge=1, description="tokens that are kept of each text")
    truncate: str | None = Field(
        None, description="what a text that is too long loses: its END, as if not given, or START; NONE: it is refused"
    )
    priority: int | None = Field(None, ge=-(2**31), le=2**31 - 1, description="lower runs first")

    unsupported_fields: ClassVar[dict[str, UnsupportedField]] = {"images": UnsupportedField(_NO_MEDIA, ([],))}
