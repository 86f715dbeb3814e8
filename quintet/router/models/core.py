"""Server of several models without its HTTP app: finds the model of a request and has its engine answer."""

import asyncio
import fnmatch
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
from msgspec import Raw

from quintet.clients.http_connection import HttpTimeouts
from quintet.common.socket_folder import PrivateFolder
from quintet.router.config import RouterConfig
from quintet.router.core import RouterCore, model_for_anthropic, models_for_anthropic
from quintet.router.models import metrics
from quintet.router.models.config import ModelsConfig, ModelSpec
from quintet.router.models.engine import EngineStarter, Starter, new_key
from quintet.router.models.estimates import estimate_models
from quintet.router.models.managed_model import ManagedModel
from quintet.router.models.manager import Estimator, ModelManager
from quintet.router.models.planner import ModelState
from quintet.router.request_info import RequestInfo
from quintet.router.response_stream import ResponseStream
from quintet.server.http.admin.protocol import ModelCard
from quintet.server.http.errors import ApiError
from quintet.server.lora_modules import LoRAModule

_GONE_SECONDS = 10.0  # seconds until the end of an engine that cannot be reached is seen
_LATEST = ":latest"  # Ollama's clients add it to a name
_ORDERS = msgspec.json.Decoder(dict[str, Any])
_SHOWN_MODELS = 20  # names in an error


class ModelStatus(NamedTuple):
    """Status of one model, for lists of all models in any API."""

    name: str
    aliases: tuple[str, ...]
    path: str  # of its files, or its hub id
    state: ModelState
    failure: str  # why the latest load failed; ""
    created: int  # seconds since 1970
    max_model_len: int  # 0: not known yet
    memory: int  # bytes when loaded; 0: not known yet
    in_flight: int
    waiting: int
    expires: float | None  # seconds until it sleeps or ends; None: not planned
    pinned: bool


