"""POST /pooling with `data`: an IO processor converts it to prompts, and their outputs to the response."""

import asyncio
import dataclasses
import time
from collections.abc import AsyncIterator
from typing import Any

import msgspec
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from quintet import io_processors
from quintet.io_processors import Output
from quintet.outputs import RequestOutput
from quintet.pooling_outputs import PoolingOutput, answered
from quintet.pooling_params import PoolingParams
from quintet.server.http.app_state import AppState
from quintet.server.http.errors import ApiError
from quintet.server.http.pooling.inputs import TextReader, resolve_params, too_long
from quintet.server.http.pooling.protocol_requests import PoolingRequest
from quintet.server.http.pooling.protocol_responses import Plugged
from quintet.server.http.pooling.run import PoolingWork, run
from quintet.server.http.usage import usage_of


async def respond(service: AppState, http: HttpRequest, body: PoolingRequest) -> Response:
    """Raises ApiError 400 if there is no IO processor, or it refuses the data."""
    tokenizer = service.backend.tokenizer
    processor = service.io_processors.get(
        service.backend.model_info, lambda: None if tokenizer is None else tokenizer.hf
    )
    if processor is None:
        raise ApiError(
            400, "data is for an IO processor, and this server has none; start it with --io-processor-plugin NAME, or "
            "give input", param="data", code="unsupported",
        )  # fmt: skip
    if body.input is not None or body.messages is not None:
        raise ApiError(400, "data and input exclude each other; give one of them", param="data", code="invalid_value")
    name = usage_of(http).request_id
    try:
        given = await asyncio.to_thread(io_processors.parsed, processor, body.data)
        prompts = await io_processors.prompts_of(processor, given, name)
    except (ValueError, TypeError, KeyError) as error:
        raise ApiError(400, f"data: {error}", param="data", code="invalid_value") from None
    params = resolve_params(service, _params(processor), None, "/pooling")
    several = isinstance(prompts, (list, tuple)) and not (prompts and isinstance(prompts[0], int))
    texts = TextReader(service, params, body.cache_salt, param="data")
    listed = [_text(each) for each in (prompts if several else [prompts])]
    prompts = await texts.read(listed)
    most = texts.limits.max_model_len
    for place, each in enumerate(prompts):
        if len(each.token_ids) > most:  # it would be run in chunks, which the processor does not support
            raise too_long(f"{texts.name(place, len(prompts))} has {len(each.token_ids)} tokens", most, "data")
    work = PoolingWork(prompts, params, body.priority or 0)

    async def answer(outputs: list[RequestOutput]) -> bytes:
        for number, output in enumerate(outputs):
            usage_of(http).count_output(number, output)
        made = await io_processors.answer_of(processor, _numbered(outputs), name)
        tell = getattr(processor, "output_to_response", None)
        if callable(tell):
            return _encode(tell(made))
        raw = msgspec.Raw(_encode(made))
        return msgspec.json.encode(Plugged(request_id=name, created_at=int(time.time()), data=raw))

    return await run(service, http, work, answer)


def _params(processor: Any) -> PoolingParams:
    """Returns the processor's PoolingParams. Raises ApiError 500 if they are of another type."""
    params = io_processors.merged(processor)
    if not isinstance(params, PoolingParams):
        raise ApiError(500, f"the IO processor gave a {type(params).__name__}, and not quintet's PoolingParams")
    return params


def _text(prompt: Any) -> Any:
    """Returns text or token ids, also out of a dict of either. Raises ApiError 400 for other inputs."""
    if not isinstance(prompt, dict):
        return list(prompt) if isinstance(prompt, tuple) else prompt
    lacking = next((key for key in ("multi_modal_data", "prompt_embeds") if prompt.get(key) is not None), None)
    if lacking is not None:
        raise ApiError(
            400, f"the IO processor gave {lacking}, and models here take text alone: raw tensors, such as those of "
            "TerraTorch's models, have no model here to run them", param="data", code="unsupported",
        )  # fmt: skip
    ids = prompt.get("prompt_token_ids")
    return prompt.get("prompt") if ids is None else ids


async def _numbered(outputs: list[RequestOutput]) -> AsyncIterator[tuple[int, Output]]:
    for number, output in enumerate(outputs):
        yield number, answered(output, PoolingOutput)


def _encode(made: Any) -> bytes:
    """Encodes a processor's output as JSON: pydantic models, arrays and dataclasses too."""

    def plain(value: Any) -> Any:
        for name in ("model_dump", "tolist"):
            if callable(turn := getattr(value, name, None)):
                return turn()
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            return dataclasses.asdict(value)
        raise TypeError(f"the IO processor answered with a {type(value).__name__}, which is no JSON")

    return msgspec.json.encode(made, enc_hook=plain)
