"""A Ray Serve deployment: requests of one replica share the steps of its engine.

pip install 'quintet-llm[ray]' 'ray[serve]'
python examples/machines/ray_serve.py
"""

import uuid
from typing import Any

from ray import serve

from quintet import AsyncLLM, SamplingParams


@serve.deployment(ray_actor_options={"num_cpus": 1}, max_ongoing_requests=64)
class Completions:
    """An engine, for as long as its replica lives."""

    def __init__(self, model: str) -> None:
        self._llm = AsyncLLM(model=model, device="cpu", kv_cache_memory_bytes="64M")

    async def __call__(self, prompt: str, **params: Any) -> str:
        text = ""
        async for output in self._llm.generate(prompt, SamplingParams(**params), uuid.uuid4().hex):
            text = output.outputs[0].text
        return text


if __name__ == "__main__":
    serve.start(proxy_location="Disabled")  # the handle asks it: nothing listens
    handle = serve.run(Completions.bind("bundled"), route_prefix=None)
    prompts = ("Once upon a time", "The dog")
    asked = [handle.remote(prompt, temperature=0, max_tokens=16) for prompt in prompts]
    for prompt, answer in zip(prompts, asked, strict=True):
        print(prompt + answer.result())
    serve.shutdown()
