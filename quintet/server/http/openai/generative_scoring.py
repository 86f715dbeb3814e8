"""POST /generative_scoring: how likely the next token is one of some labels, after a query and each item."""

import math
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from fastapi import APIRouter
from pydantic import Field, WithJsonSchema
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from quintet.chat.prompts import Prompt
from quintet.outputs import RequestOutput
from quintet.sampling_params import ParameterError, RequestOutputKind, SamplingParams
from quintet.server.http.app_state import AppState
from quintet.server.http.engine_call import PromptRequest
from quintet.server.http.errors import ApiError
from quintet.server.http.inputs.body import Body, read_body
from quintet.server.http.inputs.prompts import PromptReader, run_in_thread
from quintet.server.http.inputs.sampling_params import checked_params, invalid_field
from quintet.server.http.openapi import documents_route
from quintet.server.http.respond import AnswerHead, app_state_of, whole_response
from quintet.server.http.usage import Usage, set_request_name, usage_of

router = APIRouter()

_TEXT = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "integer"}}]}


class GenerativeScoringRequest(Body):
    """vLLM's."""

    query: Annotated[Any, WithJsonSchema(_TEXT)] = Field(description="text or token ids that all items share")
    items: Annotated[list[Any], WithJsonSchema({"type": "array", "items": _TEXT})] = Field(
        description="texts or token ids, each behind the query"
    )
    label_token_ids: list[int] = Field(description="tokens that may be next; the score is of the first", fail_fast=True)
    model: str | None = Field(None, description="the model's name; none is the one that is served")
    apply_softmax: bool | None = Field(
        None, description="share of the first label among the labels (true), or its probability in the vocabulary"
    )
    item_first: bool | None = Field(None, description="each item before the query")
    add_special_tokens: bool | None = Field(None, description="let the tokenizer add its own to the query (true)")
    priority: int | None = Field(None, ge=-(2**31), le=2**31 - 1, description="lower runs first")
    cache_salt: str | None = Field(None, min_length=1, max_length=1024, description="keeps cached pages apart")
    request_id: str | None = Field(None, description="the request's name")


class ItemScore(msgspec.Struct):
    """The score of one item."""

    index: int
    score: float
    object: Literal["score"] = "score"


class GenerativeScores(msgspec.Struct, kw_only=True):
    """The scores, in the order of the items."""

    id: str
    object: str = "list"
    created: int
    model: str
    data: list[ItemScore]
    usage: Usage


@router.post("/generative_scoring")
@documents_route(body=GenerativeScoringRequest, answer=GenerativeScores)
async def create_generative_scores(http: HttpRequest) -> Response:
    """Scores items by the probability of a label token behind the query and each of them."""
    service = app_state_of(http)
    body = await read_body(http, GenerativeScoringRequest)
    set_request_name(http, body.request_id)
    await service.choose_model(http, body.model)
    service.check_ready()
    params = _params(service, body)
    prompts = await _prompts(service, body, params)
    asks = [PromptRequest(prompt, params, body.priority or 0) for prompt in prompts]
    tally = usage_of(http)
    tally.count_prompts(asks)
    head = AnswerHead.for_answer(service, f"generative-scoring-{tally.request_id}", body.model)

    async def answer(outputs: Sequence[RequestOutput]) -> GenerativeScores:
        for number, output in enumerate(outputs):
            output.outputs[0].token_ids = []  # the token that the engine had to draw
            tally.count_output(number, output)
        data = [ItemScore(at, _score(output, body)) for at, output in enumerate(outputs)]
        return GenerativeScores(id=head.id, created=head.created, model=head.model, data=data, usage=tally.usage())

    return await whole_response(service, http, asks, answer)


def _params(service: AppState, body: GenerativeScoringRequest) -> SamplingParams:
    most = service.settings.max_prompts
    if not 0 < len(body.items) <= most:
        raise invalid_field("items", f"must be 1 to {most} texts, not {len(body.items)}; send several requests")
    if not body.label_token_ids:
        raise invalid_field("label_token_ids", "is empty; give the tokens that may be next")
    mode = service.backend.model_info.logprobs_mode
    if body.apply_softmax is False and not mode.endswith("logprobs"):
        raise invalid_field("apply_softmax", f"must be true here: logprobs_mode={mode!r} gives no probabilities")
    fields: dict[str, Any] = {
        "max_tokens": 1, "logprobs": 0, "logprob_token_ids": list(dict.fromkeys(body.label_token_ids)),
        "output_kind": RequestOutputKind.FINAL_ONLY,
    }  # fmt: skip
    return checked_params(service, fields, {"logprob_token_ids": "label_token_ids"}, SamplingParams(temperature=0.0))


async def _prompts(service: AppState, body: GenerativeScoringRequest, params: SamplingParams) -> list[Prompt]:
    """Returns the query with each item, tokenized apart. ApiError 400 names what is too long."""
    reader = PromptReader(service, params, body.cache_salt, special=False)

    for name, each in (("query", body.query), *((f"items.{at}", each) for at, each in enumerate(body.items))):
        if not isinstance(each, str) and not (isinstance(each, list) and all(type(token) is int for token in each)):
            raise invalid_field(name, "must be text, or a list of token ids")

    tokenizer = service.backend.tokenizer
    if tokenizer is None and any(isinstance(each, str) for each in (body.query, *body.items)):
        raise invalid_field("query", "and items must be lists of token ids: the engine has no tokenizer")

    def ids(text: str | list[int], special: bool) -> list[int]:
        return tokenizer.encode(text, special) if tokenizer is not None and isinstance(text, str) else text  # type: ignore[return-value]

    def read() -> list[Prompt]:
        query, found = ids(body.query, body.add_special_tokens is not False), []
        for at, each in enumerate(body.items):
            item = ids(each, special=False)
            try:
                found.append(reader.read([*item, *query] if body.item_first else [*query, *item], f"item {at}"))
            except ParameterError as error:
                raise ApiError(400, str(error), param="items", code=error.code or "invalid_value") from None
        return found

    size = len(body.query) + sum(len(each) for each in body.items)
    return await run_in_thread(service, size, read, "items")


def _score(output: RequestOutput, body: GenerativeScoringRequest) -> float:
    """Returns the probability of the first label."""
    logprobs = output.outputs[0].logprobs
    assert logprobs, "log-probabilities were asked for"
    values = {token: logprobs[0][token].logprob for token in body.label_token_ids}
    first = values[body.label_token_ids[0]]
    if body.apply_softmax is False:
        return math.exp(first)
    best = max(values.values())
    return math.exp(first - best) / sum(math.exp(value - best) for value in values.values())
