"""LLMEngine: vLLM's engine that its caller steps. It is LLM's, without the loop around it."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from quintet.api.base import SteppedHandle
from quintet.api.lora import with_adapters
from quintet.api.weight_updates import ModelLoader
from quintet.chat.prompts import PromptType
from quintet.config import EngineConfig
from quintet.config.schema.unsupported import no_attribute, refuses_unsupported
from quintet.lora.request import LoRARequest
from quintet.outputs import RequestOutput
from quintet.sampling_params import SamplingParams


class LLMEngine(SteppedHandle):
    """Requests in by add_request(), outputs out by step(). Any thread may call it at any time.

    engine = LLMEngine.from_engine_args(EngineArgs(model="bundled"))
    engine.add_request("mine", "Once upon a time", SamplingParams(max_tokens=8))
    while engine.has_unfinished_requests():
        outputs = engine.step()
    """

    _open_ids: set[str]

    def __init__(self, config: EngineConfig) -> None:
        """Raises ValueError or OSError that says what is wrong with a setting, the model or the device."""
        self._begin(config, False)

    def _begin(self, config: EngineConfig, use_tqdm: bool) -> None:
        super()._begin(config, use_tqdm)
        self._open_ids = set()

    @classmethod
    def within(cls, llm: SteppedHandle) -> "LLMEngine":
        """The same engine as another's; each has its own requests."""
        engine = cls.__new__(cls)
        engine._client, engine._shared, engine._open_ids = llm._client, llm._shared, set()
        return engine

    @refuses_unsupported
    def add_request(
        self,
        request_id: str,
        prompt: PromptType,
        params: SamplingParams | None = None,
        *,
        lora_request: LoRARequest | None = None,
        priority: int = 0,
    ) -> str:
        """Queues a prompt; its outputs come from step(), as params.output_kind says. ValueError says what is wrong with
        it, and then nothing was queued."""
        if not isinstance(request_id, str):
            raise ValueError(f"request_id is text, not {type(request_id).__name__}")
        parsed = self._client.parse(prompt)
        if len(parsed) != 1:
            raise ValueError(f"add_request() takes one prompt, not {len(parsed)}; call it once for each")
        parsed = with_adapters(self._client, parsed, lora_request)
        chosen = self.get_default_sampling_params() if params is None else params.clone()
        self._client.compile_grammar(chosen)
        self._shared.call(lambda: self._client.add(request_id, parsed[0], chosen, priority))
        self._open_ids.add(request_id)
        return request_id

    def step(self) -> list[RequestOutput]:
        """One step of the engine -> what it moved of the requests that were added here; empty if nothing runs."""
        if not self._open_ids:
            return []
        outputs = self._shared.step(frozenset(self._open_ids))
        self._open_ids -= {output.request_id for output in outputs if output.finished}
        return outputs

    def has_unfinished_requests(self) -> bool:
        """True if step() has anything to do."""
        return bool(self._open_ids)

    def get_num_unfinished_requests(self) -> int:
        return len(self._open_ids)

    def abort_request(self, request_ids: str | Iterable[str]) -> None:
        """Ends requests, without further outputs; ids that are not running are passed over."""
        ended = self._open_ids & ({request_ids} if isinstance(request_ids, str) else set(request_ids))
        self._open_ids -= ended
        self._shared.abort(ended)

    def get_tokenizer(self) -> Any:
        """transformers' tokenizer object, or None without a tokenizer."""
        return self._client.tokenizer.hf if self._client.tokenizer else None

    @property
    def tokenizer(self) -> Any:
        """The same."""
        return self.get_tokenizer()

    @property
    def engine_core(self) -> "LLMEngine":
        """This engine: vLLM's scripts call save_sharded_state() of it."""
        return self

    model_executor = engine_core

    @property
    def driver_worker(self) -> ModelLoader:
        """The worker by which TRL's colocate mode writes weights."""
        return ModelLoader(lambda method, args: self.collective_rpc(method, args=args))

    if not TYPE_CHECKING:  # a checker shall see what is there

        def __getattr__(self, name: str) -> Any:
            raise no_attribute("LLMEngine", name, dir(LLMEngine))
