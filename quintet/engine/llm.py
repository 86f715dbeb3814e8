"""LLM: the offline API. The engine runs in the caller's process, and starts fast."""

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tqdm import tqdm

from quintet.config import EngineConfig
from quintet.engine import beam
from quintet.engine.chat import render_chats
from quintet.engine.client import Client
from quintet.engine.prompts import Prompt
from quintet.outputs import RequestOutput
from quintet.sampling_params import BeamSearchParams, RequestOutputKind, SamplingParams

Params = SamplingParams | Sequence[SamplingParams] | None


class LLM:
    """A model, ready to generate. Keyword arguments are EngineConfig's fields.

    llm = LLM("bundled")
    outputs = llm.generate(["Once upon a time"], SamplingParams(max_tokens=64))
    print(outputs[0].outputs[0].text)
    """

    def __init__(self, model: str | None = None, *, use_tqdm: bool = True, **kwargs: Any) -> None:
        """Raises ValueError or OSError that says what is wrong with an argument, the model or the device."""
        if model is not None:
            kwargs["model"] = model
        self._client = Client(EngineConfig.from_kwargs(**kwargs), use_tqdm)

    @property
    def config(self) -> EngineConfig:
        """As the platform settled it."""
        return self._client.config

    def generate(
        self,
        prompts: Any,
        sampling_params: Params = None,
        *,
        use_tqdm: bool = True,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Completes text, lists of token ids, {"prompt": ...}, {"prompt_token_ids": ...} or, with enable_prompt_embeds,
        {"prompt_embeds": tensor [tokens, hidden]}: one, or a list of them.

        The results are in the order of the prompts. One SamplingParams serves all, or one is given for each. If any
        prompt or parameter is wrong, ValueError says which, and nothing is run.
        """
        parsed = self._client.parse(prompts)
        return self._run(parsed, sampling_params, use_tqdm, priority)

    def chat(
        self, messages: Any, sampling_params: Params = None, *, use_tqdm: bool = True, **template: Any
    ) -> list[RequestOutput]:
        """Answers a conversation, or each of a list of them.

        `template` takes what the chat template is to know: tools, chat_template, chat_template_kwargs,
        add_generation_prompt, continue_final_message.
        """
        return self._run(render_chats(self._tokenizer(), messages, **template), sampling_params, use_tqdm, None)

    def stream(self, prompts: Any, sampling_params: Params = None) -> Iterator[RequestOutput]:
        """generate() as it comes: each output holds what is new. Leaving the loop early ends the requests.

        They start when the first output is asked for. Several streams, and other calls between, take turns.
        """
        parsed = self._client.parse(prompts)
        return self._stream(parsed, sampling_params)

    def stream_chat(self, messages: Any, sampling_params: Params = None, **template: Any) -> Iterator[RequestOutput]:
        """chat() as it comes."""
        return self._stream(render_chats(self._tokenizer(), messages, **template), sampling_params)

    def beam_search(self, prompts: Any, params: BeamSearchParams) -> list[beam.BeamSearchOutput]:
        """The likeliest outputs of each prompt, best first."""
        parsed = self._client.parse(prompts)
        return [beam.search(self._client, prompt, params) for prompt in parsed]

    def get_tokenizer(self) -> Any:
        """transformers' tokenizer object."""
        return self._tokenizer().hf

    def get_default_sampling_params(self) -> SamplingParams:
        """What the model's generation config asks for; a fresh copy."""
        return self._client.admission.default_params()

    def get_metrics(self) -> dict[str, float]:
        """Numbers of the engine since its start: see quintet.engine.engine.Stats."""
        return self._client.metrics()

    def reset_prefix_cache(self) -> None:
        """Forgets cached beginnings, as after a change of weights."""
        self._client.engine.reset_prefix_cache()

    def reload_weights(self, path: str | None = None) -> None:
        """Takes over the weights of a folder or hub id, or of the engine's own folder as it is now, while it runs.

        They are of the same model, in the same form. Nothing is compiled or recorded anew; cached beginnings are
        forgotten, and running requests go on with the tokens that they have. ValueError: nothing has changed.
        """
        self._client.reload_weights(path)

    def sleep(self, level: int = 1) -> None:
        """Gives the device's memory back until wake_up(). Level 1 puts weights aside on the host, level 2 drops them.

        Cached beginnings are forgotten. ValueError while requests run; NotImplementedError if the platform cannot.
        """
        self._client.engine.sleep(level)

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Ends the sleep; after level 2 the weights are read again, from the folder as it is now.

        If there is no room any more, MemoryError says what is missing, and the call may be repeated. `tags` may name
        what sleeps, weights and kv_cache: both, or none.
        """
        self._client.wake_up(tags)

    def is_sleeping(self) -> bool:
        """Whether it was put to sleep, and takes no requests."""
        return bool(self._client.engine.asleep)

    def close(self) -> None:
        """Ends what the engine keeps running besides memory."""
        self._client.close()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _tokenizer(self) -> Any:
        if self._client.tokenizer is None:
            raise ValueError("this LLM was started with skip_tokenizer_init=True; start it without for text and chats")
        return self._client.tokenizer

    def _run(
        self, prompts: list[Prompt], params: Params, use_tqdm: bool, priority: Sequence[int] | None
    ) -> list[RequestOutput]:
        ids = self._add(prompts, _with_kind(self._params(params, len(prompts)), RequestOutputKind.FINAL_ONLY), priority)
        open_ids, finished = set(ids), dict[str, RequestOutput]()
        try:
            with _Bar(len(ids), use_tqdm) as bar:
                while open_ids:
                    for output in self._client.receive(open_ids):  # FINAL_ONLY: each is a request's last
                        open_ids.remove(output.request_id)
                        finished[output.request_id] = output
                        bar.finish(output)
        finally:
            self._client.abort(open_ids)  # interrupted: nobody waits for them any more
        return [finished[request_id] for request_id in ids]

    def _stream(self, prompts: list[Prompt], params: Params) -> Iterator[RequestOutput]:
        deltas = _with_kind(self._params(params, len(prompts)), RequestOutputKind.DELTA)
        open_ids = set(self._add(prompts, deltas, None))
        try:
            while open_ids:
                for output in self._client.receive(open_ids):
                    if output.finished:
                        open_ids.remove(output.request_id)
                    yield output
        finally:
            self._client.abort(open_ids)

    def _add(self, prompts: list[Prompt], params: list[SamplingParams], priority: Sequence[int] | None) -> list[str]:
        """All or none: a wrong one takes back those before it."""
        ranks = [0] * len(prompts) if priority is None else list(priority)
        if len(ranks) != len(prompts):
            raise ValueError(f"priority has {len(ranks)} entries for {len(prompts)} prompts; give one for each")
        added: list[str] = []
        try:
            for prompt, each, rank in zip(prompts, params, ranks, strict=True):
                added.append(self._client.next_id())  # before it is there: Ctrl-C may come in between
                self._client.add(added[-1], prompt, each, rank)
        except BaseException:  # Ctrl-C too
            self._client.abort(added)
            raise
        return added

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


def _with_kind(params: list[SamplingParams], kind: RequestOutputKind) -> list[SamplingParams]:
    """Copies, so that the caller's own objects stay as they are."""
    copies = {id(each): each.clone() for each in params}
    for copied in copies.values():
        copied.output_kind = kind
    return [copies[id(each)] for each in params]


class _Bar:
    """Progress over requests, with tokens per second."""

    def __init__(self, total: int, shown: bool) -> None:
        self._bar = tqdm(total=total, desc="Generating", unit="request", disable=not shown, dynamic_ncols=True)
        self._start, self._tokens = time.perf_counter(), 0

    def finish(self, output: RequestOutput) -> None:
        self._tokens += sum(len(completion.token_ids) for completion in output.outputs)
        rate = self._tokens / max(time.perf_counter() - self._start, 1e-9)
        self._bar.set_postfix_str(f"{rate:.1f} tokens/s", refresh=False)
        self._bar.update()

    def __enter__(self) -> "_Bar":
        return self

    def __exit__(self, *exception: object) -> None:
        self._bar.close()
