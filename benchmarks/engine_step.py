"""What a step costs before any arithmetic: the engine on the null platform, token ids in and out."""

import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from benchmarks.checkpoints import small
from quintet import SamplingParams
from quintet.config import EngineConfig
from quintet.engine.client import Client
from quintet.engine.prompts import Prompt

BATCHES = (1, 16, 64, 256)
STEPS = 400
WARM_UP = 20


@dataclass(frozen=True)
class StepCost:
    """Microseconds of one decode step of the engine core (schedule, run, sample, finish), all requests decoding."""

    batch: int
    median_us: float
    best_us: float
    per_request_us: float
    sampling: str


def measure(params: dict[str, float], label: str) -> list[StepCost]:
    """The cost at each batch size, with these sampling parameters."""
    with tempfile.TemporaryDirectory() as folder:
        model = small(Path(folder))
        return [_measure(str(model), batch, params, label) for batch in BATCHES]


def _measure(model: str, batch: int, params: dict[str, float], label: str) -> StepCost:
    config = EngineConfig(
        model=model, device="null", load_format="dummy", skip_tokenizer_init=True, max_num_seqs=256, max_model_len=1024
    )
    client = Client(config, progress=False)
    for index in range(batch):
        # a full page of each prompt differs, so that no request rides on another's cache
        prompt = Prompt([(index * 31 + place) % 1000 for place in range(32)])
        wanted = SamplingParams(max_tokens=STEPS + WARM_UP + 50, ignore_eos=True, detokenize=False, **params)
        client.add(client.next_id(), prompt, wanted)
    engine = client.engine
    while engine.stats().num_waiting or engine.stats().num_steps < WARM_UP:
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


if __name__ == "__main__":
    main()
