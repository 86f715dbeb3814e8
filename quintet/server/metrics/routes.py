"""GET /metrics: for Prometheus and the page."""

from fastapi import APIRouter
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from quintet.server.http.answers import service_of
from quintet.server.metrics.exposition import CONTENT_TYPE, scrape

router = APIRouter()


@router.get("/metrics", include_in_schema=False)
async def metrics(http: HttpRequest) -> Response:
    """Answers while the model is loading and when the engine is gone, too."""
    return Response(await scrape(service_of(http)), headers={"Content-Type": CONTENT_TYPE})
