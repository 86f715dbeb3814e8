"""Scores of this engine: what it generates alone, in a batch, from cached prefixes, and how likely given tokens are."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from quintet.sampling_params import SamplingParams
from quintet.verification.scores import Likeliest, SequenceScores

if TYPE_CHECKING:
    from quintet.api.llm import LLM
    from quintet.outputs import RequestOutput


@dataclass(frozen=True)
class Case:
    """A prompt's token ids and how its output is made: by choice of the likeliest token, or drawn with a seed."""

    prompt: list[int]
    seed: int | None = None


def cases_of(prompts: Sequence[list[int]]) -> list[Case]:
    """Returns two cases for each prompt: a greedy one and a drawn one."""
    return [Case(prompt, seed) for number, prompt in enumerate(prompts) for seed in (None, number + 1)]


class EngineScores:
    """Scores of an engine. ValueError: a request failed in it."""

    def __init__(self, llm: "LLM", max_tokens: int) -> None:
        """`max_tokens`: length of each output."""
        self._llm, self._max_tokens = llm, max_tokens

    def alone(self, cases: Iterable[Case]) -> list[SequenceScores]:
        """Runs each case by itself, from an empty prefix cache."""
        found = []
        for case in cases:
            self._llm.reset_prefix_cache()
            found += self._run([case])[0]
        return found

    def batched(self, cases: Sequence[Case]) -> list[SequenceScores]:
        """Runs all cases at once, from an empty prefix cache."""
        self._llm.reset_prefix_cache()
        return self._run(cases)[0]

    def cached(self, cases: Sequence[Case]) -> tuple[list[SequenceScores], int]:
        """Runs each case twice, and returns the second outputs with the number of their tokens that were cached."""
        self._llm.reset_prefix_cache()
        found, total = [], 0
        for case in cases:
            self._run([case])
            scores, cached = self._run([case])
            found += scores
            total += cached
        return found, total

    def given(self, sequences: Sequence[SequenceScores]) -> list[SequenceScores]:
        """Scores the tokens of sequences, all in one batch."""
        params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1, detokenize=False)
        outputs = self._generate([list(each.ids) for each in sequences], [params] * len(sequences))
        return [_of_prompt(each, output) for each, output in zip(sequences, outputs, strict=True)]

    def _run(self, cases: Sequence[Case]) -> tuple[list[SequenceScores], int]:
        outputs = self._generate([case.prompt for case in cases], [self._params(case) for case in cases])
        scores = [_of_output(case, output) for case, output in zip(cases, outputs, strict=True)]
        return scores, sum(output.num_cached_tokens for output in outputs)

    def _params(self, case: Case) -> SamplingParams:
        temperature = 0.0 if case.seed is None else 1.0
        return SamplingParams(
            temperature=temperature, seed=case.seed, max_tokens=self._max_tokens, ignore_eos=True, logprobs=0,
            detokenize=False,
        )  # fmt: skip

    def _generate(self, prompts: list[list[int]], params: list[SamplingParams]) -> "list[RequestOutput]":
        given: Any = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs = self._llm.generate(given, params, use_tqdm=False)
        for output in outputs:
            if output.outputs[0].finish_reason == "error":
                raise ValueError(f"this engine failed: {output.outputs[0].error}")
        return outputs


def _of_output(case: Case, output: "RequestOutput") -> SequenceScores:
    completion = output.outputs[0]
    tokens = list(completion.token_ids)
    assert completion.logprobs is not None, "they were asked for"
    logprobs = [at[token].logprob for token, at in zip(tokens, completion.logprobs, strict=True)]
    before = len(case.prompt)
    return SequenceScores([*case.prompt, *tokens], before, [*[None] * before, *logprobs], (), case.seed is not None)


def _of_prompt(given: SequenceScores, output: "RequestOutput") -> SequenceScores:
    logprobs: list[float | None] = [None]
    likeliest: list[Likeliest | None] = [None]
    for token, at in zip(given.ids[1:], (output.prompt_logprobs or [])[1:], strict=True):
        assert at is not None, "only the first position has none"
        logprobs.append(at[token].logprob)
        best = next(name for name, each in at.items() if each.rank == 1)
        likeliest.append(Likeliest(best, at[best].logprob))
    return SequenceScores(given.ids, given.num_prompt, logprobs, likeliest, given.drawn)
