"""Every process of torchrun runs this script, and is one rank of the model: all make the same calls, all get the same.

torchrun --nproc-per-node 2 examples/machines/torchrun.py

On several machines: torchrun --nnodes 2 --node-rank K --master-addr A --master-port P --nproc-per-node 2, on each, with
the same QUINTET_RANKS_KEY.
"""

import os

from quintet import LLM, SamplingParams

llm = LLM(
    "bundled",
    device="cpu",
    distributed_executor_backend="external_launcher",
    tensor_parallel_size=int(os.environ["WORLD_SIZE"]),
    kv_cache_memory_bytes="64M",
)
outputs = llm.generate(["Once upon a time", "The dog"], SamplingParams(temperature=0, max_tokens=16))
if os.environ["RANK"] == "0":  # every rank has the same answers: one says them
    for output in outputs:
        print(output.prompt + output.outputs[0].text)
