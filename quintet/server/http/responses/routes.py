"""POST /v1/responses, and routes to read, cancel and delete stored responses."""

import time
from collections.abc import AsyncIterator
from typing import Annotated, Literal

import msgspec
from fastapi import APIRouter, Query
from starlette.requests import Request as HttpRequest
from starlette.responses import Response, StreamingResponse

from quintet.chat.output_parser import OutputParser
from quintet.sampling_params import ParameterError, SamplingParams
from quintet.server.http.app_state import AppState, caller_of
from quintet.server.http.engine_call import EngineCall
from quintet.server.http.errors import ApiError
from quintet.server.http.inputs.body import read_body
from quintet.server.http.inputs.unknown_fields import refuse_query
from quintet.server.http.middleware.auth import owner_of
from quintet.server.http.openai.logprobs import LogprobsWriter
from quintet.server.http.openapi import documents_route
from quintet.server.http.respond import app_state_of, json_response, read_response, stream_response
from quintet.server.http.responses.background import BackgroundRun
from quintet.server.http.responses.conversation import ConversationPlan, count_input, make_plan
from quintet.server.http.responses.output import OutputBuilder
from quintet.server.http.responses.protocol import InputTokens, Item, ItemList, ResponseDeleted, ResponseObject
from quintet.server.http.responses.request import CountInput, CreateResponse, check_body, check_count, wants_sealed
from quintet.server.http.responses.response_builder import ResponseEventWriter, ResponseReply, ScoreOutput
from quintet.server.http.responses.store import ResponseStore, StoredResponse
from quintet.server.http.responses.tool_loop import ResponseRounds
from quintet.server.http.responses.tools import response_tools
from quintet.server.http.sse import encode
from quintet.server.http.usage import usage_of

router = APIRouter()

_STREAM_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
_UNUSED = ("include", "include[]", "include_obfuscation")  # query parameters that clients send and that have no effect


def store_of(http: HttpRequest) -> ResponseStore:
    """Returns this process's response store, created on first use."""
    state = http.app.state
    if not hasattr(state, "responses"):
        state.responses = ResponseStore(app_state_of(http).name)
    store: ResponseStore = state.responses
    return store


@router.post("/v1/responses")
@documents_route(body=CreateResponse, answer=ResponseObject, stream=dict)
async def create_response(http: HttpRequest) -> Response:
    """Creates a response, and stores it so that it can be fetched and continued."""
    service, store = app_state_of(http), store_of(http)
    body = await read_body(http, CreateResponse)
    check_body(body)
    await service.choose_model(http, body.model)
    service.check_ready()
    plan = await make_plan(service, store, body, owner_of(http))
    making = _ResponseJob(http, store, body, plan)
    if body.background:
        return await making.in_background()
    if body.stream:
        return await stream_response(service, http, [plan.request], making.events, making.failed, plan.runs_calls_first)
    return await read_response(service, http, [plan.request], making.run_whole, plan.runs_calls_first)


@router.post("/v1/responses/input_tokens")
@documents_route(body=CountInput, answer=InputTokens)
async def count_input_tokens(http: HttpRequest) -> Response:
    """Counts the input tokens of a response, of any length."""
    service = app_state_of(http)
    body = await read_body(http, CountInput)
    check_count(body)
    await service.choose_model(http, body.model)
    return json_response(InputTokens(input_tokens=await count_input(service, store_of(http), body, owner_of(http))))


@router.post("/v1/responses/compact", include_in_schema=False)
async def compact_response() -> Response:
    """Refused: an item with the whole conversation would shorten nothing, and clients would ask again and again."""
    raise ApiError(
        400, "this server does not compact conversations; set truncation to auto in /v1/responses, which drops the "
        "oldest messages, or ask the model for a summary and begin anew with that", code="unsupported",
    )  # fmt: skip


