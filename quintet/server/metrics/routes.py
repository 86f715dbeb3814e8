"""GET /metrics, for Prometheus and the web page."""

from fastapi import APIRouter
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from quintet.server.http.respond import app_state_of
from quintet.server.metrics.prometheus import CONTENT_TYPE, scrape

router = APIRouter()


@router.get("/metrics", include_in_schema=False)
async def metrics(http: HttpRequest) -> Response:
    """Returns the metrics, also while the model loads and after the engine has died."""
    return Response(await scrape(app_state_of(http)), headers={"Content-Type": CONTENT_TYPE})
