"""Greedy decoding with a draft model by llama.cpp's C calls: the drafts of one model, and one call that verifies them.

python benchmarks/peers/draft_llama_cpp.py MODEL.gguf DRAFT.gguf

To {"prompt": [ids], "tokens": n, "guesses": k} on a line it answers {"seconds": s, "tokens": [ids], "accepted": share};
without guesses it decodes alone. llama-cpp-python's own LlamaDraftModel has no second model.
"""

import ctypes
import json
import os
import sys
import time
from collections.abc import Sequence
from typing import Any

import llama_cpp
import numpy as np

LENGTH = 1024  # tokens of a request


class Sequence0:
    """One model and the tokens of one request in its cache."""

    def __init__(self, path: str, threads: int) -> None:
        self._model = llama_cpp.llama_model_load_from_file(path.encode(), llama_cpp.llama_model_default_params())
        if not self._model:
            raise SystemExit(f"llama.cpp cannot load {path}")
        self._vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = params.n_batch = LENGTH
        params.n_threads = params.n_threads_batch = threads
        self._context = llama_cpp.llama_init_from_model(self._model, params)
        self._batch = llama_cpp.llama_batch_init(LENGTH, 0, 1)
        self.computed = 0

    def keep(self, count: int) -> None:
        """Drops all tokens but the first so many."""
        self.computed = min(self.computed, count)
        llama_cpp.llama_memory_seq_rm(llama_cpp.llama_get_memory(self._context), 0, self.computed, -1)

    def next_tokens(self, tokens: Sequence[int], rows: int) -> list[int]:
        """Computes tokens behind the cache -> the likeliest ones after each of the last `rows`."""
        batch, first = self._batch, len(tokens) - rows
        batch.n_tokens = len(tokens)
        for index, token in enumerate(tokens):
            batch.token[index], batch.pos[index] = token, self.computed + index
            batch.n_seq_id[index], batch.seq_id[index][0] = 1, 0
            batch.logits[index] = index >= first
        if llama_cpp.llama_decode(self._context, batch) != 0:
            raise RuntimeError(f"llama_decode failed at {len(tokens)} tokens")
        self.computed += len(tokens)
        shape = (self._vocab_size,)
        found = [llama_cpp.llama_get_logits_ith(self._context, index) for index in range(first, len(tokens))]
        return [int(np.ctypeslib.as_array(logits, shape).argmax()) for logits in found]


def generate(model: Sequence0, draft: Sequence0, prompt: list[int], tokens: int, guesses: int) -> dict[str, Any]:
    """Decodes so many tokens, whatever they are."""
    model.keep(0)
    draft.keep(0)
    known, drafted, accepted, start = list(prompt), 0, 0, time.perf_counter()
    known += model.next_tokens(known, 1)
    while len(known) < len(prompt) + tokens:
        drafts: list[int] = []
        for _ in range(min(guesses, len(prompt) + tokens - len(known) - 1)):
            drafts += draft.next_tokens([*known, *drafts][draft.computed :], 1)
        found = model.next_tokens([known[-1], *drafts], len(drafts) + 1)
        right = next((i for i, token in enumerate(drafts) if token != found[i]), len(drafts))
        known += found[: right + 1]
        model.keep(len(known) - 1)
        draft.keep(len(known) - 1)
        drafted, accepted = drafted + len(drafts), accepted + right
    seconds = time.perf_counter() - start
    return {"seconds": seconds, "tokens": known[len(prompt) :], "accepted": accepted / max(1, drafted)}


def main() -> None:
    quiet = llama_cpp.llama_log_callback(lambda level, text, data: None)
    llama_cpp.llama_log_set(quiet, ctypes.c_void_p(0))
    llama_cpp.llama_backend_init()
    model, draft = (Sequence0(path, len(os.sched_getaffinity(0))) for path in sys.argv[1:3])
    for line in sys.stdin:
        asked = json.loads(line)
        print(json.dumps(generate(model, draft, asked["prompt"], asked["tokens"], asked["guesses"])), flush=True)


if __name__ == "__main__":
    main()
