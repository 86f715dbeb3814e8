"""Small models on the CPU: whole engines, ranks, and what transformers would answer in their place."""

import functools
import json
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from quintet import LLM, SamplingParams
from quintet.conformance.harness.worker_runner import random_prompts
from quintet.interface.platform import Capabilities, Platform
from quintet.interface.types import RankInfo
from quintet.layers.quantization import QuantizationPlan
from quintet.layers.quantization.checkpoint_config import read_quantization_config
from quintet.model_loader.loader import tensors_of
from quintet.models import model_class
from quintet.platforms.cpu import PLATFORM
from quintet_tools.checkpoints.tiny import VOCAB, Tiny
from tests.helpers.platforms.loopback import LoopbackPlatform, each_rank
from tests.helpers.platforms.run_model import Runner

LENGTHS = (17, 3, 30)  # of prompts, in tokens


def engine(tiny: Tiny, **settings: Any) -> LLM:
    small = {"dtype": "float32", "kv_cache_memory_bytes": "16M", "max_model_len": 64, "use_tqdm": False}
    return LLM(str(tiny.folder), device="cpu", skip_tokenizer_init=True, **{**small, **settings})


def answers(llm: LLM, count: int = 12) -> list[list[int]]:
    greedy = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, detokenize=False)
    prompts: Any = [{"prompt_token_ids": ids} for ids in random_prompts(5, LENGTHS, VOCAB)]
    return [list(each.outputs[0].token_ids) for each in llm.generate(prompts, greedy, use_tqdm=False)]


def told(llm: LLM, prompts: list[Any], params: SamplingParams) -> list[Any]:
    """Tokens and every log-probability of them and of the prompts."""
    found = []
    for output in llm.generate(prompts, params, use_tqdm=False):
        said = output.outputs[0]
        listed = [{token: each.logprob for token, each in at.items()} for at in said.logprobs or ()]
        scored = [at and {token: each.logprob for token, each in at.items()} for at in output.prompt_logprobs or ()]
        found.append((list(said.token_ids), listed, scored))
    return found


def continued(tiny: Tiny, count: int = 12) -> list[list[int]]:
    """By transformers."""
    found = []
    for ids in random_prompts(5, LENGTHS, VOCAB):
        for _ in range(count):
            ids = [*ids, int(tiny.logits(ids)[-1].argmax())]
        found.append(ids[-count:])
    return found


def forms_of(tiny: Tiny, platform: type[Platform] | Platform = PLATFORM) -> QuantizationPlan:
    """As an engine would have them of a quantized checkpoint."""
    facts = platform.probe()
    assert isinstance(facts, Capabilities)
    said = json.loads((tiny.folder / "config.json").read_text())["quantization_config"]
    there = functools.partial(tensors_of, tiny.folder, model_class(tiny.config))
    return QuantizationPlan(checkpoint=read_quantization_config(said, there), supported_kinds=facts.weight_formats)


def ranked(tiny: Tiny, ranks: int, prompt: Sequence[int]) -> list[Tensor]:
    """The prompt's logits by each of so many ranks, which read their shares of a quantized checkpoint."""
    platform = LoopbackPlatform()

    def run(rank: int, endpoint: str) -> Tensor:
        place, forms = RankInfo(rank, ranks, endpoint), forms_of(tiny)  # what the CPU keeps: its ranks are the CPU's
        (logits,) = Runner(tiny, platform=platform, rank_info=place, quantization=forms).prompts([list(prompt)])
        return logits

    return each_rank(platform, ranks, run)
