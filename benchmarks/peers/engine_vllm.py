"""vLLM as it is measured: its engine in one process, compiled as it does by default, and its compressed checkpoints."""

import ctypes
import json
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.peers.protocol import MAX_LEN, MAX_TOKENS, SEQUENCES, Emit, Job

CACHE_BYTES = 1 << 30  # holds the 4,096 tokens of the largest run
GROUP = 128  # weights of one scale where they have 4 bits
BITS = {"w8a8": 8, "w4a16": 4}


class VLLM:
    """No prefix caching, and a budget of tokens that lets 16 prompts of 128 in at once.

    One process: a scheduler in a process of its own would keep a core, and its memory would not be counted. Threads
    are as many as OMP_NUM_THREADS says, and bound to no core.
    """

    def __init__(self, job: Job) -> None:
        _prepare(job)
        import torch
        import vllm

        settings: dict[str, Any] = {
            "dtype": "bfloat16",
            "max_model_len": MAX_LEN,
            "max_num_seqs": SEQUENCES,
            "max_num_batched_tokens": MAX_TOKENS,
            "kv_cache_memory_bytes": CACHE_BYTES,
            "enable_prefix_caching": False,
        }
        folder = job.checkpoint if job.variant == "bf16" else str(job.converted())
        self._engine = vllm.LLM(folder, skip_tokenizer_init=True, **settings).llm_engine
        self._params = vllm.SamplingParams
        self._delta = vllm.sampling_params.RequestOutputKind.DELTA
        self._made = 0
        self.facts = {
            "versions": {"vllm": vllm.__version__, "torch": torch.__version__},
            "settings": {**settings, "threads": torch.get_num_threads(), "openmp": _openmp()},
            "weight_bytes": _stored_bytes(Path(folder)),
            "kv_element_bytes": 2,
        }

    def generate(self, prompts: Sequence[Sequence[int]], tokens: int, emit: Emit) -> None:
        params = self._params(
            temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False, output_kind=self._delta
        )
        requests = {}
        for request, prompt in enumerate(prompts):
            self._made += 1
            requests[str(self._made)] = request
            self._engine.add_request(str(self._made), {"prompt_token_ids": list(prompt)}, params)
        while self._engine.has_unfinished_requests():
            for output in self._engine.step():
                for token in output.outputs[0].token_ids:
                    emit(requests[output.request_id], token)


def _prepare(job: Job) -> None:
    """Sets the environment before torch is imported. Compiled code is kept beside the converted checkpoints.

    Intel's OpenMP, which vLLM installs and recommends to preload, serves torch too when it is the first in the process.
    """
    cache = str(Path(job.work) / "vllm-cache")
    os.environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_USE_AOT_COMPILE": "0",  # 0.32 cannot load again what it stores so, and compiles at every start
        "VLLM_CACHE_ROOT": cache,
        "TORCHINDUCTOR_CACHE_DIR": f"{cache}/inductor",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "KMP_BLOCKTIME": "5",  # milliseconds of active waiting; this and the next as vLLM sets them
        "KMP_TPAUSE": "0",
    }
    ctypes.CDLL(str(Path(sys.prefix) / "lib" / "libiomp5.so"), ctypes.RTLD_GLOBAL)


def _openmp() -> list[str]:
    """The OpenMP libraries that are mapped; where Intel's is among them, it came first."""
    names = {Path(line.split()[-1]).name for line in Path("/proc/self/maps").read_text().splitlines() if ".so" in line}
    return sorted(name for name in names if "omp" in name and name.startswith("lib"))


def _stored_bytes(folder: Path) -> int:
    """Returns the bytes of all weights: a tied head is read whole and stored once; shape tensors hardly count."""
    from safetensors import safe_open

    with safe_open(folder / "model.safetensors", "pt") as file:
        return sum(file.get_tensor(name).nbytes for name in file.keys())


def _config(bits: int) -> dict[str, Any]:
    """Returns the compressed-tensors config: W8A8 with a scale for each row and each token, or W4A16 in groups."""
    weights: dict[str, Any] = {"num_bits": bits, "type": "int", "symmetric": True, "dynamic": False}
    inputs = None
    if bits == 8:
        weights["strategy"] = "channel"
        inputs = {"num_bits": 8, "type": "int", "symmetric": True, "dynamic": True, "strategy": "token"}
    else:
        weights |= {"strategy": "group", "group_size": GROUP}
    layout = "int-quantized" if bits == 8 else "pack-quantized"
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "quantization_status": "compressed",
        "ignore": ["lm_head", r"re:.*\.mlp\.gate$"],  # a router
        "config_groups": {"group_0": group},
    }


def _quantized(name: str, weight: Any, bits: int) -> Iterator[tuple[str, Any]]:
    """The tensors that stand for a weight (outputs, inputs): the nearest of 2^bits - 1 levels around zero."""
    import torch
    from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32

    most = 2 ** (bits - 1) - 1
    groups = weight.float().unflatten(1, (-1, weight.shape[1] if bits == 8 else GROUP))
    scale = (groups.abs().amax(2, keepdim=True) / most).clamp_min(1e-12).to(weight.dtype)
    levels = (groups / scale.float()).round().clamp(-most, most).flatten(1).to(torch.int8)
    yield f"{name}_scale", scale.squeeze(2)
    if bits == 8:
        yield name, levels
    else:
        yield f"{name}_packed", pack_to_int32(levels, bits)
        yield f"{name}_shape", torch.tensor(weight.shape)


def convert(job: Job) -> None:
    """bfloat16 is loaded as it is; otherwise every projection of a layer is quantized, by the rule of the nearest."""
    folder, part = job.converted(), job.converted(".part")
    if job.variant == "bf16" or folder.exists():
        return
    if job.variant in ("gptq", "awq"):
        from benchmarks.peers import published_files

        published_files.write(Path(job.checkpoint), folder, job.variant)
        return
    from safetensors.torch import load_file, save_file

    bits, source = BITS[job.variant], Path(job.checkpoint)
    tensors: dict[str, Any] = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        projection = name.endswith("_proj.weight")
        tensors.update(_quantized(name, tensor, bits) if projection else [(name, tensor)])
    part.mkdir(parents=True, exist_ok=True)
    save_file(tensors, part / "model.safetensors", {"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    (part / "config.json").write_text(json.dumps({**config, "quantization_config": _config(bits)}))
    for extra in source.glob("generation_config.json"):
        shutil.copy(extra, part)
    part.rename(folder)


def load(job: Job) -> VLLM:
    return VLLM(job)
