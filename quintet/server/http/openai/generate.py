"""POST /inference/v1/generate: vLLM's route from token ids to token ids, for trainers."""

import base64
import dataclasses
import functools
import io
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from fastapi import APIRouter
from msgspec import UNSET
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from quintet.chat.prepare import compiled_grammar
from quintet.common.unknown_fields import drop_unknown
from quintet.config.schema.unsupported import PARAMETERS
from quintet.outputs import CompletionOutput, Logprob, LogprobsAt, RequestOutput
from quintet.sampling_params import RequestOutputKind, SamplingParams
from quintet.server.http.app_state import AppState
from quintet.server.http.engine_call import EngineCall, PromptRequest
from quintet.server.http.errors import ApiError
from quintet.server.http.inputs.body import read_body
from quintet.server.http.inputs.prompts import PromptReader, run_in_thread
from quintet.server.http.inputs.sampling_params import checked_params, invalid_field
from quintet.server.http.inputs.unknown_fields import refusal
from quintet.server.http.openai.generate_protocol import (
    GenerateChoice,
    GenerateContent,
    Generated,
    GenerateLogprob,
    GenerateLogprobs,
    GenerateRequest,
)
from quintet.server.http.openai.logprobs import LogprobsWriter, json_list
from quintet.server.http.openapi import documents_route
from quintet.server.http.respond import AnswerHead, app_state_of, stream_response, whole_response
from quintet.server.http.sse import DONE, encode, event
from quintet.server.http.usage import RequestUsage, request_times, set_request_name, usage_of, wants_usage

router = APIRouter()

_NAME = "sampling_params"
_FIELDS = frozenset(each.name for each in dataclasses.fields(SamplingParams))
_LOWEST = -9999.0  # JSON has no minus infinity
_ROWS = 512  # positions of log-probabilities that are written at once


@router.post("/inference/v1/generate")
@documents_route(body=GenerateRequest, answer=Generated, stream=Generated)
async def generate(http: HttpRequest) -> Response:
    """Continues a prompt of token ids; answers with token ids."""
    service = app_state_of(http)
    body = await read_body(http, GenerateRequest)
    set_request_name(http, body.request_id)
    await service.choose_model(http, body.model)
    service.check_ready()
    params = _params(service, body)
    grammar = await compiled_grammar(
        service.backend.grammar_checks, params.structured_outputs, f"{_NAME}.structured_outputs"
    )
    reader = PromptReader(service, params, body.cache_salt, special=False)
    prompt = await run_in_thread(
        service, len(body.token_ids), lambda: reader.read(body.token_ids, "the prompt"), "token_ids"
    )
    params.truncate_prompt_tokens = None  # already applied
    asks = [PromptRequest(prompt, params, body.priority or 0, grammar)]
    tally = usage_of(http)
    tally.count_prompts(asks)
    answer = _Answer(service, body, params, tally)
    if body.stream:
        return await stream_response(service, http, asks, answer.events)
    return await whole_response(service, http, asks, answer.whole)


def _params(service: AppState, body: GenerateRequest) -> SamplingParams:
    """Returns the checked sampling parameters; the model's own defaults are not among them, as in vLLM."""
    given = _known(body.sampling_params)
    kind = given.pop("output_kind", None)
    if kind not in (None, 0, 1, 2):
        raise invalid_field(f"{_NAME}.output_kind", "is settled by stream; leave it out")
    given.pop("detokenize", None)  # by output_mode
    options = body.stream_options
    if options is not None and not body.stream:
        raise invalid_field("stream_options", "belongs to a stream; set stream to true, or leave it out")
    for name in ("prompt_logprobs", "prompt_logprob_token_ids"):
        if body.stream and given.get(name) is not None:
            raise invalid_field(f"{_NAME}.{name}", "is not streamed; set stream to false")
    kinds = RequestOutputKind.DELTA if body.stream else RequestOutputKind.FINAL_ONLY
    needs_text = body.output_mode == "text" or bool(given.get("stop"))
    fields = {**given, "output_kind": kinds, "detokenize": needs_text}
    if body.kv_transfer_params is not None:
        fields["kv_transfer_params"] = body.kv_transfer_params
    if body.output_mode == "text" and service.backend.tokenizer is None:
        raise ApiError(400, "the engine has no tokenizer; leave output_mode out", param="output_mode")
    return checked_params(service, fields, _PrefixedNames(), SamplingParams(max_tokens=None))


