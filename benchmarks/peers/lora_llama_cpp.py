"""llama.cpp with adapters, a peer of benchmarks/lora.py: a JSON line for each order, and one for each answer.

python -m benchmarks.peers.lora_llama_cpp MODEL.gguf THREADS ADAPTER.gguf ...

To {"adapters": [one for each request, counted from 1; 0: none], "tokens": n} it answers the tokens per second. A call
of llama.cpp has one adapter for all of its sequences: requests with another follow it, as in its server.
"""

import ctypes
import json
import sys
import time
from itertools import groupby

import llama_cpp

from benchmarks.peers.engine_llama_cpp import LlamaCpp
from benchmarks.peers.protocol import FILE, Job
from benchmarks.peers.worker import private_output, say


class WithAdapters:
    """An engine, and the adapters that it has loaded."""

    def __init__(self, model: str, threads: int, adapters: list[str]) -> None:
        self._engine = LlamaCpp(Job("llama.cpp", "", FILE, model, "", threads))
        self._adapters = [llama_cpp.llama_adapter_lora_init(self._engine._model, path.encode()) for path in adapters]
        if not all(self._adapters):
            raise ValueError("llama.cpp cannot load an adapter")

    def rate(self, adapters: list[int], tokens: int) -> float:
        """Answers a request for each -> tokens per second."""
        begun = time.perf_counter()
        for adapter, requests in groupby(sorted(adapters)):
            prompts = [[7 + at, 11, 13] for at, _ in enumerate(requests)]
            self._use(self._engine._context(len(prompts)), adapter)
            self._engine.generate(prompts, tokens, lambda request, token: None)
        return len(adapters) * tokens / (time.perf_counter() - begun)

    def _use(self, context: object, adapter: int) -> None:
        chosen = [self._adapters[adapter - 1]] if adapter else []
        array = (llama_cpp.llama_adapter_lora_p_ctypes * len(chosen))(*chosen)
        scales = (ctypes.c_float * len(chosen))(*(1.0 for _ in chosen))
        if llama_cpp.llama_set_adapters_lora(context, array, len(chosen), scales) != 0:
            raise RuntimeError("llama.cpp refused an adapter")


def main() -> None:
    answers = private_output()
    engine = WithAdapters(sys.argv[1], int(sys.argv[2]), sys.argv[3:])
    say(answers, {"ready": True})
    for line in sys.stdin:
        order = json.loads(line)
        say(answers, {"rate": engine.rate(order["adapters"], order["tokens"])})


if __name__ == "__main__":
    main()
