"""POST /tokenize and /detokenize in vLLM's shapes, /v1/models and /version: requests and answers."""

from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType
from pydantic import Field

from quintet.server.http.inputs.body import Body
from quintet.server.http.openai.chat_protocol import MediaFields, Messages, TemplateFields


class TokenizeRequest(MediaFields, TemplateFields):
    """Text or a conversation in vLLM's form, or `content` in llama.cpp's."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages = None
    add_special_tokens: bool | None = Field(None, description="true for a prompt, false for messages if not given")
    return_token_strs: bool | None = None
    content: str | None = Field(None, description="llama.cpp's: text; the answer has `tokens` alone")
    add_special: bool | None = Field(None, description="of content: let the tokenizer add its own tokens (false)")
    parse_special: bool | None = Field(None, description="of content: special tokens are read in the text (true)")
    with_pieces: bool | None = Field(None, description="of content: each token with its text")


class TokenPiece(msgspec.Struct):
    """A token in llama.cpp's form; the piece is a list of bytes where it is no whole character."""

    id: int
    piece: str | list[int]


class Tokenized(msgspec.Struct, kw_only=True):
    """Token ids of a prompt; of llama.cpp's `content`, `tokens` alone."""

    count: int | UnsetType = UNSET
    max_model_len: int | UnsetType = UNSET
    tokens: Sequence[int | TokenPiece]
    token_strs: list[str] | None | UnsetType = UNSET


class DetokenizeRequest(Body):
    """Token ids to be read."""

    model: str | None = None
    tokens: list[int] = Field(fail_fast=True)


class Detokenized(msgspec.Struct):
    """The text of token ids, under vLLM's name and llama.cpp's."""

    prompt: str
    content: str


class Architecture(msgspec.Struct):
    """Kinds of input and output of a model, in llama.cpp's words."""

    input_modalities: list[str]
    output_modalities: list[str]


class ModelCard(msgspec.Struct, kw_only=True):
    """A model that is served."""

    id: str
    object: str = "model"
    created: int
    owned_by: str = "quintet"
    root: str
    parent: str | None = None
    max_model_len: int
    permission: list[Any] = []
    architecture: Architecture | msgspec.UnsetType = msgspec.UNSET  # of models that take more than text


class ModelList(msgspec.Struct, kw_only=True):
    """All models that are served."""

    object: str = "list"
    data: list[ModelCard]


class Version(msgspec.Struct):
    """Version of quintet."""

    version: str


class TraceFile(msgspec.Struct, kw_only=True):
    """A trace that was written."""

    file: str  # its name in the operator's folder
    steps: int
    ended: str  # why


class IsSleeping(msgspec.Struct):
    """Answer of /is_sleeping: true if the engine was put to sleep."""

    is_sleeping: bool


class Load(msgspec.Struct):
    """Answer of /load: the number of running calls."""

    server_load: int


class TokenizerInfo(msgspec.Struct):
    """Class of the tokenizer, its chat template and the other settings in its files."""

    tokenizer_class: str
    chat_template: str | dict[str, str] | None = None


class Sign(msgspec.Struct):
    """Status answer of /health, /ready, /sleep and similar routes."""

    status: str
