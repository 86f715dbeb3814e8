"""OpenVINO GenAI as it is measured: its continuous batching pipeline, and the checkpoint as OpenVINO IR."""

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import openvino
import openvino_genai

from benchmarks.peers.protocol import SEQUENCES, Emit, Job

IR = "openvino_model"
CACHE_GB = 1  # holds the 4,096 tokens of the largest run with bfloat16 keys and values
NOBODY = 2  # a token to end with, since the pipeline wants one; ignore_eos keeps it from ending anything


class OpenVINO:
    """The pipeline that LLMPipeline itself runs on; taken directly, since that one streams no batches.

    Activations are quantized as OpenVINO does by default; keys and values are of 8 bits, its default, beside compressed
    weights, and beside bfloat16 weights as it computes: float32 where the processor has no products in bfloat16.
    """

    def __init__(self, job: Job) -> None:
        settings: dict[str, Any] = {"INFERENCE_NUM_THREADS": job.threads, "PERFORMANCE_HINT": "LATENCY"}
        precision = openvino.Core().get_property("CPU", "INFERENCE_PRECISION_HINT")
        floats = ("bf16", 2) if precision == openvino.Type.bf16 else ("f32", 4)
        settings["KV_CACHE_PRECISION"], element_bytes = floats if job.variant == "bf16" else ("u8", 1)
        cache_gb = CACHE_GB * max(1, element_bytes // 2)
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.enable_prefix_caching = False
        scheduler.cache_size = cache_gb
        scheduler.max_num_batched_tokens = 2048
        scheduler.max_num_seqs = SEQUENCES
        folder = job.converted()
        self._pipe = openvino_genai.ContinuousBatchingPipeline(str(folder), scheduler, "CPU", settings)
        self._made = 0
        self.facts = {
            "versions": {"openvino-genai": openvino_genai.__version__, "openvino": openvino.__version__},
            "settings": {**settings, "INFERENCE_PRECISION_HINT": str(precision), "cache_gb": cache_gb},
            "weight_bytes": (folder / f"{IR}.bin").stat().st_size,  # a tied head is one constant with the embedding
            "kv_element_bytes": element_bytes,
        }

    def generate(self, prompts: Sequence[Sequence[int]], tokens: int, emit: Emit) -> None:
        handles = []
        for prompt in prompts:
            self._made += 1
            ids = openvino.Tensor(np.array([prompt], np.int64))
            handles.append(self._pipe.add_request(self._made, ids, _config(tokens)))
        while self._pipe.has_non_finished_requests():
            self._pipe.step()
            for request, handle in enumerate(handles):
                while handle.can_read():
                    for output in handle.read().values():
                        for token in output.generated_ids:
                            emit(request, token)


def _config(tokens: int) -> Any:
    config = openvino_genai.GenerationConfig()
    config.max_new_tokens = tokens
    config.do_sample = False
    config.eos_token_id, config.stop_token_ids, config.ignore_eos = NOBODY, {NOBODY}, True
    return config


def convert(job: Job) -> None:
    """By optimum-intel, then by NNCF with what `optimum-cli export openvino --weight-format` sets by default."""
    folder, part = job.converted(), job.converted(".part")
    if folder.exists():
        return
    if job.variant == "bf16":
        _export(Path(job.checkpoint), part)
    else:
        plain = Job(job.engine, job.bits, "bf16", job.checkpoint, job.work, job.threads)
        convert(plain)
        _compress(plain.converted(), part, job.variant)
    part.rename(folder)


def _export(checkpoint: Path, folder: Path) -> None:
    from optimum.intel import OVModelForCausalLM

    model = OVModelForCausalLM.from_pretrained(checkpoint, export=True, load_in_8bit=False, compile=False)
    model.save_pretrained(folder)


def _compress(plain: Path, folder: Path, variant: str) -> None:
    import nncf

    modes = {
        "int8": {"mode": nncf.CompressWeightsMode.INT8_ASYM},
        "int4": {"mode": nncf.CompressWeightsMode.INT4_ASYM, "group_size": 128, "ratio": 1.0},
    }
    model = nncf.compress_weights(openvino.Core().read_model(plain / f"{IR}.xml"), **modes[variant])
    openvino.save_model(model, folder / f"{IR}.xml", compress_to_fp16=False)
    for config in plain.glob("*config.json"):
        shutil.copy(config, folder)


def load(job: Job) -> OpenVINO:
    return OpenVINO(job)