def _known(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields that are set. Those of vLLM's that are not served are refused, unless they ask for nothing."""
    given = {name: value for name, value in fields.items() if value is not None}
    for name in [name for name in given if name in PARAMETERS and name not in _FIELDS]:
        if given.pop(name):
            raise invalid_field(f"{_NAME}.{name}", f"is not supported: {PARAMETERS[name]}")
    if wrong := drop_unknown(given, _FIELDS, _NAME):
        raise refusal(_NAME, wrong, _FIELDS)
    return given


class _PrefixedNames(dict[str, str]):
    """The name in the request of each field of SamplingParams."""

    def get(self, name: str, default: Any = None) -> Any:
        return f"{_NAME}.{name}"


class _Answer:
    """Builds the answer to one request, whole or in chunks."""

    def __init__(self, service: AppState, body: GenerateRequest, params: SamplingParams, tally: RequestUsage) -> None:
        self._body, self._params, self._tally, self._turns = body, params, tally, service.cooperative
        self._settings = service.settings
        head = AnswerHead.for_answer(service, tally.request_id, body.model).fields()
        self._head = {"request_id": head.pop("id"), "output_mode": body.output_mode, **head}
        self._tokenizer = service.backend.tokenizer
        self._writer = LogprobsWriter(self._tokenizer, service.cooperative, params)

    async def whole(self, outputs: Sequence[RequestOutput]) -> Generated:
        (output,) = outputs
        self._tally.count_output(0, output)
        scores = None
        if self._params.prompt_logprobs is not None:
            scores = await self._writer.prompt_logprobs(output.prompt_logprobs or [])
        candidates = output.prompt_token_id_logprobs
        return Generated(
            choices=[await self._choice(each) for each in output.outputs],
            usage=self._tally.usage(),
            metrics=request_times(self._settings, outputs, self._params.n),
            prompt_logprobs=scores,
            prompt_token_id_logprobs=None if candidates is None else npy(candidates),
            prompt_token_ids=output.prompt_token_ids if self._body.return_token_ids else None,
            kv_transfer_params=output.kv_transfer_params,
            **self._head,
        )

    async def events(self, call: EngineCall) -> AsyncIterator[bytes]:
        usage, steady = wants_usage(self._settings, self._body.stream_options)
        chunk = Generated(choices=[], **self._head)
        prompt_ids = bool(self._body.return_token_ids)
        last = []
        async for _, output in call:
            last = [output]
            self._tally.count_output(0, output)
            chunk.usage = self._tally.usage() if steady else None
            chunk.kv_transfer_params = output.kv_transfer_params
            for each in output.outputs:
                chunk.prompt_token_ids = output.prompt_token_ids if prompt_ids else None
                chunk.choices, prompt_ids = [await self._choice(each)], False
                yield event(chunk)
        if usage:
            times = request_times(self._settings, last, self._params.n)
            yield event(Generated(choices=[], usage=self._tally.usage(), metrics=times, **self._head))
        yield DONE

    async def _choice(self, each: CompletionOutput) -> GenerateChoice:
        return GenerateChoice(
            index=each.index,
            finish_reason=each.finish_reason,
            stop_reason=each.stop_reason,
            token_ids=list(each.token_ids),
            text=each.text if self._body.output_mode == "text" else UNSET,
            logprobs=await self._logprobs(each),
            routed_experts=None if each.routed_experts is None else npy(each.routed_experts),
        )

    async def _logprobs(self, each: CompletionOutput) -> GenerateLogprobs | None:
        if each.logprobs is None:
            return None
        ids, positions = each.token_ids, each.logprobs

        def write(start: int) -> bytes:
            """The entries from `start` on, without the list's brackets."""
            rows = zip(ids[start : start + _ROWS], positions[start : start + _ROWS], strict=True)
            return encode([self._content(token_id, at) for token_id, at in rows])[1:-1]

        parts = await self._turns.run_all(functools.partial(write, start) for start in range(0, len(ids), _ROWS))
        return GenerateLogprobs(json_list(parts))

    def _content(self, token_id: int, at: LogprobsAt) -> GenerateContent:
        """The entries of a position, the token that was drawn first; of `logprobs=0` it is the only one."""
        wanted = self._params.num_logprobs != 0
        top = [GenerateLogprob(**self._entry(each, entry)) for each, entry in at.items()] if wanted else []
        return GenerateContent(**self._entry(token_id, at[token_id]), top_logprobs=top)

    def _entry(self, token_id: int, entry: Logprob) -> dict[str, Any]:
        """The fields of a token's log-probability."""
        name: str = f"token_id:{token_id}"
        raw: Any = UNSET
        if self._body.output_mode == "text" and self._tokenizer is not None:
            name, raw = self._writer.text(token_id), list(self._tokenizer.token_bytes(token_id))
        value = max(entry.logprob, _LOWEST)
        return {"token_id": token_id, "logprob": value, "rank": entry.rank, "token": name, "bytes": raw}


def npy(x: Any) -> str:
    """Returns an array as base64 of a .npy file."""
    import numpy as np  # an API process starts without it

    file = io.BytesIO()
    np.save(file, np.ascontiguousarray(x), allow_pickle=False)
    return base64.b64encode(file.getbuffer()).decode("ascii")
