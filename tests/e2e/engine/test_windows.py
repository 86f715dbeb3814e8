"""Layers that see a window: their pages are given back as a request grows, and what comes out stays transformers'."""

import random
from typing import Any

import pytest

from quintet.chat.prompts import Prompt
from quintet.config import EngineConfig
from quintet.engine.client import EngineClient
from quintet.sampling_params import SamplingParams
from quintet_tools.checkpoints.tiny import CHUNKS, GEMMA, PLAIN, STREAMS, VOCAB, WINDOW, Tiny, make
from tests.helpers.platforms.null_engine import drain

LENGTH = 700  # tokens of the prompt: forty windows
MODELS: dict[str, dict[str, Any]] = {
    "mistral": {**PLAIN, "sliding_window": WINDOW},
    "gemma2": {**GEMMA, "num_hidden_layers": 4},
    "gemma3_text": {
        **GEMMA,
        "num_hidden_layers": 7,
        "layer_types": [*["sliding_attention"] * 5, "full_attention"] * 1 + ["sliding_attention"],
    },
    "gemma3n_text": STREAMS,
    "llama4_text": {**PLAIN, **CHUNKS, "num_hidden_layers": 4, "no_rope_layers": [1, 0, 1, 1]},
}


def served(tiny: Tiny, **settings: Any) -> EngineClient:
    more = {"max_num_batched_tokens": 64, "max_model_len": LENGTH + 32, "page_size": 16, **settings}
    return EngineClient(
        EngineConfig.from_kwargs(
            model=str(tiny.folder), device="cpu", dtype="float32", skip_tokenizer_init=True, **more
        ),
        progress=False,
    )


def longer(family: str) -> Tiny:
    return make(family, {**MODELS[family], "max_position_embeddings": LENGTH + 64})


def prompt(seed: int, count: int = LENGTH) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, VOCAB) for _ in range(count)]


GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, detokenize=False)


def tokens(client: EngineClient, **prompts: list[int]) -> dict[str, list[int]]:
    for name, ids in prompts.items():
        client.add(name, Prompt(ids), GREEDY)
    return {name: list(output.outputs[0].token_ids) for name, output in drain(client).items()}


@pytest.mark.parametrize("family", MODELS)
def test_a_request_far_longer_than_its_windows_says_what_transformers_says(family: str) -> None:
    """In chunks of four windows, whose pages go to the next chunks; and again from the prefix cache."""
    tiny, asked = longer(family), prompt(1)
    client = served(tiny)
    said = tokens(client, a=asked)["a"]
    reference = tiny.logits([*asked, *said])[LENGTH - 1 : -1].argmax(-1).tolist()
    assert said == reference
    branch = [*asked[:-40], *prompt(2, 30)]
    again = tokens(client, again=asked, branch=branch)
    assert again["again"] == said
    stats = client.engine.stats()
    assert stats.scheduler.prefix_hits >= LENGTH - 16, "the second finds the first one's pages, as far as it needs them"
    assert again["branch"] == tokens(served(tiny, enable_prefix_caching=False), branch=branch)["branch"]


@pytest.mark.parametrize("family", MODELS)
def test_a_long_request_holds_what_its_windows_need(family: str) -> None:
    """Of each group that sees a window: the window, a step's tokens, and a page's rest; of others, its length."""
    client = served(longer(family), enable_prefix_caching=False)
    arrangement = client.engine_plan.ranks.workers[0].kv_cache_layout
    client.add("a", Prompt(prompt(3)), GREEDY)
    most = 0
    while client.busy:
        client.step()
        most = max(most, client.engine.scheduler.pool.num_used)
    whole = -(-(LENGTH + 24) // 16)
    assert most <= arrangement.max_pages(LENGTH + 24, 16, 64)
    windows = sum(kept.window is not None for kept in arrangement.groups)
    assert windows >= 1 and most <= (len(arrangement.groups) - windows) * whole + windows * 6


def test_many_long_requests_fit_where_one_would_have_without_windows() -> None:
    """One request's full length is 46 pages in each layer; three run side by side in 40, and say the same as alone."""
    tiny = longer("mistral")
    asked = {name: prompt(seed) for seed, name in enumerate("abc")}
    alone = {name: tokens(served(tiny), **{name: ids})[name] for name, ids in asked.items()}
    client = served(tiny, num_pages=40, enable_prefix_caching=False)
    assert tokens(client, **asked) == alone
    assert client.engine.stats().scheduler.num_preemptions == 0
