"""POST /v1/responses, and what can be done with a response that was stored."""

from collections.abc import AsyncIterator
from typing import Annotated, Literal

import msgspec
from fastapi import APIRouter, Query
from starlette.requests import Request as HttpRequest
from starlette.responses import Response, StreamingResponse

from quintet.engine.speech import Speech
from quintet.sampling_params import ParameterError, SamplingParams
from quintet.server.http.answers import json_response, read_response, service_of, stream_response
from quintet.server.http.auth import owner_of
from quintet.server.http.bodies import read_body
from quintet.server.http.calls import Call
from quintet.server.http.errors import ApiError
from quintet.server.http.logprobs import Writer
from quintet.server.http.openapi import documented
from quintet.server.http.responses.background import Run
from quintet.server.http.responses.begin import begin
from quintet.server.http.responses.output import Output
from quintet.server.http.responses.plan import Plan, count_input, make_plan
from quintet.server.http.responses.reply import Events, Reply, Score
from quintet.server.http.responses.request import CountInput, CreateResponse, check, check_count, wants_sealed
from quintet.server.http.responses.rounds import Rounds
from quintet.server.http.responses.shapes import InputTokens, Item, ItemList, ResponseDeleted, ResponseObject
from quintet.server.http.responses.store import Store, Stored
from quintet.server.http.service import Service
from quintet.server.http.sse import encode
from quintet.server.http.strays import refuse_query
from quintet.server.http.tally import tally_of

router = APIRouter()

_STREAM_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
_UNUSED = ("include", "include[]", "include_obfuscation")  # of a query: clients send them, and nothing depends on them


def store_of(http: HttpRequest) -> Store:
    """This process's, made when it is first asked for."""
    state = http.app.state
    if not hasattr(state, "responses"):
        state.responses = Store(service_of(http).name)
    store: Store = state.responses
    return store


@router.post("/v1/responses")
@documented(body=CreateResponse, answer=ResponseObject, stream=dict)
async def create_response(http: HttpRequest) -> Response:
    """Answers an input, and keeps the answer so that it can be fetched and continued."""
    service, store = service_of(http), store_of(http)
    body = await read_body(http, CreateResponse)
    check(body)
    service.check_model(body.model)
    service.check_ready()
    plan = await make_plan(service, store, body, owner_of(http))
    making = _Making(http, store, body, plan)
    if body.background:
        return await making.in_background()
    if body.stream:
        return await stream_response(service, http, [plan.ask], making.events, making.failed, plan.waits)
    return await read_response(service, http, [plan.ask], making.whole, plan.waits)


@router.post("/v1/responses/input_tokens")
@documented(body=CountInput, answer=InputTokens)
async def count_input_tokens(http: HttpRequest) -> Response:
    """How many tokens the input of such a response has, however long it is."""
    service = service_of(http)
    body = await read_body(http, CountInput)
    check_count(body)
    service.check_model(body.model)
    return json_response(InputTokens(input_tokens=await count_input(service, store_of(http), body, owner_of(http))))


@router.post("/v1/responses/compact", include_in_schema=False)
async def compact_response() -> Response:
    """Not served: an item that held all that was said would shorten nothing, and a client would ask again and again."""
    raise ApiError(
        400, "this server does not compact conversations; set truncation to auto in /v1/responses, which drops the "
        "oldest messages, or ask the model for a summary and begin anew with that", code="unsupported",
    )  # fmt: skip


