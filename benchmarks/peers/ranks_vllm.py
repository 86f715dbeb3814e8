"""vLLM on the CPU as a way of benchmarks.parallel: `--way=1` or `--way=2` ranks, run by the Python that has vLLM.

Threads are bound as vLLM's documentation says for ranks: each to a core of its own. Compiled code is kept in the
checkpoint's folder.
"""

import argparse
import ctypes
import os
import sys
from pathlib import Path
from typing import Any

from benchmarks.rank_work import WORK
from benchmarks.ways import answering

CACHE_BYTES = 256 << 20
OPENMP = str(Path(sys.prefix) / "lib" / "libiomp5.so")  # Intel's, which vLLM recommends to preload


def prepare(ranks: int, folder: str) -> None:
    """Sets the environment before torch is imported; vLLM's logs go to standard error."""
    cache = f"{folder}/vllm-cache"
    os.environ |= {
        "VLLM_USE_AOT_COMPILE": "0",  # 0.32 cannot load again what it stores so
        "VLLM_CACHE_ROOT": cache,
        "TORCHINDUCTOR_CACHE_DIR": f"{cache}/inductor",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "HF_HUB_OFFLINE": "1",
        "KMP_BLOCKTIME": "5",
        "KMP_TPAUSE": "0",
    }
    if ranks > 1:
        os.environ |= {"VLLM_CPU_OMP_THREADS_BIND": "|".join(map(str, range(ranks))), "LD_PRELOAD": OPENMP}
    else:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        ctypes.CDLL(OPENMP, ctypes.RTLD_GLOBAL)
    answers = os.dup(1)
    os.dup2(2, 1)
    sys.stdout = os.fdopen(answers, "w")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--way", type=int, required=True)
    parser.add_argument("--folder", required=True)
    args = parser.parse_args()
    prepare(args.way, args.folder)
    import vllm

    settings: dict[str, Any] = {
        "dtype": "bfloat16",
        "max_model_len": 1024,
        "max_num_seqs": 16,
        "kv_cache_memory_bytes": CACHE_BYTES,
        "enable_prefix_caching": False,
        "tensor_parallel_size": args.way,
    }
    llm = vllm.LLM(args.folder, skip_tokenizer_init=True, **settings)
    for work in WORK.values():
        work.seconds(llm, vllm.SamplingParams)
    answering(lambda work: [WORK[work].seconds(llm, vllm.SamplingParams)])


if __name__ == "__main__":
    main()
