"""Builds a response before its answer, with the fields copied from its request."""

import time

from quintet.sampling_params import SamplingParams
from quintet.server.http.responses.protocol import ResponseObject
from quintet.server.http.responses.request import CreateResponse
from quintet.server.http.responses.tools import shown


def begin(body: CreateResponse, params: SamplingParams, model: str, response_id: str) -> ResponseObject:
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
        tools=shown(body.tools),
        text={"format": (body.text or {}).get("format") or {"type": "text"}},
        top_logprobs=body.top_logprobs or 0,
        top_p=params.top_p,
        truncation=body.truncation or "disabled",
        user=body.user,
        status="queued" if body.background else "in_progress",
    )
