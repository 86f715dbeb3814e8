"""GET /load, with --enable-server-load-tracking: the calls that are under way."""

from fastapi import APIRouter
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from quintet.server.http.admin.protocol import Load
from quintet.server.http.openapi import documents_route
from quintet.server.http.respond import app_state_of, json_response

router = APIRouter()


@router.get("/load")
@documents_route(answer=Load)
async def load(http: HttpRequest) -> Response:
    """Calls of the API that the server works on, in all of its processes; a stream counts until its end."""
    metrics = app_state_of(http).metrics
    others, _ = await metrics.gather_others()
    return json_response(
        Load(sum(int(row.values[0]) for row in (*metrics.rows(), *others) if row.name == "quintet:api_calls"))
    )
