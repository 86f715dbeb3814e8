"""LLM: the offline API. The engine runs in the caller's process, and starts fast."""

import functools
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from quintet.api.arguments import LLMArguments
from quintet.api.base import SteppedHandle
from quintet.api.beam_search import search as search_beams
from quintet.api.chat_call import AnswerParser, ChatCall, run_without_loop
from quintet.api.llm_engine import LLMEngine
from quintet.api.lora import LoRARequests, with_adapters
from quintet.api.pooling import PoolingMethods
from quintet.beam_search import BeamSearchOutput
from quintet.chat.prepare import PreparedChat
from quintet.chat.prompts import Prompt, PromptType
from quintet.config import EngineConfig
from quintet.config.schema.docs import accepts_fields_of
from quintet.config.schema.unsupported import no_attribute, refuses_unsupported
from quintet.outputs import RequestOutput
from quintet.sampling_params import BeamSearchParams, RequestOutputKind, SamplingParams

Params = SamplingParams | Sequence[SamplingParams] | None


class LLM(LLMArguments, PoolingMethods, SteppedHandle):
    """A model, ready to generate. Keyword arguments are EngineConfig's fields. Any thread may call it at any time.

    llm = LLM("bundled")
    outputs = llm.generate(["Once upon a time"], SamplingParams(max_tokens=64))
    print(outputs[0].outputs[0].text)
    """

    if not TYPE_CHECKING:  # a checker shall see each setting by name: see arguments.pyi

        @accepts_fields_of(EngineConfig)
        def __init__(self, model=None, *, use_tqdm: bool = True, **kwargs):
            """Raises ValueError or OSError that says what is wrong with an argument, the model or the device."""
            self._open(model, use_tqdm, kwargs)

    def _begin(self, config: EngineConfig, use_tqdm: bool) -> None:
        super()._begin(config, use_tqdm)
        self._enqueued: dict[str, AnswerParser | None] = {}  # requests that wait_for_completion() has not returned

    @functools.cached_property
    def llm_engine(self) -> LLMEngine:
        """The same engine as vLLM's examples step it."""
        return LLMEngine.within(self)

    @refuses_unsupported
    def generate(
        self,
        prompts: PromptType | Sequence[PromptType],
        sampling_params: Params = None,
        *,
        use_tqdm: bool = True,
        lora_request: LoRARequests = None,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Completes text, lists of token ids, {"prompt": ...}, {"prompt_token_ids": ...} or, with enable_prompt_embeds,
        {"prompt_embeds": tensor [tokens, hidden]}: one, or a list of them.

        The results are in the order of the prompts. One SamplingParams serves all, or one is given for each. If any
        prompt or parameter is wrong, ValueError says which, and nothing is run. What fails later ends its own request
        and raises nothing: that completion has finish_reason "error" and says why in `error`. `lora_request`: the
        adapter of all prompts, or one or None for each.
        """
        parsed = with_adapters(self._client, self._client.parse(prompts), lora_request)
        return self._run(parsed, sampling_params, use_tqdm, priority)

    @refuses_unsupported
    def chat(
        self,
        messages: Any,
        sampling_params: Params = None,
        *,
        use_tqdm: bool = True,
        lora_request: LoRARequests = None,
        **template: Any,
    ) -> list[RequestOutput]:
        """Answers a conversation, or each of a list of them.

        `template` takes what the chat template is to know: tools, chat_template, chat_template_kwargs,
        add_generation_prompt, continue_final_message. And how calls and thoughts are: tool_choice ("auto", "none",
        "required", or one by name), parallel_tool_calls, and by name tool_call_parser and reasoning_parser ("none": no
        such), which else are found by the template. Completions have their reasoning, content, tool_calls and message
        beside the text, in which the parsers' markers stand, also where they are special tokens.
        """
        chats = self._prepare(messages, sampling_params, template)
        prompts = with_adapters(self._client, [each.prompt for each in chats], lora_request)
        outputs = self._run(prompts, [each.params for each in chats], use_tqdm, None)
        return [
            AnswerParser(chat.output_format, whole=True).take(output)
            for chat, output in zip(chats, outputs, strict=True)
        ]

    @refuses_unsupported
    def enqueue(
        self,
        prompts: PromptType | Sequence[PromptType],
        sampling_params: Params = None,
        lora_request: LoRARequests = None,
        priority: Sequence[int] | None = None,
        use_tqdm: bool = True,
    ) -> list[str]:
        """Queues what generate() would run, and returns the ids of the requests. wait_for_completion() runs them.

        If any prompt or parameter is wrong, ValueError says which, and nothing is queued. No bar is shown.
        """
        parsed = with_adapters(self._client, self._client.parse(prompts), lora_request)
        return self._enqueue(parsed, sampling_params, priority, [None] * len(parsed))

    @refuses_unsupported
    def enqueue_chat(
        self, messages: Any, sampling_params: Params = None, *, lora_request: LoRARequests = None, **template: Any
    ) -> list[str]:
        """Queues what chat() would run, as enqueue() does."""
        chats = self._prepare(messages, sampling_params, template)
        prompts = with_adapters(self._client, [each.prompt for each in chats], lora_request)
        parsers = [AnswerParser(each.output_format, whole=True) for each in chats]
        return self._enqueue(prompts, [each.params for each in chats], None, parsers)

    def wait_for_completion(self, output_type: Any = None, *, use_tqdm: bool = True) -> list[RequestOutput]:
        """Runs all requests that were enqueued -> their outputs, in the order in which they were. `output_type` is
        vLLM's: outputs are RequestOutput."""
        kinds = output_type if isinstance(output_type, tuple) else (output_type,)
        if output_type is not None and RequestOutput not in kinds:
            raise ValueError(f"output_type is {repr(output_type)[:80]}; enqueued requests have RequestOutput")
        enqueued, self._enqueued = self._enqueued, {}
        found = self._collect(list(enqueued), use_tqdm)
        parsers = enqueued.values()
        return [output if each is None else each.take(output) for each, output in zip(parsers, found, strict=True)]

    @refuses_unsupported
    def stream(
        self,
        prompts: PromptType | Sequence[PromptType],
        sampling_params: Params = None,
        *,
        lora_request: LoRARequests = None,
    ) -> Iterator[RequestOutput]:
        """generate() as it comes: each output holds what is new. Leaving the loop early ends the requests.

        They start when the first output is asked for. Several streams, and other calls between, take turns.
        """
        parsed = with_adapters(self._client, self._client.parse(prompts), lora_request)
        return self._stream(parsed, sampling_params)

    @refuses_unsupported
    def stream_chat(
        self, messages: Any, sampling_params: Params = None, *, lora_request: LoRARequests = None, **template: Any
    ) -> Iterator[RequestOutput]:
        """chat() as it comes: each completion's `events` are what is new of its thoughts, words and calls."""
        chats = self._prepare(messages, sampling_params, template)
        parsers = [AnswerParser(each.output_format) for each in chats]
        prompts = with_adapters(self._client, [each.prompt for each in chats], lora_request)
        return self._stream(prompts, [each.params for each in chats], parsers)

    @refuses_unsupported
    def beam_search(
        self,
        prompts: PromptType | Sequence[PromptType],
        params: BeamSearchParams,
        *,
        lora_request: LoRARequests = None,
    ) -> list[BeamSearchOutput]:
        """The likeliest outputs of each prompt, best first."""
        parsed = with_adapters(self._client, self._client.parse(prompts), lora_request)
        return [search_beams(self._shared, prompt, params) for prompt in parsed]

    def get_tokenizer(self) -> Any:
        """transformers' tokenizer object."""
        return self._tokenizer().hf

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    if not TYPE_CHECKING:  # a checker shall see what is there

        def __getattr__(self, name: str) -> Any:
            raise no_attribute("LLM", name, dir(LLM))

    def _tokenizer(self) -> Any:
        if self._client.tokenizer is None:
            raise ValueError("this LLM was started with skip_tokenizer_init=True; start it without for text and chats")
        return self._client.tokenizer

    def _prepare(self, messages: Any, params: Params, options: dict[str, Any]) -> list[PreparedChat]:
        self._client.input_processor.check_generates()
        config = self._client.config.structured_outputs_config
        call = ChatCall(self._tokenizer(), self._client.family, messages, options, config, self._client.media)
        return run_without_loop(call.prepare(self._params(params, len(call))))

    def _run(
        self, prompts: list[Prompt], params: Params, use_tqdm: bool, priority: Sequence[int] | None
    ) -> list[RequestOutput]:
        final = _with_output_kind(self._params(params, len(prompts)), RequestOutputKind.FINAL_ONLY)
        ids = [self._client.next_id() for _ in prompts]
        try:
            self._add(ids, prompts, final, priority)
            return self._collect(ids, use_tqdm)
        except BaseException:
            self._shared.abort(ids)  # refused or interrupted: no caller waits for them any more
            raise

    def _enqueue(
        self, prompts: list[Prompt], params: Params, priority: Sequence[int] | None, parsers: Sequence[Any]
    ) -> list[str]:
        """Queues requests for wait_for_completion() -> their ids."""
        final = _with_output_kind(self._params(params, len(prompts)), RequestOutputKind.FINAL_ONLY)
        ids = [self._client.next_id() for _ in prompts]
        try:
            self._add(ids, prompts, final, priority)
        except BaseException:
            self._shared.abort(ids)
            raise
        self._enqueued.update(zip(ids, parsers, strict=True))
        return ids

    def _collect(self, ids: list[str], use_tqdm: bool) -> list[RequestOutput]:
        """Runs requests that were added -> the last output of each."""
        open_ids, finished = set(ids), dict[str, RequestOutput]()
        try:
            with _ProgressBar(len(ids), use_tqdm) as bar:
                while open_ids:
                    for output in self._shared.receive(open_ids):  # FINAL_ONLY: each is a request's last
                        open_ids.remove(output.request_id)
                        finished[output.request_id] = output
                        bar.finish(output)
        finally:
            self._shared.abort(open_ids)  # refused or interrupted: no caller waits for them any more
        return [finished[request_id] for request_id in ids]

    def _stream(
        self, prompts: list[Prompt], params: Params, hearings: Sequence[AnswerParser] = ()
    ) -> Iterator[RequestOutput]:
        deltas = _with_output_kind(self._params(params, len(prompts)), RequestOutputKind.DELTA)
        ids = [self._client.next_id() for _ in prompts]
        open_ids, heard = set(ids), dict(zip(ids, hearings, strict=False))  # chats alone are taken apart
        try:
            self._add(ids, prompts, deltas, None)
            while open_ids:
                for output in self._shared.receive(open_ids):
                    if output.finished:
                        open_ids.remove(output.request_id)
                    hearing = heard.get(output.request_id)
                    yield output if hearing is None else hearing.take(output, delta=True)
        finally:
            self._shared.abort(open_ids)

    def _add(
        self, ids: list[str], prompts: list[Prompt], params: list[SamplingParams], priority: Sequence[int] | None
    ) -> None:
        """All of them before the next step. If one is wrong, the caller takes back those before it."""
        ranks = [0] * len(prompts) if priority is None else list(priority)
        if len(ranks) != len(prompts):
            raise ValueError(f"priority has {len(ranks)} entries for {len(prompts)} prompts; give one for each")
        self._check_not_waiting()
        for each in {id(each): each for each in params}.values():
            self._client.compile_grammar(each)  # other threads step on

        def add() -> None:
            for request in zip(ids, prompts, params, ranks, strict=True):
                self._client.add(*request)

        self._shared.call(add)

    def _params(self, params: Params, count: int) -> list[SamplingParams]:
        if params is None:
            return [self.get_default_sampling_params() for _ in range(count)]
        if isinstance(params, SamplingParams):
            return [params] * count
        if isinstance(params, Mapping) or not isinstance(params, Sequence):
            raise ValueError(f"sampling_params is a SamplingParams or a list of them, not {type(params).__name__}")
        if len(params) != count:
            raise ValueError(
                f"sampling_params has {len(params)} entries for {count} prompts; give one, or one for each"
            )
        return list(params)


def _with_output_kind(params: list[SamplingParams], kind: RequestOutputKind) -> list[SamplingParams]:
    """Copies, so that the caller's own objects stay as they are."""
    copies = {id(each): each.clone() for each in params}
    for copied in copies.values():
        copied.output_kind = kind
    return [copies[id(each)] for each in params]


class _ProgressBar:
    """Progress over requests, with tokens per second."""

    def __init__(self, total: int, shown: bool) -> None:
        self._bar = tqdm(total=total, desc="Generating", unit="request", disable=not shown, dynamic_ncols=True)
        self._start, self._tokens = time.perf_counter(), 0

    def finish(self, output: RequestOutput) -> None:
        self._tokens += sum(len(completion.token_ids) for completion in output.outputs)
        rate = self._tokens / max(time.perf_counter() - self._start, 1e-9)
        self._bar.set_postfix_str(f"{rate:.1f} tokens/s", refresh=False)
        self._bar.update()

    def __enter__(self) -> "_ProgressBar":
        return self

    def __exit__(self, *exception: object) -> None:
        self._bar.close()
