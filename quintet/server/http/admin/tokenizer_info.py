"""GET /tokenizer_info, with --enable-tokenizer-info-endpoint: what the tokenizer's files say, but for paths."""

import asyncio
import logging
import re
from pathlib import Path
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from quintet.common.json_files import read_object
from quintet.server.http.admin.protocol import TokenizerInfo
from quintet.server.http.errors import ApiError
from quintet.server.http.inputs.prompts import need_tokenizer
from quintet.server.http.openapi import documents_route
from quintet.server.http.respond import app_state_of, json_response
from quintet.tokenizers.tokenizer import Tokenizer

logger = logging.getLogger(__name__)
router = APIRouter()

_CLASS = "PreTrainedTokenizerFast"  # where the files name none: it has a fast form
_TOKENS = "added_tokens_decoder"  # id -> token, of which one may look like a path
_PATH = re.compile(r"/.*/|/(home|root|tmp|Users)\b|~/|[A-Za-z]:[\\/]")


@router.get("/tokenizer_info")
@documents_route(answer=TokenizerInfo)
async def tokenizer_info(http: HttpRequest) -> Response:
    """The class of the tokenizer, its special tokens, its settings and the chat template that is used."""
    service = app_state_of(http)
    tokenizer, folder = need_tokenizer(service), service.backend.model_info.tokenizer
    try:
        config = await asyncio.to_thread(_read, folder)
    except (OSError, ValueError) as error:  # their words name the file
        logger.error("/tokenizer_info: %s", error)
        raise ApiError(500, "the tokenizer's configuration cannot be read; the server's log says why") from None
    info = {**_tokenizer_settings(tokenizer), **config}
    if service.chat_template is not None:
        info["chat_template"] = service.chat_template
    return json_response(info)


def _tokenizer_settings(tokenizer: Tokenizer) -> dict[str, Any]:
    template = {} if tokenizer.chat_template is None else {"chat_template": tokenizer.chat_template}
    return {"tokenizer_class": _CLASS, **tokenizer.special_tokens, **template}


def _read(folder: str | None) -> dict[str, Any]:
    """tokenizer_config.json as callers may see it; {} if there is none."""
    file = Path(folder or "") / "tokenizer_config.json"
    if folder is None or not file.is_file():
        return {}
    content = read_object(file)
    tokens = {_TOKENS: _plain(content[_TOKENS])} if _TOKENS in content else {}
    return {**_public({name: value for name, value in content.items() if name != _TOKENS}), **tokens}


def _public(value: Any) -> Any:
    """Without the names of files and folders of the machine that it was made on; a token is its text."""
    if isinstance(value, dict):
        if isinstance(value.get("content"), str):
            return value["content"]
        return {name: _public(each) for name, each in value.items() if not (_is_file_key(name) or _is_path(each))}
    return [_public(each) for each in value if not _is_path(each)] if isinstance(value, list) else value


def _plain(tokens: Any) -> Any:
    if not isinstance(tokens, dict):
        return None
    return {name: each.get("content") if isinstance(each, dict) else each for name, each in tokens.items()}


def _is_file_key(name: str) -> bool:
    return name.endswith("_file") or name == "name_or_path"


def _is_path(value: Any) -> bool:
    return isinstance(value, str) and _PATH.match(value) is not None
