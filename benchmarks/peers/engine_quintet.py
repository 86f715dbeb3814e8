"""quintet as it is measured: its public API, tokens as they stream."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import quintet
from benchmarks.peers.protocol import FILE, MAX_LEN, MAX_TOKENS, SEQUENCES, Emit, Job
from quintet import LLM, SamplingParams
from quintet.engine.executor.worker import Worker
from quintet.interface.types import MaxShape, ShapeBucket
from quintet.model_loader.loader import declared_weights


class Quintet:
    """Every prompt is computed: prefix caching is off. The KV cache is as large as the largest run."""

    def __init__(self, job: Job) -> None:
        scheme, _, group = job.variant.partition("-g")
        scheme, _, activations = scheme.partition("-a")
        file = published(job)
        settings: dict[str, Any] = {
            "dtype": "auto" if job.variant == FILE else "bfloat16",
            "device": "cpu",
            "quantization": None if scheme == "bf16" or file else scheme,
            "quantization_group_size": int(group) if group else None,
            "activation_bits": int(activations) if activations else None,
            "max_model_len": MAX_LEN,
            "max_num_seqs": SEQUENCES,
            "enable_prefix_caching": False,
        }
        settings["num_pages"] = MAX_TOKENS // quintet.EngineConfig().page_size + SEQUENCES + 1
        self._llm = LLM(str(file or job.checkpoint), skip_tokenizer_init=True, use_tqdm=False, **settings)
        self.facts = {
            "versions": {"quintet": quintet.__version__, "torch": torch.__version__},
            "settings": settings,
            "weight_bytes": _read_bytes(self._llm._client.engine_plan.ranks.workers[0]),
            "kv_element_bytes": 2,
        }

    def generate(self, prompts: Sequence[Sequence[int]], tokens: int, emit: Emit) -> None:
        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        requests: dict[str, int] = {}
        for output in self._llm.stream([list(prompt) for prompt in prompts], params):
            request, completion = requests.setdefault(output.request_id, len(requests)), output.outputs[0]
            if completion.finish_reason == "error":
                raise RuntimeError(completion.error)
            for token in completion.token_ids:
                emit(request, token)


def _read_bytes(worker: Worker) -> int:
    """Returns the bytes of all weights but the embedding (a token reads one row); a tied head is read whole."""
    weights = [each.weight for each in declared_weights(worker.model) if each.weight.use != "embedding"]
    return worker.platform.estimate(worker.model, weights, MaxShape(ShapeBucket(1, 1, 1, ()), 0, 0)).weights


def published(job: Job) -> Path | None:
    """The file of "PEER:FORMAT", of blocks of FP8, or the GGUF file; None where the checkpoint in floats is meant."""
    peer, _, kind = job.variant.partition(":")
    if kind:
        return replace(job, engine=peer, variant=kind).converted(".gguf" if peer == "llama.cpp" else "")
    return job.converted() if job.variant in ("fp8-blocks", FILE) else None


def convert(job: Job) -> None:
    """Checkpoints are loaded as they are, but for blocks of FP8, which no peer here writes."""
    if job.variant == "fp8-blocks" and not job.converted().exists():
        from benchmarks.peers import published_files

        published_files.write(Path(job.checkpoint), job.converted(), "fp8")


def load(job: Job) -> Quintet:
    return Quintet(job)
