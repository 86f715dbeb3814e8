"""transformers as it is measured: generate() with its defaults (SDPA attention, a growing cache)."""

from collections.abc import Sequence

import torch
import transformers
from torch import Tensor
from transformers.generation.streamers import BaseStreamer

from benchmarks.peers.protocol import Emit, Job


class Tokens(BaseStreamer):
    """Passes on what generate() gives it: the prompts first, then a token of each request at a time."""

    def __init__(self, emit: Emit) -> None:
        self._emit, self._begun = emit, False

    def put(self, value: Tensor) -> None:
        if self._begun:
            for request, token in enumerate(value.reshape(-1).tolist()):
                self._emit(request, token)
        self._begun = True

    def end(self) -> None:
        """Nothing was held back."""


class Transformers:
    def __init__(self, job: Job) -> None:
        if job.variant != "bf16":
            raise ValueError(f"transformers quantizes through other packages; it has no {job.variant} of its own")
        torch.set_num_threads(job.threads)
        self._model = transformers.AutoModelForCausalLM.from_pretrained(job.checkpoint, dtype=torch.bfloat16).eval()
        self.facts = {
            "versions": {"transformers": transformers.__version__, "torch": torch.__version__},
            "settings": {"dtype": "bfloat16", "attention": self._model.config._attn_implementation},
            "weight_bytes": sum(p.numel() * p.element_size() for p in self._model.parameters()),  # a tied head once
            "kv_element_bytes": 2,
        }

    @torch.inference_mode()
    def generate(self, prompts: Sequence[Sequence[int]], tokens: int, emit: Emit) -> None:
        ids = torch.tensor(prompts)
        self._model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False,
            streamer=Tokens(emit),
        )  # fmt: skip


def convert(job: Job) -> None:
    """Nothing: it loads checkpoints as they are."""


def load(job: Job) -> Transformers:
    return Transformers(job)