class _ResponseJob:
    """Creates one response: whole, streamed, or in the background."""

    def __init__(self, http: HttpRequest, store: ResponseStore, body: CreateResponse, plan: ConversationPlan) -> None:
        self.usage_counts, self._owner, self._caller = usage_of(http), owner_of(http), caller_of(http)
        self._service, self._store, self._body, self._plan = app_state_of(http), store, body, plan
        service, params = self._service, plan.request.params
        model = body.model or service.model_names[0]
        self.reply = ResponseReply(
            initial_response(body, params, model, store.new_id()),
            OutputParser(plan.output_format),
            service.cooperative,
            _score(service, params),
            OutputBuilder(wants_sealed(body), plan.served_tools.labels, plan.served_tools.needs_approval),
        )
        self._events = ResponseEventWriter(self.reply)
        self._rounds = ResponseRounds(service, body, plan, self.reply, self.usage_counts)
        self._stored: StoredResponse | None = None
        if not plan.runs_calls_first:
            self.usage_counts.count_prompts([plan.request])

    def store_response(self) -> None:
        """Stores the response, unless the request has store=false."""
        if self._body.store is False:
            return
        stored = self._stored or self._begun()
        stored.item_ids = self._item_ids()
        stored.response = encode(self.reply.response())
        self._store.put(stored)

    def _begun(self) -> StoredResponse:
        return StoredResponse(
            self.reply.id, self._owner, encode(self._plan.conversation.items), item_ids=self._item_ids()
        )

    def _item_ids(self) -> tuple[str, ...]:
        return (*self._plan.conversation.new_ids, *self.reply.item_ids)

    async def run_whole(self, call: EngineCall) -> ResponseObject:
        async for _ in self._rounds.steps(call):
            pass
        self.reply.end()
        self.store_response()
        return self.reply.response()

    async def events(self, call: EngineCall) -> AsyncIterator[bytes]:
        """Yields the events of a stream that ends with its connection."""
        for each in self._events.begin():
            yield each
        async for made in self._events.all_events(self._rounds.steps(call)):
            if self.reply.is_over:
                self.store_response()
            for each in made:
                yield each

    def failed(self, error: ApiError) -> bytes:
        """Returns the last event of a stream that failed."""
        if self.reply.is_over:  # what failed is the sending
            return b""
        last = self._events.fail(error)
        self.store_response()
        return last

    async def in_background(self) -> Response:
        """Starts the response in the background; it does not need a connected client."""
        call = self._service.call(None, [self._plan.request], self._caller, self._plan.runs_calls_first)
        await call.__aenter__()
        stored = self._begun()
        stored.run = run = BackgroundRun(
            call, self._events, self._events.all_events(self._rounds.steps(call)), self._run_ended
        )
        self._stored = stored
        self._store.put(stored)
        if self._body.stream:
            return _event_stream(run)
        return json_response(self.reply.response())

    def _run_ended(self) -> None:
        if self._stored is not None and self._store.contains(self._stored):  # it may have been deleted
            self.store_response()


def _score(service: AppState, params: SamplingParams) -> ScoreOutput | None:
    """Returns a function for the log-probabilities of an output; None if not requested."""
    if params.logprobs is None:
        return None
    writer = LogprobsWriter(service.backend.tokenizer, service.cooperative, params)
    return lambda output: writer.chat(output.token_ids, output.logprobs or [])


@router.get("/v1/responses/{response_id}")
@documents_route(answer=ResponseObject, stream=dict)
async def retrieve_response(
    http: HttpRequest,
    response_id: str,
    stream: Annotated[bool, Query(description="its events, if it was made in the background")] = False,
    starting_after: Annotated[int | None, Query(ge=0, description="number of the last event that is known")] = None,
) -> Response:
    """Returns a stored response in its current state."""
    refuse_query(http.query_params, ("stream", "starting_after", *_UNUSED))
    stored = store_of(http).get(response_id, owner_of(http))
    if not stream:
        if starting_after is not None:
            raise ParameterError("starting_after", "belongs to a stream; set stream to true")
        return _stored_response(stored)
    if stored.run is None:
        raise ParameterError(
            "stream", "is for responses made in the background (background=true): no others' events are kept"
        )
    return _event_stream(stored.run, -1 if starting_after is None else starting_after)


