"""llama.cpp as it is measured: its C calls, as its own benchmarks make them, through llama-cpp-python."""

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import llama_cpp
import numpy as np

from benchmarks.peers.protocol import MAX_LEN, MAX_TOKENS, Emit, Job

BATCH = 2048  # tokens of one call, its default
FORMATS = {"F16": "MOSTLY_F16", "Q8_0": "MOSTLY_Q8_0", "Q4_0": "MOSTLY_Q4_0", "Q4_K_M": "MOSTLY_Q4_K_M"}


class Entry(NamedTuple):
    """One token of a batch."""

    token: int
    position: int
    sequence: int
    scored: bool  # whether its logits are wanted


class LlamaCpp:
    """Defaults throughout: weights mapped and repacked, float16 keys and values, flash attention where it can.

    One context serves single requests and another serves batches, so that neither pays for the other's sequences.
    """

    def __init__(self, job: Job) -> None:
        self._quiet = llama_cpp.llama_log_callback(lambda level, text, data: None)
        llama_cpp.llama_log_set(self._quiet, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()
        path = job.converted(".gguf")
        self._model = llama_cpp.llama_model_load_from_file(str(path).encode(), llama_cpp.llama_model_default_params())
        if not self._model:
            raise ValueError(f"llama.cpp cannot load {path}; delete it, so that it is made again")
        self._vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))
        self._threads = job.threads
        self._contexts: dict[int, Any] = {}
        self._batch = llama_cpp.llama_batch_init(BATCH, 0, 1)
        self.facts = {
            "versions": {"llama-cpp-python": llama_cpp.__version__},
            "settings": {
                "system": llama_cpp.llama_print_system_info().decode(),
                "flash_attention": "auto",
                "keys_and_values": "float16",
            },
            "weight_bytes": llama_cpp.llama_model_size(self._model),
            "kv_element_bytes": 2,
        }

    def generate(self, prompts: Sequence[Sequence[int]], tokens: int, emit: Emit) -> None:
        context, count = self._context(len(prompts)), len(prompts[0])
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), False)
        entries = [
            Entry(token, position, sequence, position == count - 1)
            for sequence, prompt in enumerate(prompts)
            for position, token in enumerate(prompt)
        ]
        for position in range(count, count + tokens):
            best = self._decode(context, entries)
            for sequence, token in best.items():
                emit(sequence, token)
            entries = [Entry(token, position, sequence, True) for sequence, token in best.items()]

    def _decode(self, context: Any, entries: list[Entry]) -> dict[int, int]:
        """The likeliest next token of each sequence that has a scored entry."""
        best = {}
        for first in range(0, len(entries), BATCH):
            part = entries[first : first + BATCH]
            self._fill(part)
            if llama_cpp.llama_decode(context, self._batch) != 0:
                raise RuntimeError(f"llama_decode failed at a batch of {len(part)} tokens")
            for index, entry in enumerate(part):
                if entry.scored:
                    logits = llama_cpp.llama_get_logits_ith(context, index)
                    best[entry.sequence] = int(np.ctypeslib.as_array(logits, (self._vocab_size,)).argmax())
        return best

    def _fill(self, entries: list[Entry]) -> None:
        batch = self._batch
        batch.n_tokens = len(entries)
        for index, entry in enumerate(entries):
            batch.token[index] = entry.token
            batch.pos[index] = entry.position
            batch.n_seq_id[index] = 1
            batch.seq_id[index][0] = entry.sequence
            batch.logits[index] = entry.scored

    def _context(self, sequences: int) -> Any:
        if sequences not in self._contexts:
            params = llama_cpp.llama_context_default_params()
            params.n_ctx = MAX_LEN if sequences == 1 else MAX_TOKENS
            params.n_batch = BATCH
            params.n_seq_max = sequences
            params.n_threads = params.n_threads_batch = self._threads
            self._contexts[sequences] = llama_cpp.llama_init_from_model(self._model, params)
        return self._contexts[sequences]


def convert(job: Job) -> None:
    """To bfloat16 by our own writer, from there by llama.cpp's quantizer."""
    target, part = job.converted(".gguf"), job.converted(".gguf.part")
    if target.exists():
        return
    if job.variant == "BF16":
        from benchmarks.peers import gguf_file

        gguf_file.write(Path(job.checkpoint), part)
    else:
        plain = Job(job.engine, job.bits, "BF16", job.checkpoint, job.work, job.threads)
        convert(plain)
        params = llama_cpp.llama_model_quantize_default_params()
        params.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_{FORMATS[job.variant]}")
        names = str(plain.converted(".gguf")).encode(), str(part).encode()
        if llama_cpp.llama_model_quantize(*names, ctypes.byref(params)) != 0:
            raise RuntimeError(f"llama.cpp could not quantize to {job.variant}")
    part.rename(target)


def load(job: Job) -> LlamaCpp:
    return LlamaCpp(job)
