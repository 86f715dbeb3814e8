"""ray.data runs a data set through engines: one in each actor, which is given its batches.

pip install 'quintet-llm[ray]' 'ray[data]'
python examples/machines/ray_data.py
"""

from typing import Any

import ray

from quintet import LLM, SamplingParams


class Completions:
    """An engine, for as long as its actor lives."""

    def __init__(self) -> None:
        self._llm = LLM("bundled", device="cpu", kv_cache_memory_bytes="64M", use_tqdm=False)

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        outputs = self._llm.generate(
            list(batch["prompt"]), SamplingParams(temperature=0, max_tokens=16), use_tqdm=False
        )
        return {"prompt": batch["prompt"], "text": [output.outputs[0].text for output in outputs]}


prompts = ray.data.from_items([{"prompt": f"Once upon a time there were {count} bears"} for count in range(2, 10)])
answers = prompts.map_batches(Completions, batch_size=4, num_cpus=1, compute=ray.data.ActorPoolStrategy(size=1))
for row in answers.take_all():
    print(row["prompt"] + row["text"])
