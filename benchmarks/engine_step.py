"""Measures a step without arithmetic: the engine on the null platform, token ids in and out."""

import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.checkpoints import small, with_tokenizer
from quintet import SamplingParams, StructuredOutputsParams
from quintet.chat.prompts import Prompt
from quintet.config import EngineConfig
from quintet.engine.client import EngineClient
from quintet.engine.request import CoreRequest, Request
from quintet.structured_output.grammar import GrammarCompiler
from quintet.tokenizers.tokenizer import load_tokenizer

BATCHES = (1, 16, 64, 256)
LARGE = 151_936  # a vocabulary of today's models: a mask costs by it
ROWS = {  # it never ends, and its strings are short, so that the state changes from token to token
    "type": "array",
    "minItems": 1000,
    "items": {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 12}, "size": {"type": "integer", "maximum": 999}},
        "required": ["name", "size"],
    },
}
STEPS = 400
WARM_UP = 20
SHAPE: dict[str, Any] = {"json": ROWS, "disable_any_whitespace": True}


@dataclass(frozen=True)
class StepCost:
    """Microseconds of one decode step of the engine core (schedule, run, sample, finish), all requests decoding."""

    batch: int
    median_us: float
    best_us: float
    per_request_us: float
    sampling: str


def measure(params: dict[str, Any], label: str) -> list[StepCost]:
    """The cost at each batch size, with these sampling parameters."""
    with tempfile.TemporaryDirectory() as folder:
        model = small(Path(folder))
        return [_measure(str(model), batch, params, label, skip_tokenizer_init=True) for batch in BATCHES]


def measure_constrained() -> list[StepCost]:
    """Measures a batch with structured outputs, beside one without, and one with a fixed allowed_token_ids mask.

    The null platform masks with the specification: the third less the second is what the host does for grammars.
    """
    kinds: dict[str, dict[str, Any]] = {
        "unconstrained": {},
        "allowed_token_ids": {"allowed_token_ids": list(range(1024))},
        "structured_outputs": {"structured_outputs": SHAPE},
    }
    with tempfile.TemporaryDirectory() as folder:
        model = str(with_tokenizer(small(Path(folder))))
        return [
            _measure(model, batch, {"temperature": 0.0, **params}, label)
            for batch in BATCHES[:3]
            for label, params in kinds.items()
        ]


def measure_masks(batch: int = 64) -> StepCost:
    """Measures the host's part alone at a large vocabulary: each row's matcher takes a token and fills a bitmask."""
    rng = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = load_tokenizer(with_tokenizer(small(Path(folder), LARGE)))
    grammars = GrammarCompiler(lambda: tokenizer, LARGE, [2])
    params = SamplingParams(structured_outputs=SHAPE)
    requests = [Request(CoreRequest(str(row), [0], params, (0, row), STEPS)) for row in range(batch)]
    matchers = [grammars.matcher(StructuredOutputsParams(**SHAPE)) for _ in requests]
    bits = np.zeros((batch, -(-LARGE // 32)), np.int32)
    times = []
    for _ in range(STEPS // 4):
        start = time.perf_counter()
        for request, matcher, words in zip(requests, matchers, bits, strict=True):
            if not matcher.ready:
                matcher.wait()
            if why := matcher.advance(request):
                raise RuntimeError(why)
            matcher.fill(words)
        times.append((time.perf_counter() - start) * 1e6)
        for request, words in zip(requests, bits, strict=True):
            kept = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))
            request.append_sampled(int(rng.choice(kept)))
    grammars.close()
    times = times[WARM_UP:]
    median = statistics.median(times)
    label = f"masks alone, vocabulary {LARGE}"
    return StepCost(batch, round(median, 1), round(min(times), 1), round(median / batch, 2), label)


def _measure(model: str, batch: int, params: dict[str, Any], label: str, **settings: Any) -> StepCost:
    config = EngineConfig(
        model=model, device="null", load_format="dummy", max_num_seqs=256, max_model_len=1024, **settings
    )
    client = EngineClient(config, progress=False)
    for index in range(batch):
        # a full page of each prompt differs, so that no request rides on another's cache
        prompt = Prompt([(index * 31 + place) % 1000 for place in range(32)])
        wanted = SamplingParams(max_tokens=STEPS + WARM_UP + 50, ignore_eos=True, detokenize=False, **params)
        client.add(client.next_id(), prompt, wanted)
    engine = client.engine
    while engine.stats().scheduler.num_waiting or engine.stats().steps.num_steps < WARM_UP:
        engine.step()
    times = []
    for _ in range(STEPS):
        start = time.perf_counter()
        engine.step()
        times.append((time.perf_counter() - start) * 1e6)
    median = statistics.median(times)
    return StepCost(batch, round(median, 1), round(min(times), 1), round(median / batch, 2), label)


def main() -> None:
    for params, label in (({"temperature": 0.0}, "greedy"), ({"temperature": 0.8, "top_k": 50, "seed": 1}, "top_k 50")):
        for cost in measure(params, label):
            print(cost)
    for cost in (*measure_constrained(), measure_masks()):
        print(cost)


if __name__ == "__main__":
    main()
