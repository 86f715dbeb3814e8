"""POST /tokenize and /detokenize: text to token ids and back, as the model's tokenizer does it."""

from typing import Any

from fastapi import APIRouter
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from quintet.chat.prepare import render
from quintet.chat.tool_choice import read_tools
from quintet.server.http.admin.protocol import Detokenized, DetokenizeRequest, Tokenized, TokenizeRequest, TokenPiece
from quintet.server.http.app_state import AppState
from quintet.server.http.inputs.body import read_body
from quintet.server.http.inputs.chat_input import chat_model, read_chat
from quintet.server.http.inputs.prompts import need_tokenizer, run_in_thread
from quintet.server.http.inputs.sampling_params import invalid_field
from quintet.server.http.openapi import documents_route
from quintet.server.http.respond import app_state_of, json_response
from quintet.tokenizers.tokenizer import Tokenizer

router = APIRouter()


@router.post("/tokenize")
@documents_route(body=TokenizeRequest, answer=Tokenized)
async def tokenize(http: HttpRequest) -> Response:
    """The token ids of a text, or of a conversation with its template."""
    service = app_state_of(http)
    body = await read_body(http, TokenizeRequest)
    await service.choose_model(http, body.model)
    tokenizer = need_tokenizer(service)
    if body.content is not None:
        return await _tokenize_content(service, tokenizer, body.content, body)
    ids, limit = await _ids(service, tokenizer, body), service.backend.model_info.max_model_len

    def answer() -> Response:
        strings = [tokenizer.backend.id_to_token(each) or "" for each in ids] if body.return_token_strs else None
        return json_response(Tokenized(count=len(ids), max_model_len=limit, tokens=ids, token_strs=strings))

    return await run_in_thread(service, len(ids), answer, "prompt")


async def _tokenize_content(service: AppState, tokenizer: Tokenizer, text: str, body: TokenizeRequest) -> Response:
    """Answers in llama.cpp's form."""
    if body.prompt is not None or body.messages is not None:
        raise invalid_field("content", "excludes prompt and messages; give one of them")
    if body.parse_special is False:
        raise invalid_field("parse_special", "must be true: the tokenizer reads special tokens in any text")

    def work() -> Response:
        ids = tokenizer.encode(text, add_special_tokens=bool(body.add_special))
        tokens = [TokenPiece(each, _piece(tokenizer.token_bytes(each))) for each in ids] if body.with_pieces else ids
        return json_response(Tokenized(tokens=tokens))

    return await run_in_thread(service, len(text), work, "content")


def _piece(raw: bytes) -> str | list[int]:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return list(raw)


async def _ids(service: AppState, tokenizer: Tokenizer, body: TokenizeRequest) -> list[int]:
    if (body.prompt is None) == (body.messages is None):
        raise invalid_field("prompt", "and messages exclude each other; give one of them")
    if body.messages is not None:
        read_tools(body.tools, None)  # refuses, and leaves out, what a chat would
        chat = read_chat(service, body, body.messages, add_special_tokens=bool(body.add_special_tokens))
        return (await render(chat, chat_model(service))).token_ids
    text, special = str(body.prompt), body.add_special_tokens is not False
    return await run_in_thread(service, len(text), lambda: tokenizer.encode(text, add_special_tokens=special), "prompt")


@router.post("/detokenize")
@documents_route(body=DetokenizeRequest, answer=Detokenized)
async def detokenize(http: HttpRequest) -> Response:
    """The text of token ids; special tokens show."""
    service = app_state_of(http)
    body = await read_body(http, DetokenizeRequest)
    await service.choose_model(http, body.model)
    tokenizer, vocab_size = need_tokenizer(service), service.backend.model_info.vocab_size

    def decode() -> str:
        wrong: Any = next((each for each in body.tokens if not 0 <= each < vocab_size), None)
        if wrong is not None:
            raise ValueError(f"tokens: {str(wrong)[:40]} is not in 0 .. {vocab_size - 1}")
        return tokenizer.decode(body.tokens, skip_special_tokens=False)

    text = await run_in_thread(service, len(body.tokens), decode, "tokens")
    return json_response(Detokenized(text, text))
