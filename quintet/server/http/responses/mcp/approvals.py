"""Tool calls that need approval: reads and checks mcp_approval_request and mcp_approval_response items."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from quintet.chat.validation import kind_of, text_of
from quintet.sampling_params import ParameterError
from quintet.server.http.ids import new_id
from quintet.server.http.responses.mcp.items import MAX_CALLS
from quintet.server.http.responses.protocol import Item
from quintet.server.http.responses.tool_items import check_arguments, check_fields

_REQUEST_KEYS = ("type", "id", "server_label", "name", "arguments")
_ANSWER_KEYS = ("type", "id", "approval_request_id", "approve", "reason")
_MAX_ID = 256  # characters
_REFUSED = "the user refused this call, and it was not carried out"


class ApprovedCall(NamedTuple):
    """An approved call to carry out."""

    request: Item
    where: str  # which field of the input approves it


def read_request(item: Mapping[str, Any], where: str) -> Item:
    """Reads an mcp_approval_request. Keeps its id: the answer refers to it. Raises ParameterError, as the others do."""
    check_fields(item, where, _REQUEST_KEYS)
    asked = text_of(item.get("id"), f"{where}.id")
    if not 1 <= len(asked) <= _MAX_ID:
        raise ParameterError(f"{where}.id", f"must be text of 1 to {_MAX_ID} characters")
    arguments = text_of(item.get("arguments"), f"{where}.arguments")
    check_arguments(arguments, f"{where}.arguments")
    return {
        "id": asked,
        "type": "mcp_approval_request",
        "server_label": text_of(item.get("server_label"), f"{where}.server_label"),
        "name": text_of(item.get("name"), f"{where}.name"),
        "arguments": arguments,
    }


def read_answer(item: Mapping[str, Any], where: str) -> Item:
    check_fields(item, where, _ANSWER_KEYS)
    approve, reason = item.get("approve"), item.get("reason")
    if not isinstance(approve, bool):
        raise ParameterError(f"{where}.approve", f"must be true or false, not {kind_of(approve)}")
    return {
        "id": f"mcpar_{new_id()}",
        "type": "mcp_approval_response",
        "approval_request_id": text_of(item.get("approval_request_id"), f"{where}.approval_request_id"),
        "approve": approve,
        "reason": None if reason is None else text_of(reason, f"{where}.reason"),
    }


def has_client_id(item: Item) -> bool:
    """True if the client chose the item's id. It may equal another item's id, so the item is not indexed by it."""
    return bool(item["type"] == "mcp_approval_request")


def check_answers(earlier: Iterable[Item], new: Sequence[Item]) -> list[ApprovedCall]:
    """Checks that each answer follows its request and is the only answer to it. Returns approved calls that were not
    carried out, in the order of the answers. `new`: items of the input."""
    asked: dict[str, Item] = {}
    answers: dict[str, ApprovedCall | None] = {}  # by the ids of requests
    for item, where in [*((item, "") for item in earlier), *_with_positions(new)]:
        if item["type"] == "mcp_approval_request":
            if item["id"] in asked:
                raise ParameterError(f"{where}.id", f"is {_short(item)}, which is in the conversation twice; leave one")
            asked[item["id"]] = item
        elif item["type"] == "mcp_approval_response":
            _check_answer(item, where, asked, answers)
            right = item["approve"] and bool(where)
            place = f"{where}.approval_request_id"
            answers[item["approval_request_id"]] = (
                ApprovedCall(asked[item["approval_request_id"]], place) if right else None
            )
    done = {each.get("approval_request_id") for each in new if each["type"] == "mcp_call"}
    return [each for name, each in answers.items() if each is not None and name not in done]


def check_all_answered(earlier: Sequence[Item], new: Sequence[Item]) -> None:
    """Checks that every approval request has an answer: a call is carried out or refused before the model continues."""
    answered = {item["approval_request_id"] for item in (*earlier, *new) if item["type"] == "mcp_approval_response"}
    for item, where in [*((item, "input") for item in earlier), *_with_positions(new)]:
        if item["type"] == "mcp_approval_request" and item["id"] not in answered:
            raise ParameterError(
                where if where == "input" else f"{where}.id",
                f"leaves the mcp_approval_request {_short(item)} without an answer; add to the input "
                f'{{"type": "mcp_approval_response", "approval_request_id": "{item["id"][:80]}", '
                '"approve": true or false}',
            )


def check_approved(approved: Sequence[ApprovedCall], labels: Mapping[str, str]) -> None:
    """Checks that this request allows the approved calls, since a client may invent them. `labels`: server labels by
    the names of the allowed tools."""
    if len(approved) > MAX_CALLS:
        raise ParameterError(
            approved[MAX_CALLS].where,
            f"approves a call too many: a response carries out {MAX_CALLS} at most; refuse the others",
        )
    for request, where in approved:
        name, label = request["name"], request["server_label"]
        if labels.get(name) != label:
            raise ParameterError(
                where, f"approves a call of {name[:80]!r} of {label[:80]!r}, which is not among this request's tools; "
                "give the tool server in tools, and the tool in its allowed_tools",
            )  # fmt: skip


def approvals_as_calls(items: Sequence[Item]) -> Iterator[Item]:
    """Replaces each approval request by an mcp_call with its result, which the model reads as any other call. Requests
    without an answer are left out; a call that is about to be carried out has no result yet."""
    requests = {item["id"] for item in items if item["type"] == "mcp_approval_request"}
    came = {item["approval_request_id"]: item for item in items if item["type"] == "mcp_approval_response"}
    came |= {name: item for item in items if (name := _approval_id(item)) in requests}
    for item in items:
        if item["type"] == "mcp_approval_request":
            if item["id"] in came:
                yield _as_mcp_call(item, came[item["id"]])
        elif item["type"] != "mcp_approval_response" and _approval_id(item) not in requests:
            yield item


def _as_mcp_call(request: Item, came: Item) -> Item:
    if came["type"] == "mcp_call":
        return came
    refusal = None if came["approve"] else f"{_REFUSED}: {came['reason']}" if came["reason"] else _REFUSED
    return {**request, "type": "mcp_call", "status": "completed", "output": refusal, "error": None}


def _approval_id(item: Item) -> str | None:
    """Returns the id of the approval request of an mcp_call; None for other items."""
    return item.get("approval_request_id") if item["type"] == "mcp_call" else None


def _check_answer(item: Item, where: str, asked: Mapping[str, Item], answers: Mapping[str, Any]) -> None:
    name = item["approval_request_id"]
    if name not in asked:
        raise ParameterError(
            f"{where}.approval_request_id", f"is {name[:80]!r}, and no mcp_approval_request before it has that id; "
            "give the request, or previous_response_id of the response that made it",
        )  # fmt: skip
    if name in answers:
        raise ParameterError(
            f"{where}.approval_request_id", f"is {name[:80]!r}, which was answered before; leave one answer"
        )


def _with_positions(new: Iterable[Item]) -> list[tuple[Item, str]]:
    return [(item, f"input[{place}]") for place, item in enumerate(new)]


def _short(item: Item) -> str:
    return repr(item["id"][:80])
