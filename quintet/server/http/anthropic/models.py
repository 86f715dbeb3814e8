"""Lists the served models in Anthropic's format. Source: Anthropic's API reference, "Models"."""

import re
from datetime import datetime, timezone

import msgspec
from starlette.datastructures import QueryParams

from quintet.common.suggestions import unknown_name_error
from quintet.sampling_params import ParameterError
from quintet.server.http.app_state import AppState

_PAGE, _MAX_PAGE = 20, 1000  # models per page: default, and maximum
_LIFECYCLES = ("active", "deprecated", "retired")
_LIFECYCLE = re.compile(r"lifecycle(\[\d*\])?")  # a list: clients write it in several ways
_QUERY = ("limit", "after_id", "before_id", "lifecycle")


class ModelInfo(msgspec.Struct, kw_only=True):
    """A served model. max_tokens is the whole context: output is cut where the context ends."""

    type: str = "model"
    id: str
    display_name: str
    created_at: str  # RFC 3339
    lifecycle: str = "active"
    max_input_tokens: int
    max_tokens: int


class ModelPage(msgspec.Struct, kw_only=True):
    """A page of the served models."""

    data: list[ModelInfo]
    has_more: bool
    first_id: str | None
    last_id: str | None


def model_info(service: AppState, name: str) -> ModelInfo:
    served = service.backend.model_info
    made = datetime.fromtimestamp(served.created, timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
    return ModelInfo(
        id=name,
        display_name=name,
        created_at=made,
        max_input_tokens=served.max_model_len,
        max_tokens=served.max_model_len,
    )


def model_page(service: AppState, query: QueryParams) -> ModelPage:
    """Returns a page of models. Raises ParameterError with the query parameter."""
    _check_names(query)
    names = list(service.models.names) if _wants_active(query) else []
    limit = _limit(query.get("limit"))
    after, before = query.get("after_id"), query.get("before_id")
    if after and before:
        raise ParameterError("before_id", "excludes after_id; give one of them")
    if before:
        rest = names[: _index_of(names, before, "before_id")]
        page = rest[-limit:]
    else:
        rest = names[_index_of(names, after, "after_id") + 1 :] if after else names
        page = rest[:limit]
    return ModelPage(
        data=[model_info(service, name) for name in page],
        has_more=len(page) < len(rest),
        first_id=page[0] if page else None,
        last_id=page[-1] if page else None,
    )


def _check_names(query: QueryParams) -> None:
    for name in query:
        if name not in _QUERY and not _LIFECYCLE.fullmatch(name):
            raise ParameterError("query", f"has what it may not have: {unknown_name_error('field', name[:80], _QUERY)}")


def _wants_active(query: QueryParams) -> bool:
    """True if the query includes active models; every model here is active."""
    wanted = [value for name, value in query.multi_items() if _LIFECYCLE.fullmatch(name)]
    for each in wanted:
        if each not in _LIFECYCLES:
            raise ParameterError("lifecycle", f"is wrong: {unknown_name_error('value', each[:80], _LIFECYCLES)}")
    return not wanted or "active" in wanted


def _limit(given: str | None) -> int:
    if given is None:
        return _PAGE
    if not re.fullmatch("[0-9]{1,4}", given) or not 1 <= int(given) <= _MAX_PAGE:
        raise ParameterError("limit", f"must be a whole number from 1 to {_MAX_PAGE}, not {given[:80]!r}")
    return int(given)


def _index_of(names: list[str], name: str, field: str) -> int:
    if name not in names:
        raise ParameterError(field, f"names {name[:80]!r}, which is no model that is listed")
    return names.index(name)