@router.get("/v1/responses/{response_id}/input_items")
@documents_route(answer=ItemList)
async def list_input_items(
    http: HttpRequest,
    response_id: str,
    limit: Annotated[int, Query(ge=1, le=100, description="items of a page")] = 20,
    order: Annotated[Literal["asc", "desc"], Query(description="by time")] = "desc",
    after: Annotated[str | None, Query(description="the last item of the page before")] = None,
) -> Response:
    """Lists the input items of a response, in pages."""
    refuse_query(http.query_params, ("limit", "order", "after", *_UNUSED))
    items: list[Item] = msgspec.json.decode(store_of(http).get(response_id, owner_of(http)).items)
    if order == "desc":
        items.reverse()
    start = 0
    if after is not None:
        start = 1 + next((place for place, item in enumerate(items) if item["id"] == after), -1)
        if start == 0:
            raise ParameterError("after", f"names {after[:80]!r}, which is no item before this response")
    page = items[start : start + limit]
    first, last = (page[0]["id"], page[-1]["id"]) if page else ("", "")
    return json_response(ItemList(data=page, first_id=first, last_id=last, has_more=start + limit < len(items)))


@router.delete("/v1/responses/{response_id}")
@documents_route(answer=ResponseDeleted)
async def delete_response(http: HttpRequest, response_id: str) -> Response:
    """Deletes a response; cancels it if it still runs."""
    stored = store_of(http).delete(response_id, owner_of(http))
    if stored.run is not None:
        await stored.run.cancel()
    return json_response(ResponseDeleted(id=response_id))


@router.post("/v1/responses/{response_id}/cancel")
@documents_route(answer=ResponseObject)
async def cancel_response(http: HttpRequest, response_id: str) -> Response:
    """Cancels a background response, and returns it."""
    stored = store_of(http).get(response_id, owner_of(http))
    if stored.run is None:
        raise ParameterError(
            "response_id", "names a response that was not made in the background (background=true); only those can be "
            "cancelled, others end when their client hangs up",
        )  # fmt: skip
    await stored.run.cancel()
    return _stored_response(stored)


def _stored_response(stored: StoredResponse) -> Response:
    if stored.run is not None and stored.running:
        return json_response(stored.run.reply.response())
    return Response(stored.response, media_type="application/json")


def _event_stream(run: BackgroundRun, after: int = -1) -> Response:
    return StreamingResponse(run.events_after(after), media_type="text/event-stream", headers=_STREAM_HEADERS)


def initial_response(body: CreateResponse, params: SamplingParams, model: str, response_id: str) -> ResponseObject:
    """Returns the response object before any output."""
    return ResponseObject(
        id=response_id,
        created_at=int(time.time()),
        model=model,
        background=bool(body.background),
        instructions=body.instructions,
        max_output_tokens=body.max_output_tokens,
        max_tool_calls=body.max_tool_calls,
        metadata=body.metadata or {},
        parallel_tool_calls=body.parallel_tool_calls is not False,
        previous_response_id=body.previous_response_id,
        prompt_cache_key=body.prompt_cache_key,
        reasoning={name: (body.reasoning or {}).get(name) for name in ("effort", "summary")},
        safety_identifier=body.safety_identifier,
        store=body.store is not False,
        temperature=params.temperature,
        tool_choice="auto" if body.tool_choice is None else body.tool_choice,
        tools=response_tools(body.tools),
        text={"format": (body.text or {}).get("format") or {"type": "text"}},
        top_logprobs=body.top_logprobs or 0,
        top_p=params.top_p,
        truncation=body.truncation or "disabled",
        user=body.user,
        status="queued" if body.background else "in_progress",
    )
