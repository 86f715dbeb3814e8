"""The calls of LLM that give numbers: encode, embed, classify, reward."""

from collections.abc import Mapping, Sequence
from typing import Any

from tqdm import tqdm

from quintet.api.lora import LoRARequests, with_adapters
from quintet.api.thread_sharing import SharedClient
from quintet.chat.prompts import Prompt, PromptType
from quintet.config.schema.unsupported import refuses_unsupported
from quintet.engine.client import EngineClient
from quintet.engine.pooling.input_processor import PoolingBounds
from quintet.engine.pooling.scoring import PairLimits, PairPrompt, PairTemplate, compare, pairs
from quintet.lora.request import LoRARequest
from quintet.outputs import RequestOutput
from quintet.pooling_outputs import (
    ClassificationOutput,
    ClassificationRequestOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    PoolingOutput,
    PoolingRequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
    answered,
    scored,
)
from quintet.pooling_params import PoolingParams

Prompts = PromptType | Sequence[PromptType]
Params = PoolingParams | Sequence[PoolingParams] | None


class PoolingMethods:
    """Methods of LLM for pooling models. Each call takes one prompt or a list, and answers in its order.

    If any prompt or parameter is wrong, ValueError says which, and nothing is run. A text that fails later raises
    Unanswered: its numbers are not there.
    """

    _client: EngineClient
    _shared: SharedClient

    @refuses_unsupported
    def encode(  # noqa: PLR0913  # vLLM's
        self,
        prompts: Prompts,
        pooling_params: Params = None,
        *,
        pooling_task: str | None = None,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: bool = True,
        lora_request: LoRARequests = None,
        priority: Sequence[int] | None = None,
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        """Returns the numbers of each text for any task; the default is the model's first task."""
        params = self._pooling(prompts, pooling_params, pooling_task, truncate_prompt_tokens)
        return [
            answered(each, PoolingOutput) for each in self._encode(prompts, params, use_tqdm, lora_request, priority)
        ]

    @refuses_unsupported
    def embed(
        self,
        prompts: Prompts,
        *,
        pooling_params: Params = None,
        truncate_prompt_tokens: int | None = None,
        prompt_name: str | None = None,
        use_tqdm: bool = True,
        lora_request: LoRARequests = None,
    ) -> list[EmbeddingRequestOutput]:
        """A vector of each text. `prompt_name`: of the model's prompts (config_sentence_transformers.json), which is
        put before each; its default if none is named, "" for none."""
        params = self._pooling(prompts, pooling_params, "embed", truncate_prompt_tokens)
        named = _with_prompt(prompts, self._bounds, prompt_name)
        return [answered(each, EmbeddingOutput) for each in self._encode(named, params, use_tqdm, lora_request)]

    @refuses_unsupported
    def classify(
        self,
        prompts: Prompts,
        *,
        pooling_params: Params = None,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: bool = True,
        lora_request: LoRARequests = None,
    ) -> list[ClassificationRequestOutput]:
        """Returns how likely each class of the model is for each text."""
        params = self._pooling(prompts, pooling_params, "classify", truncate_prompt_tokens)
        return [answered(each, ClassificationOutput) for each in self._encode(prompts, params, use_tqdm, lora_request)]

    @refuses_unsupported
    def reward(
        self,
        prompts: Prompts,
        *,
        pooling_params: Params = None,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: bool = True,
        lora_request: LoRARequests = None,
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        """Returns a reward model's numbers for each token of each text: [tokens, numbers]."""
        params = self._pooling(prompts, pooling_params, "reward", truncate_prompt_tokens)
        return [answered(each, PoolingOutput) for each in self._encode(prompts, params, use_tqdm, lora_request)]

    @refuses_unsupported
    def score(  # noqa: PLR0913  # vLLM's
        self,
        data_1: str | Sequence[str],
        data_2: str | Sequence[str],
        /,
        *,
        truncate_prompt_tokens: int | None = None,
        pooling_params: PoolingParams | None = None,
        score_template: str | None = None,
        use_tqdm: bool = True,
        lora_request: LoRARequest | None = None,
    ) -> list[ScoringRequestOutput]:
        """Returns scores of pairs of texts: one text with each of several, or each with the one in its place.

        A cross-encoder reads both at once, as its tokenizer or `score_template` joins them: Jinja, over messages of the
        roles query and document. Of an embedding model it is the cosine, or the similarity that its files name; where
        each token has a vector, the sum of the best products (MaxSim).
        """
        texts = pairs(*([each] if isinstance(each, str) else list(each) for each in (data_1, data_2)))
        task = next((each for each in ("score", "embed", "token_embed") if each in self._bounds.tasks), "score")
        params = self._bounds.resolve_params(pooling_params, task)
        if truncate_prompt_tokens is not None:
            params.truncate_prompt_tokens = truncate_prompt_tokens
            params = self._bounds.resolve_params(params)
        if task == "score":
            if self._client.tokenizer is None:
                raise ValueError("this LLM was started with skip_tokenizer_init=True; start it without to score texts")
            template = PairTemplate(
                self._client.tokenizer, score_template, self._bounds.truncates_left, self._bounds.has_separator
            )
            joined = [template.prompt(*pair, self._cuts(params)) for pair in texts]
            return self._crossed(joined, params, use_tqdm, lora_request)
        if score_template is not None:
            raise ValueError("score_template joins two texts, which this model embeds one by one; leave it out")
        return self._compared(texts, params, use_tqdm, lora_request)

    def _cuts(self, params: PoolingParams) -> PairLimits:
        keep = params.truncate_prompt_tokens
        return PairLimits(pair=self._bounds.max_model_len if keep == -1 else keep)

    def _crossed(
        self, joined: Sequence[PairPrompt], params: PoolingParams, use_tqdm: bool, lora_request: LoRARequests
    ) -> list[ScoringRequestOutput]:
        prompts = [Prompt(each.token_ids, types=each.types) for each in joined]
        prompts = with_adapters(self._client, prompts, lora_request)
        outputs = self._run_pooled(prompts, [params] * len(prompts), use_tqdm)
        return [answered(each, lambda data: ScoringOutput(float(data.reshape(-1)[0]))) for each in outputs]

    def _compared(
        self, texts: Sequence[tuple[str, str]], params: PoolingParams, use_tqdm: bool, lora_request: LoRARequests
    ) -> list[ScoringRequestOutput]:
        """Each text is embedded once, however many it is compared with."""
        query, document = self._bounds.score_prompts(params.task or "embed")
        texts = [(query + first, document + second) for first, second in texts]
        places = {text: place for place, text in enumerate(dict.fromkeys(text for pair in texts for text in pair))}
        prompts = with_adapters(self._client, self._client.parse(list(places)), lora_request)
        outputs = self._run_pooled(prompts, [params] * len(prompts), use_tqdm)
        vectors = [answered(each, PoolingOutput) for each in outputs]
        found = []
        for first, second in ((vectors[places[a]], vectors[places[b]]) for a, b in texts):
            ids = [*first.prompt_token_ids, *second.prompt_token_ids]
            vectors_of = (first.outputs.data, second.outputs.data)
            score = compare(self._bounds, params.task or "embed", *vectors_of, second.prompt_token_ids)
            found.append(scored(f"{first.request_id}_{second.request_id}", score, ids, first.num_cached_tokens))
        return found

    @property
    def pooling_bounds(self) -> PoolingBounds:
        """Limits of requests: tasks, max_model_len, width of an embedding. ValueError if it generates text."""
        return self._bounds

    @property
    def _bounds(self) -> PoolingBounds:
        return self._client.input_processor.pooling_bounds

    def _pooling(self, prompts: Prompts, params: Params, task: str | None, keep: int | None) -> list[PoolingParams]:
        """Settled, one for each prompt."""
        bounds, count = self._bounds, _num_prompts(prompts)
        given = [params] * count if isinstance(params, PoolingParams) or params is None else list(params)
        if len(given) != count:
            raise ValueError(f"pooling_params has {len(given)} entries for {count} prompts; give one, or one for each")
        settled: dict[int, PoolingParams] = {}
        for each in given:
            if id(each) not in settled:
                if each is not None and not isinstance(each, PoolingParams):
                    raise ValueError(f"pooling_params is a PoolingParams or a list of them, not {type(each).__name__}")
                own = bounds.resolve_params(each, task)
                if keep is not None:
                    own.truncate_prompt_tokens = keep
                    own = bounds.resolve_params(own)
                settled[id(each)] = own
        return [settled[id(each)] for each in given]

    def _encode(
        self,
        prompts: Prompts,
        params: Sequence[PoolingParams],
        use_tqdm: bool,
        lora_request: LoRARequests,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        parsed = with_adapters(self._client, self._client.parse(prompts), lora_request)
        return self._run_pooled(parsed, params, use_tqdm, priority)

    def _run_pooled(
        self,
        parsed: Sequence[Prompt],
        params: Sequence[PoolingParams],
        use_tqdm: bool,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        ranks = [0] * len(parsed) if priority is None else list(priority)
        if len(ranks) != len(parsed):
            raise ValueError(f"priority has {len(ranks)} entries for {len(parsed)} prompts; give one for each")
        ids = [self._client.next_id() for _ in parsed]
        open_ids, finished = set(ids), dict[str, RequestOutput]()

        def add() -> None:
            for request in zip(ids, parsed, params, ranks, strict=True):
                self._client.add(*request, settled=True)

        try:
            self._shared.call(add)
            with tqdm(total=len(ids), desc="Encoding", unit="text", disable=not use_tqdm, dynamic_ncols=True) as bar:
                while open_ids:
                    for output in self._shared.receive(open_ids):
                        open_ids.remove(output.request_id)
                        finished[output.request_id] = output
                        bar.update()
        finally:
            if open_ids:  # refused or interrupted: no caller waits for them any more
                self._shared.abort(open_ids)
        return [finished[request_id] for request_id in ids]


def _num_prompts(prompts: Any) -> int:
    several = isinstance(prompts, (list, tuple)) and not (prompts and isinstance(prompts[0], int))
    return len(prompts) if several else 1


def _with_prompt(prompts: Any, bounds: PoolingBounds, name: str | None) -> Any:
    """Texts with the model's prompt before them; token ids stay as they are."""
    name = bounds.default_prompt if name is None else name
    if not name:
        return prompts
    if name not in bounds.prompts:
        known = ", ".join(bounds.prompts) or "none"
        raise ValueError(f"prompt_name {name!r} is not among the model's prompts: {known}")
    before = bounds.prompts[name]

    def prompted(prompt: Any) -> Any:
        if isinstance(prompt, str):
            return before + prompt
        if isinstance(prompt, Mapping) and isinstance(prompt.get("prompt"), str):
            return {**prompt, "prompt": prompted(prompt["prompt"])}
        return prompt

    several = isinstance(prompts, (list, tuple))
    return [prompted(each) for each in prompts] if several else prompted(prompts)
