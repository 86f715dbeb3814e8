"""Converts the body of a Responses request to an engine request: the conversation so far, and its prompt."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import msgspec

from quintet.chat.media.parts import is_media
from quintet.chat.messages import ChatOptions
from quintet.chat.output_parser import OutputFormat
from quintet.chat.prepare import ChatInput, ChatModel, FieldNames, prepare, render
from quintet.chat.prompts import ContextLengthError, Prompt
from quintet.chat.reasoning_effort import ReasoningSettings
from quintet.chat.tool_choice import ToolChoice
from quintet.sampling_params import ParameterError, RequestOutputKind, SamplingParams
from quintet.server.http.app_state import AppState
from quintet.server.http.engine_call import PromptRequest
from quintet.server.http.errors import ApiError
from quintet.server.http.inputs.chat_input import chat_model, check_tools, template_tools
from quintet.server.http.inputs.prompts import run_in_thread
from quintet.server.http.inputs.response_format import structured_output_of
from quintet.server.http.inputs.sampling_params import checked_params
from quintet.server.http.responses.input_items import read_input
from quintet.server.http.responses.item_references import ItemReferences, without_logprobs
from quintet.server.http.responses.mcp.approvals import (
    ApprovedCall,
    check_all_answered,
    check_answers,
    check_approved,
    has_client_id,
)
from quintet.server.http.responses.mcp.items import ToolList
from quintet.server.http.responses.mcp.tools import ServedTools, choice_of, resolve_tools
from quintet.server.http.responses.messages import Message, as_messages
from quintet.server.http.responses.protocol import Item
from quintet.server.http.responses.request import SAMPLING, CountInput, CreateResponse, wants_logprobs
from quintet.server.http.responses.store import ResponseStore, StoredResponse
from quintet.server.http.responses.tool_items import check_outputs
from quintet.server.http.responses.tools import nested, read_tools

_PATH = "/v1/responses"
_REMEDY = "shorten it, or set truncation to auto, which drops the oldest messages"
_ANSWER_SHARE = 4  # without max_tokens, a conversation is cut to leave a quarter (1/4) of the context for the answer


@dataclass(frozen=True)
class ConversationPlan:
    """Data for one round of a response: conversation, engine request, output format, tools."""

    conversation: "ConversationSoFar"
    request: PromptRequest
    output_format: OutputFormat  # how its answer is taken apart
    served_tools: ServedTools  # its tools

    @property
    def runs_calls_first(self) -> bool:
        """True if approved calls run first: `ask` then has no results yet, and is replaced after the calls."""
        return bool(self.conversation.approved)

    @property
    def new_lists(self) -> list[ToolList]:
        """Tool lists that the conversation does not contain yet."""
        known = {item["server_label"] for item in self.conversation.items if item["type"] == "mcp_list_tools"}
        return [each for each in self.served_tools.tool_lists if each.label not in known]


class ConversationSoFar(NamedTuple):
    """The conversation before an answer."""

    items: list[Item]
    messages: list[Message]  # the same conversation for the chat template
    new_ids: tuple[str, ...]  # of the items that came with this request
    size: int  # bytes of JSON that it was read from
    approved: Sequence[ApprovedCall] = ()  # calls to carry out before the model continues


async def make_plan(service: AppState, store: ResponseStore, body: CreateResponse, owner: str) -> ConversationPlan:
    """Makes the plan of the first round. Continues only responses of that owner. Raises ApiError or ParameterError."""
    params = _params(service, body)
    served = await resolve_tools(service, body.tools)
    tool_choice = read_tools(served.functions, choice_of(body.tool_choice, served))
    check_tools(service, tool_choice)
    conversation = await _read_conversation(service, store, body, owner)
    check_approved(conversation.approved, served.labels)
    chat = replace(_chat_input(service, body, conversation, served, tool_choice), params=params)
    return await _make_round(service, body, chat, conversation, served)


async def next_plan(
    service: AppState, body: CreateResponse, plan: ConversationPlan, output: bytes, num_tokens: int
) -> ConversationPlan | None:
    """Makes the plan of the next round. `output`: JSON of all output items so far. Returns None if no tokens are left.

    A required tool was called in the first round, so tool choice is now auto (or none).
    """
    params = _params(service, body)
    if body.max_output_tokens is not None:
        if num_tokens >= body.max_output_tokens:
            return None
        params.max_tokens = body.max_output_tokens - num_tokens
    parsed = service.parsers.tool is not None and plan.output_format.tool is not None
    tool_choice = ToolChoice(tuple(plan.output_format.tools), "auto" if parsed else "none")

    def add() -> ConversationSoFar:
        items = plan.conversation.items + [without_logprobs(item) for item in msgspec.json.decode(output)]
        _check_size(items, service.media_calls.body_limit(_PATH).bytes, "tools")
        return plan.conversation._replace(
            items=items, messages=as_messages(items), size=plan.conversation.size + len(output)
        )

    conversation = await run_in_thread(service, len(output), add, "tools")
    chat = replace(_chat_input(service, body, conversation, plan.served_tools, tool_choice), params=params)
    planned = await _make_round(service, body, chat, conversation, plan.served_tools)
    return replace(planned, conversation=plan.conversation)


async def _make_round(
    service: AppState, body: CreateResponse, chat: ChatInput, conversation: ConversationSoFar, served: ServedTools
) -> ConversationPlan:
    model = chat_model(service)
    prepared = await prepare(chat, model, await _render_prompt(chat, model, body.truncation))
    return ConversationPlan(conversation, PromptRequest.of(prepared, body.priority), prepared.output_format, served)


async def count_input(service: AppState, store: ResponseStore, body: CountInput, owner: str) -> int:
    """Returns the prompt tokens of a response, of any length; messages dropped by `truncation: "auto"` do not count."""
    served = await resolve_tools(service, body.tools)
    tool_choice = read_tools(served.functions, choice_of(body.tool_choice, served))
    conversation = await _read_conversation(service, store, body, owner)
    chat, params = _chat_input(service, body, conversation, served, tool_choice), checked_params(service, {}, {})
    if body.truncation == "auto":
        chat = replace(chat, params=params)
    return len((await _render_prompt(chat, chat_model(service), body.truncation)).token_ids)


def _chat_input(
    service: AppState,
    body: CreateResponse | CountInput,
    conversation: ConversationSoFar,
    served: ServedTools,
    tool_choice: ToolChoice,
) -> ChatInput:
    head = [] if body.instructions is None else [{"role": "system", "content": body.instructions}]
    form = "text.format" if getattr(body, "structured_outputs", None) is None else "structured_outputs"
    tools = template_tools(service, [nested(each) for each in served.functions or ()], tool_choice)
    return ChatInput(
        messages=[*head, *conversation.messages],
        options=ChatOptions(tools=tools, chat_template_kwargs=body.chat_template_kwargs),
        tool_choice=tool_choice,
        parallel_tool_calls=body.parallel_tool_calls is not False,
        thinking=ReasoningSettings(visible=getattr(body, "include_reasoning", None) is not False).with_effort(
            (body.reasoning or {}).get("effort")
        ),
        cache_salt=body.cache_salt if isinstance(body, CreateResponse) else None,
        size=conversation.size,
        names=FieldNames("input", form, served.positions, _REMEDY),
    )


async def _read_conversation(
    service: AppState, store: ResponseStore, body: CreateResponse | CountInput, owner: str
) -> ConversationSoFar:
    stored = _stored(store, body.previous_response_id, owner)
    most = service.media_calls.body_limit(
        _PATH
    ).bytes  # bytes of a conversation; stored items beyond that are log-probabilities
    references = ItemReferences(body.input, store, owner, most)
    size = body.size + (0 if stored is None else min(len(stored.items) + len(stored.response), most)) + references.size

    def read() -> ConversationSoFar:
        references.read()
        lacks = isinstance(body, CountInput) and body.input is None
        new = [] if lacks else read_input(body.input, references)
        earlier = _stored_items(stored)
        check_outputs(earlier, new)
        approved = check_answers(earlier, new)
        if not isinstance(body, CountInput):
            check_all_answered(earlier, new)
        items = [*earlier, *new]
        if stored is not None or references.size:
            _check_size(items, most, "input" if stored is None else "previous_response_id")
        new_ids = tuple(item["id"] for item in new if not references.is_referenced(item) and not has_client_id(item))
        return ConversationSoFar(items, as_messages(items), new_ids, size, approved)

    return await run_in_thread(service, size, read, "input")


def _params(service: AppState, body: CreateResponse) -> SamplingParams:
    fields = {name: value for name in SAMPLING if (value := getattr(body, name)) is not None}
    if body.max_output_tokens is not None:
        fields["max_tokens"] = body.max_output_tokens
    if wants_logprobs(body):
        fields["logprobs"] = body.top_logprobs or 0
    fields["output_kind"] = RequestOutputKind.DELTA if body.stream or body.background else RequestOutputKind.FINAL_ONLY
    params = checked_params(service, fields, {"max_tokens": "max_output_tokens", "logprobs": "top_logprobs"})
    wanted = (body.text or {}).get("format")
    params.structured_outputs, _ = structured_output_of(wanted, "text.format", body.structured_outputs)
    return params


def _stored(store: ResponseStore, response_id: str | None, owner: str) -> StoredResponse | None:
    """Returns the response that this one continues."""
    if response_id is None:
        return None
    try:
        stored = store.get(response_id, owner)
    except ApiError as error:
        raise ApiError(400, error.message, param="previous_response_id", code="previous_response_not_found") from None
    if stored.running:
        raise ParameterError("previous_response_id", "names a response that is still in progress; wait for its end")
    return stored


def _stored_items(stored: StoredResponse | None) -> list[Item]:
    """Returns the items of the stored conversation, including the answer."""
    if stored is None:
        return []
    response = msgspec.json.decode(stored.response)
    if response["status"] not in ("completed", "incomplete"):
        raise ParameterError("previous_response_id", f"names a response that is {response['status']}: it has no answer")
    items: list[Item] = msgspec.json.decode(stored.items)
    return items + [without_logprobs(item) for item in response["output"]]


def _check_size(items: Sequence[Item], most: int, field: str) -> None:
    size = len(msgspec.json.encode(items))
    if size > most:
        raise ParameterError(
            field,
            f"leads to a conversation of {size} bytes, and a request may have {most}; begin a new one",
        )


async def _render_prompt(chat: ChatInput, model: ChatModel, truncation: str | None) -> Prompt:
    """Renders a conversation; drops the oldest messages of a long one if the request has truncation=auto."""
    try:
        return await render(chat, model)
    except ContextLengthError:
        if truncation != "auto" or (prompt := await _drop_oldest(chat, model)) is None:
            raise
        return prompt


async def _drop_oldest(chat: ChatInput, model: ChatModel) -> Prompt | None:
    """Drops messages before the earliest user message from which the rest fits; leading system messages stay."""
    assert chat.params is not None and model.max_model_len is not None
    messages, limit = chat.messages, model.max_model_len
    most = limit - min(chat.params.max_tokens or limit // _ANSWER_SHARE, limit // 2)  # tokens of a prompt that was cut
    front = next((place for place, each in enumerate(messages) if _is_droppable(each)), len(messages))
    chars = model.tokenizer.max_chars_per_token
    starts = _possible_starts(messages, front, None if chars is None else chars * most)
    best: Prompt | None = None
    while starts:
        middle = len(starts) // 2
        rest = [*messages[:front], *messages[starts[middle] :]]
        prompt = await render(replace(chat, messages=rest, params=None), model)
        if len(prompt.token_ids) <= most:
            best, starts = prompt, starts[:middle]
        else:
            starts = starts[middle + 1 :]
    return best


def _possible_starts(messages: Sequence[Message], front: int, most: int | None) -> list[int]:
    """Returns indices of user messages to start from; earlier ones are too long by their character count alone."""
    starts, size = [], 0
    for place in range(len(messages) - 1, front, -1):
        content = messages[place].get("content", ())
        size += sum(len(part["text"]) for part in content if not is_media(part))
        if most is not None and size > most:
            break
        if messages[place]["role"] == "user":
            starts.append(place)
    return starts[::-1]


def _is_droppable(message: Message) -> bool:
    return message["role"] not in ("system", "developer")
