"""The one error that routes raise, and the shapes in which clients of each API read it."""

from collections.abc import Mapping
from typing import Any

from quintet.sampling_params import ParameterError
from quintet.server.backend import EngineDead, EngineLoading

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    421: "permission_error",
    429: "rate_limit_error",
    503: "service_unavailable",
    504: "timeout_error",
}


class ApiError(Exception):
    """Ends an API call. `param` is the field of the request that is to blame, `code` is for programs; `details` are for
    those that speak Anthropic's API."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
        details: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers, self.details = dict(headers or {}), details

    @property
    def type(self) -> str:
        return _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")


class ClientGone(Exception):
    """The caller has hung up: an answer would not be read."""


def as_api_error(error: Exception) -> ApiError:
    """Returns any failure as the error that its caller gets. Only messages written for users are passed on."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, EngineLoading):
        return ApiError(503, f"{error}; try again", code="not_ready", headers={"Retry-After": "5"})
    if isinstance(error, EngineDead):
        return ApiError(503, str(error), code="engine_dead", headers={"Retry-After": "5"})
    if isinstance(error, ParameterError):
        return ApiError(400, str(error), param=error.parameter, code=error.code)
    if isinstance(error, ValueError):
        return ApiError(400, str(error))
    return ApiError(500, f"the server failed on this request ({type(error).__name__}); its log says more")


def openai_shape(error: ApiError) -> dict[str, Any]:
    return {"error": {"message": error.message, "type": error.type, "param": error.param, "code": error.code}}


def anthropic_shape(error: ApiError) -> dict[str, Any]:
    """Source: Anthropic's Messages API, "Errors"."""
    own = {503: "overloaded_error", 500: "api_error", 504: "timeout_error"}
    fields: dict[str, Any] = {"type": own.get(error.status, error.type), "message": error.message}
    return {"type": "error", "error": fields if error.details is None else {**fields, "details": error.details}}


def ollama_shape(error: ApiError) -> dict[str, Any]:
    """Source: Ollama's api/types.go, StatusError."""
    return {"error": error.message}
