"""POST /score and /rerank: relevance of documents to a query, by a cross-encoder or by comparing embeddings."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from quintet.chat.prompts import Prompt
from quintet.engine.pooling.input_processor import PoolingBounds
from quintet.engine.pooling.scoring import PairLimits, PairTemplate, compare, pairs
from quintet.pooling_params import PoolingParams
from quintet.server.http.app_state import AppState
from quintet.server.http.errors import ApiError
from quintet.server.http.inputs.prompts import need_tokenizer, run_in_thread
from quintet.server.http.inputs.sampling_params import invalid_field
from quintet.server.http.middleware.base import route_path
from quintet.server.http.openapi import documents_route
from quintet.server.http.pooling.encoding_format import Numbers
from quintet.server.http.pooling.inputs import TextReader, bounds_of, resolve_params, truncates_left
from quintet.server.http.pooling.protocol_requests import RerankRequest, ScoreRequest
from quintet.server.http.pooling.protocol_responses import Ranked, RankedDocument, Ranking, Score, Scores
from quintet.server.http.pooling.routes import check_request, head_of
from quintet.server.http.pooling.run import PoolingWork, meta, respond, usage
from quintet.server.http.respond import WholeResponse
from quintet.server.http.usage import RequestUsage

router = APIRouter()

_FIRST, _SECOND = ("data_1", "text_1", "queries"), ("data_2", "text_2", "documents", "items")
Body = ScoreRequest | RerankRequest


@dataclass(frozen=True)
class ScorePlan:
    """Texts of a score request, and the method that computes scores from their outputs."""

    work: PoolingWork
    score_indices: list[tuple[int, int]]  # per score, indices of query and document; empty for a cross-encoder
    task: str
    bounds: PoolingBounds

    def scores(self, found: Sequence[Numbers]) -> list[float]:
        """Returns the scores in the order of the pairs."""
        if self.task == "score":
            return [float(each.reshape(-1)[0]) for each in found]
        return [
            compare(self.bounds, self.task, found[query], found[document], self.work.prompts[document].token_ids)
            for query, document in self.score_indices
        ]


@router.post("/score")
@router.post("/v1/score")
@documents_route(body=ScoreRequest, answer=Scores)
async def create_score(http: HttpRequest) -> Response:
    """Scores pairs of texts: one text with each of many, or two lists element by element."""
    service, body = await check_request(http, ScoreRequest)
    first, second = _named(body, _FIRST), _named(body, _SECOND)
    queries, documents = (_texts(getattr(body, name), name) for name in (first, second))
    plan = await score_plan(service, body, (first, queries), (second, documents))
    head = head_of(service, http, "score", body.model)

    async def answer(found: list[Numbers], tally: RequestUsage) -> Any:
        data = [Score(index=at, score=each) for at, each in enumerate(plan.scores(found))]
        return Scores(data=data, usage=usage(tally), **head)

    return await respond(service, http, plan.work, answer)


@router.post("/rerank")
@router.post("/v1/rerank")
@router.post("/v2/rerank")
@documents_route(body=RerankRequest, answer=Ranking)
async def rerank(http: HttpRequest) -> WholeResponse:
    """Returns the documents sorted by relevance to a query."""
    service, body = await check_request(http, RerankRequest)
    queries, documents = _texts([body.query], "query"), _texts(body.documents, "documents")
    plan = await score_plan(service, body, ("query", queries), ("documents", documents))
    head = head_of(service, http, "rerank", body.model)
    head.pop("created")
    version = "2" if route_path(http.scope).startswith("/v2") else "1"

    async def answer(found: list[Numbers], tally: RequestUsage) -> Any:
        scores = plan.scores(found)
        best = sorted(range(len(scores)), key=lambda at: -scores[at])[: body.top_n or None]
        results = [Ranked(index=at, relevance_score=scores[at]) for at in best]
        if body.return_documents is not False:
            for each in results:
                each.document = RankedDocument(documents[each.index])
        return Ranking(results=results, usage=usage(tally), meta=meta(tally, version), **head)

    return await respond(service, http, plan.work, answer)


async def score_plan(
    service: AppState, body: Body, first: tuple[str, list[str]], second: tuple[str, list[str]]
) -> ScorePlan:
    """Makes the plan for (field name, texts) of queries and documents. Raises ApiError 400; count errors as in vLLM."""
    (name_1, queries), (name_2, documents) = first, second
    most = service.settings.max_inputs
    if len(documents) > most:
        raise invalid_field(name_2, f"holds {len(documents)} texts, and the server takes {most}; send several requests")
    task, bounds = _task(service), bounds_of(service)
    params = resolve_params(
        service, PoolingParams(use_activation=body.use_activation, truncate_prompt_tokens=body.truncate_prompt_tokens),
        task, "a score",
    )  # fmt: skip
    try:
        places = pairs(range(len(queries)), range(len(documents)))
    except ValueError as error:
        message = str(error).replace("data_1", name_1).replace("data_2", name_2)
        raise ApiError(400, message, param=name_2 if queries else name_1, code="invalid_value") from None
    cuts = PairLimits(body.max_tokens_per_query or None, body.max_tokens_per_doc or None)
    if task == "score":
        prompts = await _pairs(service, body, params, [(queries[a], documents[b]) for a, b in places], cuts)
        return ScorePlan(PoolingWork(prompts, params, body.priority or 0), [], task, bounds)
    if cuts.query or cuts.document:
        queries, documents = await _truncate(service, queries, documents, cuts)
    try:
        before, before_document = bounds.score_prompts(task)
    except ValueError as error:
        raise ApiError(400, str(error), code="unsupported") from None
    texts = TextReader(
        service,
        params,
        body.cache_salt,
        truncate_left=truncates_left(body),
        prefix=before,
        param=name_1,
    )
    of_documents = replace(texts, param=name_2, prefix=before_document)
    prompts = [*await texts.read(queries), *await of_documents.read(documents)]
    places = [(query, len(queries) + document) for query, document in places]
    return ScorePlan(PoolingWork(prompts, params, body.priority or 0), places, task, texts.limits)


async def _pairs(
    service: AppState, body: Body, params: PoolingParams, couples: list[tuple[str, str]], cuts: PairLimits
) -> list[Prompt]:
    """Builds the prompts of a cross-encoder, one per pair."""
    bounds = bounds_of(service)
    left = bounds.truncates_left if (asked := truncates_left(body)) is None else asked
    template = PairTemplate(need_tokenizer(service), service.chat_template, left, bounds.has_separator)
    keep = params.truncate_prompt_tokens
    cuts = cuts._replace(pair=bounds.max_model_len if keep == -1 else keep)
    texts = TextReader(service, params, body.cache_salt, truncate_left=truncates_left(body), param="documents")

    def read() -> list[Prompt]:
        found = []
        for at, couple in enumerate(couples):
            name = "the pair" if len(couples) == 1 else f"pair {at}"
            try:
                made = template.prompt(*couple, cuts)
                found.append(texts.make_prompt(made.token_ids, name, None, made.types))
            except ValueError as error:
                raise error if name in str(error) else ValueError(f"{name}: {error}") from None
        return found

    return await run_in_thread(service, sum(len(a) + len(b) for a, b in couples), read, "documents")


async def _truncate(
    service: AppState, queries: list[str], documents: list[str], cuts: PairLimits
) -> tuple[list[str], list[str]]:
    template = PairTemplate(need_tokenizer(service))

    def cut() -> tuple[list[str], list[str]]:
        return [template.truncate(each, cuts.query) for each in queries], [
            template.truncate(each, cuts.document) for each in documents
        ]

    return await run_in_thread(service, sum(map(len, queries)) + sum(map(len, documents)), cut, "documents")


def _task(service: AppState) -> str:
    """Returns the task for scoring: score (cross-encoder), embed, or token_embed (late interaction)."""
    bounds = bounds_of(service)
    task = next((each for each in ("score", "embed", "token_embed") if each in bounds.tasks), None)
    if task is None:
        raise ApiError(
            400, f"this server's model has the tasks {', '.join(bounds.tasks)}, of which no score comes: a score wants "
            "one class, or embeddings; ask /classify or /pooling, or serve a reranking or embedding model",
            code="unsupported",
        )  # fmt: skip
    return task


def _named(body: ScoreRequest, names: Sequence[str]) -> str:
    """Returns the name of the field that the request has; exactly one is required."""
    there = [name for name in names if getattr(body, name) is not None]
    if len(there) != 1:
        raise invalid_field(there[1] if there else names[0], f"is one of {', '.join(names)}; give exactly one of them")
    return there[0]


def _texts(given: Any, name: str) -> list[str]:
    """Reads one text or document, or a list of them."""
    if not isinstance(given, list):
        given, alone = [given], True
    else:
        alone = name == "query"
    return [_text(each, name if alone else f"{name}[{at}]", name) for at, each in enumerate(given)]


def _text(given: Any, name: str, param: str) -> str:
    """Returns the text of a document, in any supported form."""
    if isinstance(given, str):
        return given
    if isinstance(given, dict):
        if isinstance(given.get("text"), str):
            return str(given["text"])
        parts = given.get("content")
        if isinstance(parts, list) and parts and all(_is_text(each) for each in parts):
            return "".join(each["text"] for each in parts)
    why = f'{name} must be text, or an object such as {{"text": ...}}; models here take text alone'
    raise ApiError(400, why, param=param, code="invalid_value")


def _is_text(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)
