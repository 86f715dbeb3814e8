"""Guessed tokens on real kernels, of a model that repeats itself: the same bits as without, however it is sampled."""

from typing import Any

import pytest

from quintet import LLM, SamplingParams
from quintet.outputs import RequestOutput
from quintet_tools.checkpoints.tiny import variant

GUESS = {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_min": 1, "prompt_lookup_max": 4}
PROMPTS = [[5, 6, 7, 8] * 6, [9, 10] * 11 + [9], [3, 3, 3, 3, 3], list(range(20, 60))]
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "seeded": {"temperature": 0.3, "seed": 1},
    "cuts": {"temperature": 0.4, "seed": 2, "top_k": 12, "top_p": 0.8, "min_p": 0.02},
    "penalties": {"temperature": 0.2, "frequency_penalty": 0.02, "presence_penalty": 0.05, "repetition_penalty": 1.02},
    "bad words": {"temperature": 0, "logit_bias": {11: 3.0}, "allowed_token_ids": list(range(3, 40))},
    "scores": {"temperature": 0.3, "seed": 3, "logprobs": 3, "prompt_logprobs": 2},
    "ends": {"temperature": 0.2, "seed": 4, "min_tokens": 17, "stop_token_ids": list(range(5, 45))},
    "several": {"temperature": 0.3, "seed": 5, "n": 3},
}
ENGINES: dict[str, dict[str, Any]] = {
    "plenty": {},
    "chunks, few pages": {"max_num_batched_tokens": 24, "num_pages": 12, "max_num_seqs": 4},
    "no prefix cache": {"enable_prefix_caching": False},
    "processed": {"logprobs_mode": "processed_logprobs"},
}


def engine(config: dict[str, Any] | None, **settings: Any) -> LLM:
    sizes = {"max_model_len": 128, "max_num_seqs": 8, "page_size": 16, "num_pages": 90, "max_num_batched_tokens": 96}
    given = {**sizes, "skip_tokenizer_init": True, "dtype": "bfloat16", **settings}
    return LLM(str(variant("llama", "plain").folder), device="cpu", speculative_config=config, **given)


def told(outputs: list[RequestOutput]) -> list[Any]:
    return [
        (each.prompt_logprobs, [(list(o.token_ids), o.finish_reason, o.stop_reason, o.logprobs) for o in each.outputs])
        for each in outputs
    ]


@pytest.mark.grid(cases=2)
@pytest.mark.parametrize("how", ENGINES)
def test_the_same_bits_with_and_without(how: str) -> None:
    ours, theirs = engine(GUESS, **ENGINES[how]), engine(None, **ENGINES[how])
    params = [SamplingParams(max_tokens=40, detokenize=False, ignore_eos=True, **way) for way in WAYS.values()]
    prompts = [prompt for _ in params for prompt in PROMPTS]
    asked = [each for each in params for _ in PROMPTS]
    for _ in range(2):  # the second time, beginnings are found in the prefix cache
        assert told(ours.generate(prompts, asked, use_tqdm=False)) == told(
            theirs.generate(prompts, asked, use_tqdm=False)
        )
    for prompt in PROMPTS[:2]:  # alone: no step is large enough to hide anything
        assert told(ours.generate([prompt], params[1], use_tqdm=False)) == told(
            theirs.generate([prompt], params[1], use_tqdm=False)
        )
    stats = ours.get_stats()
    assert 100 < stats["num_accepted_tokens"] < stats["num_draft_tokens"]
    if "few pages" in how:
        assert stats["num_preemptions"] > 0