class _Making:
    """One response on its way: whole, streamed, or in the background."""

    def __init__(self, http: HttpRequest, store: Store, body: CreateResponse, plan: Plan) -> None:
        self.tally, self._owner = tally_of(http), owner_of(http)
        self._service, self._store, self._body, self._plan = service_of(http), store, body, plan
        service, params = self._service, plan.ask.params
        model = body.model or service.model_names[0]
        self.reply = Reply(
            begin(body, params, model, store.new_id()),
            Speech(plan.listening),
            service.turns,
            _score(service, params),
            Output(wants_sealed(body), plan.served.labels, plan.served.asks),
        )
        self._events = Events(self.reply)
        self._rounds = Rounds(service, body, plan, self.reply, self.tally)
        self._stored: Stored | None = None
        if not plan.waits:
            self.tally.ask([plan.ask])

    def keep(self) -> None:
        """Stores what there is, if that is wanted."""
        if self._body.store is False:
            return
        stored = self._stored or self._begun()
        stored.item_ids = self._item_ids()
        stored.response = encode(self.reply.object())
        self._store.put(stored)

    def _begun(self) -> Stored:
        return Stored(self.reply.id, self._owner, encode(self._plan.said.items), item_ids=self._item_ids())

    def _item_ids(self) -> tuple[str, ...]:
        return (*self._plan.said.new_ids, *self.reply.item_ids)

    async def whole(self, call: Call) -> ResponseObject:
        async for _ in self._rounds.steps(call):
            pass
        self.reply.end()
        self.keep()
        return self.reply.object()

    async def events(self, call: Call) -> AsyncIterator[bytes]:
        """Of a stream that ends with its connection."""
        for each in self._events.begin():
            yield each
        async for made in self._events.told(self._rounds.steps(call)):
            if self.reply.over:
                self.keep()
            for each in made:
                yield each

    def failed(self, error: ApiError) -> bytes:
        """How the stream says that it broke off."""
        if self.reply.over:  # what failed is the sending
            return b""
        last = self._events.fail(error)
        self.keep()
        return last

    async def in_background(self) -> Response:
        """Queues it; from here on it needs no client that waits."""
        call = self._service.call(None, [self._plan.ask], self._owner, self._plan.waits)
        await call.__aenter__()
        stored = self._begun()
        stored.run = run = Run(call, self._events, self._events.told(self._rounds.steps(call)), self._run_ended)
        self._stored = stored
        self._store.put(stored)
        if self._body.stream:
            return _followed(run)
        return json_response(self.reply.object())

    def _run_ended(self) -> None:
        if self._stored is not None and self._store.holds(self._stored):  # it may have been deleted
            self.keep()


def _score(service: Service, params: SamplingParams) -> Score | None:
    """Log-probabilities of an output, if they are wanted."""
    if params.logprobs is None:
        return None
    writer = Writer(service.backend.tokenizer, service.turns, params)
    return lambda output: writer.chat(output.token_ids, output.logprobs or [])


@router.get("/v1/responses/{response_id}")
@documented(answer=ResponseObject, stream=dict)
async def retrieve_response(
    http: HttpRequest,
    response_id: str,
    stream: Annotated[bool, Query(description="its events, if it was made in the background")] = False,
    starting_after: Annotated[int | None, Query(ge=0, description="number of the last event that is known")] = None,
) -> Response:
    """A stored response as it is now."""
    refuse_query(http.query_params, ("stream", "starting_after", *_UNUSED))
    stored = store_of(http).get(response_id, owner_of(http))
    if not stream:
        if starting_after is not None:
            raise ParameterError("starting_after", "belongs to a stream; set stream to true")
        return _shown(stored)
    if stored.run is None:
        raise ParameterError(
            "stream", "is for responses made in the background (background=true): no others' events are kept"
        )
    return _followed(stored.run, -1 if starting_after is None else starting_after)


@router.get("/v1/responses/{response_id}/input_items")
@documented(answer=ItemList)
async def list_input_items(
    http: HttpRequest,
    response_id: str,
    limit: Annotated[int, Query(ge=1, le=100, description="items of a page")] = 20,
    order: Annotated[Literal["asc", "desc"], Query(description="by time")] = "desc",
    after: Annotated[str | None, Query(description="the last item of the page before")] = None,
) -> Response:
    """What was said before a response, page by page."""
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
@documented(answer=ResponseDeleted)
async def delete_response(http: HttpRequest, response_id: str) -> Response:
    """Forgets a response; one that still runs ends."""
    stored = store_of(http).delete(response_id, owner_of(http))
    if stored.run is not None:
        await stored.run.cancel()
    return json_response(ResponseDeleted(id=response_id))


@router.post("/v1/responses/{response_id}/cancel")
@documented(answer=ResponseObject)
async def cancel_response(http: HttpRequest, response_id: str) -> Response:
    """Ends a response that runs in the background, and gives what it is then."""
    stored = store_of(http).get(response_id, owner_of(http))
    if stored.run is None:
        raise ParameterError(
            "response_id", "names a response that was not made in the background (background=true); only those can be "
            "cancelled, others end when their client hangs up",
        )  # fmt: skip
    await stored.run.cancel()
    return _shown(stored)


def _shown(stored: Stored) -> Response:
    if stored.run is not None and stored.running:
        return json_response(stored.run.reply.object())
    return Response(stored.response, media_type="application/json")


def _followed(run: Run, after: int = -1) -> Response:
    return StreamingResponse(run.follow(after), media_type="text/event-stream", headers=_STREAM_HEADERS)
