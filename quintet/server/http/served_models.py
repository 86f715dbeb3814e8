"""Names that requests may give as their model: the model's own, and those of its adapters (LoRA); what it is."""

import logging
from collections.abc import Sequence

from starlette.requests import HTTPConnection

from quintet.chat.speech import speech_model
from quintet.engine.processes.messages import ADAPTER_TAKEN, LoadLoRA, ServedLoRA
from quintet.hub.model_names import served_name
from quintet.lora.request import LoRAReference
from quintet.lora.resolver import make_resolvers
from quintet.server.backend import Backend, EngineRefusal
from quintet.server.config import ServerConfig
from quintet.server.http.errors import ApiError
from quintet.server.lora_modules import check_adapter_name
from quintet.transcription.model import SpeechModel

logger = logging.getLogger(__name__)

_SHOWN = 20  # names in an error


def adapter_of(http: HTTPConnection) -> LoRAReference | None:
    """Returns the adapter that a request names as its model, once AppState.choose_model() has found it."""
    adapter: LoRAReference | None = http.scope.get("state", {}).get("adapter")
    return adapter


def set_adapter(http: HTTPConnection, adapter: LoRAReference | None) -> None:
    """Has the request answered with that adapter."""
    http.scope.setdefault("state", {})["adapter"] = adapter


class ServedModels:
    """The model's names, and its adapters."""

    def __init__(self, backend: Backend, settings: ServerConfig) -> None:
        """ValueError if an installed resolver cannot be used."""
        self._backend, self._settings = backend, settings
        self._speech: SpeechModel | None = None
        runtime = settings.allow_runtime_lora
        self._resolvers = make_resolvers(settings.lora_cache_dir, settings.lora_hub_repos) if runtime else []

    @property
    def base_names(self) -> tuple[str, ...]:
        """Names of the model itself; answers show the first."""
        return self._settings.served_model_name or (served_name(self._backend.model_info.model),)

    @property
    def adapters(self) -> Sequence[ServedLoRA]:
        return list(self._backend.lora.served.values())

    @property
    def names(self) -> tuple[str, ...]:
        """All that lists show."""
        return (*self.base_names, *self._backend.lora.served)

    @property
    def speech(self) -> SpeechModel | None:
        """The model as one that transcribes, None if it does not; available once it is loaded."""
        if self._speech is None:
            served = self._backend.model_info
            self._speech = speech_model(
                self._backend.tokenizer, served.encoder, served.vocab_size, served.max_model_len
            )
        return self._speech

    def is_base(self, name: str | None) -> bool:
        """Returns whether a name is the model's own: no name is, and so is its path."""
        path = self._backend.model_info.model if not self._settings.served_model_name else None
        return name is None or name == path or name in self.base_names

    async def find(self, name: str | None) -> LoRAReference | None:
        """Returns the adapter of that name; None if it is the model's own. Asks the resolvers for an unknown name.

        Raises ApiError 404 for a name that is not served.
        """
        if name is None or self.is_base(name):
            return None
        found = self._backend.lora.served.get(name)
        if found is None and self._resolvers and await self._resolve(name):
            found = self._backend.lora.served.get(name)
        if found is not None:
            return found.reference
        names = self.names
        more = f" and {len(names) - _SHOWN} more (GET /v1/models)" if len(names) > _SHOWN else ""
        raise ApiError(
            404, f"the model {name[:200]!r} is not here; this server has {', '.join(names[:_SHOWN])}{more}",
            param="model", code="model_not_found",
        )  # fmt: skip

    async def _resolve(self, name: str) -> bool:
        """Has the adapter loaded that a resolver finds -> whether there is one. ApiError says what is wrong with it."""
        try:
            check_adapter_name(name)
        except ValueError:
            return False
        for resolver in self._resolvers:
            try:
                request = await resolver.resolve_lora(self._backend.model_info.model, name)
            except Exception:  # a package's own code
                logger.exception("the LoRA resolver %s failed", type(resolver).__name__)
                continue
            if request is not None:
                await self._load_resolved(name, LoadLoRA(name, request.lora_path, request.base_model_name))
                return True
        return False

    async def _load_resolved(self, name: str, work: LoadLoRA) -> None:
        try:
            await self._backend.lora.load(work)
        except EngineRefusal as error:
            if error.kind != ADAPTER_TAKEN:  # else another request had it loaded meanwhile
                why = str(error).replace(work.path, name)  # the caller knows no path here
                raise ApiError(
                    400, f"the adapter {name!r} cannot be served: {why}", param="model", code="invalid_adapter"
                ) from None
