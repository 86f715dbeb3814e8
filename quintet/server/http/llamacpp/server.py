"""GET /props, /slots, /lora-adapters and POST /apply-template, /embedding: llama.cpp's facts about the server."""

from fastapi import APIRouter
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from quintet import __version__
from quintet.chat.prepare import render
from quintet.chat.tool_choice import read_tools
from quintet.media.kinds import AUDIO, IMAGE
from quintet.pooling_params import PoolingParams
from quintet.server.http.app_state import AppState
from quintet.server.http.errors import ApiError
from quintet.server.http.inputs.body import parse_body, read_body
from quintet.server.http.inputs.chat_input import chat_model, read_chat
from quintet.server.http.inputs.sampling_params import invalid_field
from quintet.server.http.llamacpp.completion import generation_settings
from quintet.server.http.llamacpp.inputs import read_request
from quintet.server.http.llamacpp.protocol import (
    EmbeddingAnswer,
    EmbeddingBody,
    LoRAAdapterFacts,
    Props,
    Rendered,
    Slot,
    TemplateBody,
)
from quintet.server.http.openapi import documents_route
from quintet.server.http.pooling.encoding_format import NumberFormat, Numbers
from quintet.server.http.pooling.inputs import as_list, one_of, read_inputs, resolve_params
from quintet.server.http.pooling.protocol_requests import EmbeddingRequest
from quintet.server.http.pooling.routes import encode_all
from quintet.server.http.pooling.run import PoolingWork, respond
from quintet.server.http.respond import app_state_of, json_response
from quintet.server.http.usage import RequestUsage

router = APIRouter()

MAX_SLOTS = 64  # idle ones that are listed
_NORMALIZE = {None: True, 2: True, -1: False}  # embd_normalize -> PoolingParams.normalize


@router.get("/props")
@documents_route(answer=Props)
async def props(http: HttpRequest) -> Response:
    """Returns facts about the model; POST, which changes them in llama.cpp, is not served."""
    service = app_state_of(http)
    tokenizer, info = service.backend.tokenizer, service.backend.model_info
    named = {} if tokenizer is None else tokenizer.special_tokens
    settings = generation_settings(service, service.backend.default_params(), stream=False)
    settings["n_predict"] = settings["max_tokens"] = info.defaults.get("max_tokens", -1)
    return json_response(
        Props(
            default_generation_settings={"id": 0, "n_ctx": info.max_model_len, "params": settings},
            total_slots=_num_slots(service),
            model_alias=service.model_names[0],
            model_path=info.model,
            chat_template=service.chat_template or ("" if tokenizer is None else tokenizer.templates),
            bos_token=str(named.get("bos_token") or ""),
            eos_token=str(named.get("eos_token") or ""),
            modalities={"vision": IMAGE in info.media.kinds, "audio": AUDIO in info.media.kinds},
            build_info=f"quintet {__version__}",
            is_sleeping=bool(service.sleep_level),
        )
    )


def _num_slots(service: AppState) -> int:
    """Returns how many requests of the whole context the KV cache holds; requests have no fixed slots."""
    info = service.backend.model_info
    return min(MAX_SLOTS, max(1, info.kv_tokens // info.max_model_len))


@router.get("/slots")
@documents_route(answer=list[Slot])
async def slots(http: HttpRequest) -> Response:
    """Returns a slot for each running request, and idle ones up to total_slots; no prompts, no parameters."""
    service = app_state_of(http)
    stats = service.backend.stats()
    running = 0 if stats is None else stats.scheduler.num_running
    count = max(running, _num_slots(service))
    if http.query_params.get("fail_on_no_slot") == "1" and running >= count:
        raise ApiError(503, f"all {count} slots are in use; try again", code="not_ready", headers={"Retry-After": "1"})
    length = service.backend.model_info.max_model_len
    return json_response([Slot(id=at, n_ctx=length, is_processing=at < running) for at in range(count)])


@router.get("/lora-adapters")
@documents_route(answer=list[LoRAAdapterFacts])
async def lora_adapters(http: HttpRequest) -> Response:
    """Lists the LoRA adapters; requests choose theirs. POST, which sets scales of all requests, is not served."""
    adapters = app_state_of(http).models.adapters
    return json_response([LoRAAdapterFacts(each.number, each.path, 0.0, each.reference.name) for each in adapters])


@router.post("/apply-template")
@documents_route(body=TemplateBody, answer=Rendered)
async def apply_template(http: HttpRequest) -> Response:
    """Returns the text of a conversation in the model's chat template."""
    service, body = app_state_of(http), await read_body(http, TemplateBody, any_type=True)
    await service.choose_model(http, body.model)
    read_tools(body.tools, None)
    prompt = await render(read_chat(service, body, body.messages), chat_model(service))
    return json_response(Rendered(prompt.text or ""))


@router.post("/embedding")
@router.post("/embeddings")
@documents_route(body=EmbeddingBody, answer=list[EmbeddingAnswer])
async def create_embedding(http: HttpRequest) -> Response:
    """Returns a list of embeddings, each in a list of its own as llama.cpp has it."""
    service, body = await read_request(http, EmbeddingBody)
    one_of(body, "content", "input")
    if body.embd_normalize not in _NORMALIZE:
        raise invalid_field("embd_normalize", f"must be 2 or -1, not {body.embd_normalize}: others are not served")
    wanted = PoolingParams(normalize=_NORMALIZE[body.embd_normalize])
    params = resolve_params(service, wanted, "embed", "/embedding")
    given = as_list(body.input if body.content is None else body.content)
    work = PoolingWork(await read_inputs(service, parse_body({"input": given}, EmbeddingRequest), params), params)

    async def answer(found: list[Numbers], tally: RequestUsage) -> list[EmbeddingAnswer]:
        written = await encode_all(service, found, NumberFormat())
        return [EmbeddingAnswer(at, [row]) for at, row in enumerate(written)]

    return await respond(service, http, work, answer)
