"""POST /invocations: SageMaker's route, which takes the body of any other."""

from collections.abc import Awaitable, Callable

from fastapi import APIRouter
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from quintet.server.http.errors import ApiError
from quintet.server.http.inputs.body import read_field_names
from quintet.server.http.openai.chat import create_chat_completion
from quintet.server.http.openai.completions import create_completion
from quintet.server.http.pooling.routes import classify, create_embedding, create_pooling
from quintet.server.http.pooling.scores import create_score, rerank
from quintet.server.http.respond import app_state_of

router = APIRouter()

_TASKS = {"embed": create_embedding, "classify": classify}  # of texts in `input`; others are pooled


@router.post("/invocations")
async def invoke(http: HttpRequest) -> Response:
    """Answers a chat, a completion, embeddings, classes, scores or a ranking, by the fields of the body."""
    return await _route(http, await read_field_names(http))(http)


def _route(http: HttpRequest, fields: frozenset[str]) -> Callable[[HttpRequest], Awaitable[Response]]:
    pooling = app_state_of(http).backend.model_info.pooling
    if "query" in fields and "documents" in fields:
        return rerank
    if fields & {"data_1", "text_1", "queries"}:
        return create_score
    if fields & ({"input"} if pooling is None else {"input", "messages"}):
        tasks = () if pooling is None else pooling.tasks
        return next((_TASKS[task] for task in tasks if task in _TASKS), create_pooling)
    if "messages" in fields:
        return create_chat_completion
    if "prompt" in fields or "prompt_embeds" in fields:
        return create_completion
    raise ApiError(
        400, "the body is of no route: give messages (chat), prompt (completion), input (embeddings, classes or "
        "pooling), query and documents (ranking), or queries and documents (scores)", code="invalid_value",
    )  # fmt: skip