class ModelsCore(RouterCore):
    """RouterCore with one engine for each model, which is started when a request names the model."""

    def __init__(
        self,
        specs: Sequence[ModelSpec],
        config: ModelsConfig,
        start: Starter | None = None,
        estimate: Estimator = estimate_models,
    ) -> None:
        """`start`, `estimate`: instead of child processes."""
        key = new_key()
        super().__init__(
            RouterConfig(backend=tuple(f"http://engine-{number}" for number in range(len(specs))), backend_api_key=key)
        )
        self.title, self._created = f"{len(specs)} models", int(time.time())
        self._folder = PrivateFolder()
        timeouts = HttpTimeouts(5.0, 3600.0, 300.0)
        self.manager = ModelManager(
            specs, config, start or EngineStarter(self._folder.path, key, timeouts), timeouts, estimate
        )

    def start(self) -> None:
        self.manager.start()

    def close(self) -> None:
        self.manager.close()
        self._folder.remove()

    def find(self, name: str | None) -> ManagedModel:
        """Returns the model of this name, alias or adapter; without a name the first one. ApiError 404 lists all."""
        models = self.manager.models
        if name is None:
            return models[0]
        for wanted in (name, name.removesuffix(_LATEST)):
            for model in models:
                if model.spec.served_name(wanted) is not None:
                    return model
        for model in models:
            if any(fnmatch.fnmatchcase(name, alias) for alias in model.spec.aliases):
                return model
        there = ", ".join(each.name for each in models[:_SHOWN_MODELS])
        more = f" and {len(models) - _SHOWN_MODELS} more (GET /v1/models)" if len(models) > _SHOWN_MODELS else ""
        raise ApiError(
            404, f"the model {name[:200]!r} is not served here; there is {there}{more}", param="model",
            code="model_not_found",
        )  # fmt: skip

    async def answer(self, ask: RequestInfo, pipe: ResponseStream, stored: str | None) -> None:
        if stored is not None:
            return await self._answer_stored(ask, pipe, stored)
        model = self.find(ask.fields.model)
        if ask.fields.model is not None and (name := _engine_name(model, ask.fields.model)) != ask.fields.model:
            ask.body = _with_model(ask.body, name)
        if not await self._forward(ask, pipe, model):  # its engine had ended: another one is started
            await self._forward(ask, pipe, model, again=True)

    async def _forward(self, ask: RequestInfo, pipe: ResponseStream, model: ManagedModel, again: bool = False) -> bool:
        """Returns whether it was answered; False if its engine ended before it carried the request out. ApiError."""
        async with self.manager.lease(model) as backend:
            engine, gone = model.engine, model.gone
            try:
                await self.forwarder.forward_to(ask, backend, pipe, None if engine is None else engine.is_gone)
            except ApiError as error:
                if again or error.code != "backend_unreachable" or pipe.started:
                    raise
            else:
                return True
        await _wait(gone)
        return False

    async def _answer_stored(self, ask: RequestInfo, pipe: ResponseStream, response_id: str) -> None:
        """Has the engine that keeps a response answer; responses end with their engine."""
        place = self.forwarder.response_locations.find(response_id)
        found = [each for each in self.manager.models if place is not None and each.url == place.url]
        if place is None or place.owner != ask.owner or not found or found[0].slot.state is ModelState.UNLOADED:
            raise ApiError(404, f"there is no response {response_id[:200]!r} here", code="not_found")
        await self._forward(ask, pipe, found[0], again=True)

    def check_ready(self) -> None:
        """ApiError 503 while the server ends."""
        if self.draining:
            raise ApiError(503, "the server ends and takes no new requests", code="draining")

    # ------------------------------------------------------------------------------------------------- lists

    def statuses(self) -> list[ModelStatus]:
        """Returns the status of all models, in the order of the file."""
        return [self._status(each) for each in self.manager.models]

    def _status(self, model: ManagedModel) -> ModelStatus:
        slot, now = model.slot, asyncio.get_running_loop().time()
        return ModelStatus(
            model.name, model.spec.aliases, model.spec.engine.model, slot.state, model.failure, self._created,
            0 if model.estimate is None else model.estimate.max_model_len, 0 if slot.size is None else slot.size.loaded,
            slot.in_flight, slot.waiting, None if model.idle_at is None else max(0.0, model.idle_at - now),
            model.spec.pinned,
        )  # fmt: skip

    def model_list(self, anthropic: bool) -> dict[str, Any]:
        entries: dict[str, dict[str, Any]] = {}
        for model in self.manager.models:
            entries[model.name] = card = _card(self._status(model))
            entries |= {each.name: _adapter_card(card, each) for each in model.spec.server.lora_modules}
        return models_for_anthropic(entries) if anthropic else {"object": "list", "data": list(entries.values())}

    def model(self, name: str, anthropic: bool) -> dict[str, Any]:
        model = self.find(name)
        entry, served = _card(self._status(model)), _engine_name(model, name)
        if adapter := next((each for each in model.spec.server.lora_modules if each.name == served), None):
            entry = _adapter_card(entry, adapter)
        return model_for_anthropic(served, entry) if anthropic else entry

    async def metrics(self) -> bytes:
        models = self.manager.models
        engines = {each.name: each.engine for each in models if each.engine is not None and each.backend is not None}
        texts = await asyncio.gather(*(each.metrics() for each in engines.values()))
        by_model = dict(zip(engines, texts, strict=True))
        return metrics.scrape(metrics.ModelsSnapshot(
            models, self.manager.ledger, self.totals, self.queue.in_flight, by_model
        ))  # fmt: skip

    # -------------------------------------------------------------------------------------------- administration

    async def administer(self, path: str, body: bytes) -> dict[str, Any]:
        """Lists the models that are not unloaded, loads one, or unloads one."""
        if path == "/models/loaded":
            ledger = self.manager.ledger
            loaded = [each for each in self.statuses() if each.state is not ModelState.UNLOADED]
            return {
                "models": [{**each._asdict(), "state": each.state.value} for each in loaded],
                "memory": {"budget": ledger.budget, "planned": ledger.planned},
            }
        try:
            order = _ORDERS.decode(body)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise ApiError(400, f'the body must be JSON such as {{"model": "NAME"}}: {error}', code="invalid_json") \
                from None  # fmt: skip
        name = order.get("model")
        if not isinstance(name, str):
            raise ApiError(400, 'the body must name a model: {"model": "NAME"}', param="model", code="invalid_value")
        model = self.find(name)
        if path == "/models/load":
            async with self.manager.lease(model):
                pass
        else:
            await self.manager.unload(model)
        return {"success": True, "model": model.name, "status": {"value": _shown(model.slot.state)}}


def _card(status: ModelStatus) -> dict[str, Any]:
    """Returns the entry of /v1/models. `status` as llama.cpp's router has it."""
    card = ModelCard(id=status.name, created=status.created, root=status.path, max_model_len=status.max_model_len)
    value: dict[str, Any] = {"value": _shown(status.state)}
    if status.failure:
        value.update(failed=True, reason=status.failure)
    return {**msgspec.to_builtins(card), "aliases": list(status.aliases), "status": value}


def _adapter_card(card: dict[str, Any], adapter: LoRAModule) -> dict[str, Any]:
    """Returns the entry of an adapter (LoRA) of a model."""
    parent = adapter.base_model_name or card["id"]
    return {**card, "id": adapter.name, "root": adapter.path, "parent": parent, "aliases": []}


def _engine_name(model: ManagedModel, name: str) -> str:
    """Returns the name that the engine knows for one of a request."""
    found = (model.spec.served_name(each) for each in (name, name.removesuffix(_LATEST)))
    return next((each for each in found if each is not None), model.name)


def _shown(state: ModelState) -> str:
    return (ModelState.UNLOADED if state is ModelState.UNLOADING else state).value


def _with_model(body: bytes, name: str) -> bytes:
    """Returns a body with the name that the engine has in the place of an alias."""
    fields: dict[str, Any] = msgspec.json.decode(body, type=dict[str, Raw])
    return msgspec.json.encode({**fields, "model": name})


async def _wait(event: asyncio.Event) -> None:
    with_timeout = asyncio.ensure_future(event.wait())
    await asyncio.wait([with_timeout], timeout=_GONE_SECONDS)
    with_timeout.cancel()
