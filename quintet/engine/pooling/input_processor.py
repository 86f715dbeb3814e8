"""Checks what is asked of a text's numbers against the model, and makes the engine's request of it. Needs no engine."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from quintet.chat.prompts import Prompt
from quintet.engine.request import EACH_TOKEN, FIRST_TOKEN, LAST_TOKEN, CoreRequest
from quintet.pooling_params import OF_TOKENS, PoolingParams
from quintet.sampling_params import ParameterError, RequestOutputKind, SamplingParams
from quintet.tokenizers.tokenizer import Tokenizer

_POOLED_ROWS = {"CLS": FIRST_TOKEN, "LAST": LAST_TOKEN}


def _no_sampling() -> SamplingParams:
    return SamplingParams(max_tokens=1, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY)


@dataclass(frozen=True)
class PoolingBounds:
    """Limits of pooling requests, from a model's files and its user. Plain data: it crosses processes."""

    tasks: Sequence[str]  # the first is the default
    max_model_len: int
    width: int  # numbers of an embedding
    sequence: str  # CLS, LAST or MEAN
    matryoshka_dims: Sequence[int] | bool = False  # which numbers of an embedding may stand for all; True: any
    chunks_long_texts: bool = False  # whether longer texts are embedded in pieces,
    max_embed_len: int | None = None  # of so many tokens at most
    start_token_ids: Sequence[int] = ()  # special tokens at the start of each text,
    end_token_ids: Sequence[int] = ()  # and at its end, which a cut leaves there
    truncates_left: bool = False  # a longer text loses its beginning
    prompts: dict[str, str] = field(default_factory=dict)  # by name: put before a text
    default_prompt: str | None = None
    lowercase: bool = False  # texts are brought to lower case first
    similarity: str = "cosine"  # of two embeddings in a score
    skiplist_words: Sequence[str] = ()  # tokens of documents that count for no score (late interaction)
    skiplist_ids: Sequence[int] = ()  # of the same, once the tokenizer is there
    expands_queries: bool = False  # the model's scores are of queries with mask tokens added (late interaction)
    has_separator: bool = True  # a pair is made by the tokenizer's template of pairs, and not one text behind the other
    padded_len: int = 0  # texts are filled up to so many tokens, as in training, and those count; 0: they are not
    pad_token_id: int = 0
    sampling_params: SamplingParams = field(default_factory=_no_sampling)  # of requests that draw nothing

    def with_special_tokens(self, tokenizer: Tokenizer | None) -> "PoolingBounds":
        """Returns the limits with the tokens that a tokenizer puts around each text."""
        if tokenizer is None:
            return self
        bare, whole = (tokenizer.encode("a", add_special_tokens=special) for special in (False, True))
        place = next((at for at in range(len(whole)) if whole[at : at + len(bare)] == bare), len(whole))
        skipped = [token_id for word in self.skiplist_words if (token_id := tokenizer.token_id(word)) is not None]
        ends = whole[place + len(bare) :]
        padding = tokenizer.token_id(str(tokenizer.special_tokens.get("pad_token")))
        found = replace(self, start_token_ids=whole[:place], end_token_ids=ends, skiplist_ids=skipped)
        return found if padding is None else replace(found, pad_token_id=padding)

    def score_prompts(self, task: str) -> tuple[str, str]:
        """Returns the prompts before queries and documents that are embedded for a score. ValueError for a ColBERT
        whose queries are expanded."""
        if task == "token_embed" and self.expands_queries:
            raise ValueError(
                "a score of this model is of queries expanded by mask tokens (query_expansion, do_query_expansion of "
                "config_sentence_transformers.json), which is not computed here; set do_query_expansion to false "
                "there, or call encode() for token_embed and compare the vectors"
            )
        names: tuple[str, str] = ("query", "document") if task == "token_embed" else ("", "")
        query, document = (self.prompts.get(self.default_prompt or name, "") for name in names)
        return query, document

    def resolve_params(self, params: PoolingParams | None, task: str | None = None) -> PoolingParams:
        """Returns the parameters with their task set. ParameterError if that fails."""
        params = PoolingParams() if params is None else params.clone()
        params.__post_init__()  # it may have been changed since it was made
        if task is not None and params.task not in (None, task):
            raise ParameterError("task", f"is {params.task!r} in the pooling parameters, and this call is for {task!r}")
        params.task = task or params.task or self.tasks[0]
        if params.task not in self.tasks:
            hint = "; use runner='pooling' with convert=" + {"embed": "'embed'", "token_embed": "'embed'"}.get(
                params.task, "'classify'"
            )
            raise ParameterError(
                "task", f"{params.task!r} is not what this model gives: it has {', '.join(self.tasks)}{hint}"
            )
        self._check(params)
        return params

    def _check(self, params: PoolingParams) -> None:
        if params.dimensions is not None:
            if params.task not in ("embed", "token_embed"):
                raise ParameterError("dimensions", f"are of embeddings, and {params.task} gives none; leave it out")
            self._check_dimensions(params.dimensions)
        for name in ("step_tag_id", "returned_token_ids"):
            if getattr(params, name) is not None and params.task not in OF_TOKENS:
                raise ParameterError(name, f"is for tasks of tokens ({', '.join(OF_TOKENS)}); leave it out")
        for name in ("late_chunking_params", "late_interaction_params"):
            if getattr(params, name) is not None and params.task != "token_embed":
                raise ParameterError(name, f"are for token_embed, and this is {params.task}; leave them out")
        if params.late_chunking_params is not None and (
            params.late_interaction_params or params.step_tag_id is not None
        ):
            raise ParameterError(
                "late_chunking_params", "go with neither late_interaction_params nor step_tag_id: chunks are no tokens"
            )
        keep = params.truncate_prompt_tokens
        if keep is not None and keep > self.max_model_len:
            raise ParameterError("truncate_prompt_tokens", f"is {keep}, and max_model_len is {self.max_model_len}")

    def _check_dimensions(self, asked: int) -> None:
        if self.matryoshka_dims is False or self.matryoshka_dims == ():
            raise ParameterError(
                "dimensions", "cannot be chosen: this model's first numbers do not stand for all (config.json names "
                'no matryoshka_dimensions; if it was made so, hf_overrides={"is_matryoshka": true})'
            )  # fmt: skip
        if isinstance(self.matryoshka_dims, bool):
            if asked > self.width:
                raise ParameterError("dimensions", f"must be at most {self.width}, not {asked}")
        elif asked not in self.matryoshka_dims:
            listed = ", ".join(map(str, self.matryoshka_dims))
            raise ParameterError("dimensions", f"must be one of {listed}, which the model was made for, not {asked}")

    def admit(self, request_id: str, prompt: Prompt, params: PoolingParams, priority: int = 0) -> CoreRequest:
        """ValueError says what is wrong with the prompt. `params` are settled."""
        if prompt.embeds:
            raise ValueError("a text that becomes numbers is tokens, and no embeddings; give text or token ids")
        prompt = self._cut(prompt, params.truncate_prompt_tokens)
        ids = prompt.token_ids
        if len(ids) > self.max_model_len:
            raise ValueError(
                f"the text has {len(ids)} tokens, and max_model_len is {self.max_model_len}; shorten it, or set "
                "truncate_prompt_tokens (-1 cuts what is too much)"
            )
        if not prompt.media and len(ids) < self.padded_len:
            ids = [*ids, *[self.pad_token_id] * (self.padded_len - len(ids))]
        kind = self.sequence if not params.of_tokens else "ALL"
        return CoreRequest(
            request_id=request_id,
            prompt_ids=ids,
            params=self.sampling_params,
            random_key=(0, 0),
            max_tokens=1,
            salt=prompt.salt,
            priority=priority,
            returns_prompt_logprobs=False,
            pooling=params,
            pooled_rows=_POOLED_ROWS.get(kind, EACH_TOKEN),
            token_types=prompt.types,
            lora=prompt.lora,
            media=prompt.media,
        )

    def _cut(self, prompt: Prompt, keep: int | None) -> Prompt:
        """Cuts a text to its first tokens, or its last ones, and the special tokens around it."""
        keep = self.max_model_len if keep == -1 else keep
        ids, types = prompt.token_ids, prompt.types
        if keep is None or len(ids) <= keep:
            return prompt
        if prompt.media:
            raise ParameterError("truncate_prompt_tokens", "would cut a prompt with media; shorten its text instead")
        starts, ends = list(self.start_token_ids), list(self.end_token_ids)
        head = len(starts) if starts and ids[: len(starts)] == starts and len(starts) < keep else 0
        tail = len(ends) if ends and ids[-len(ends) :] == ends and len(ends) < keep >= head + len(ends) else 0
        cut = slice(head, len(ids) - keep + head) if self.truncates_left else slice(keep - tail, len(ids) - tail)
        left, right = cut.start, cut.stop
        return replace(prompt, token_ids=ids[:left] + ids[right:], types=types[: 4 * left] + types[4 * right :])
