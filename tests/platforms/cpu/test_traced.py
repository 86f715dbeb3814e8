"""Traces on the CPU: every kernel of every step is in them, and what is said stays the same to the bit."""

import gzip
import json
from pathlib import Path
from typing import Any

from quintet import LLM, SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=24, logprobs=3)
DRAWN = SamplingParams(temperature=1.0, seed=5, max_tokens=24, logprobs=3)
PROMPTS = ["Once upon a time", "The dog", "A"]


def said(llm: LLM) -> list[Any]:
    outputs = llm.generate(PROMPTS, [GREEDY, DRAWN, GREEDY], use_tqdm=False)
    return [(each.outputs[0].token_ids, each.outputs[0].logprobs) for each in outputs]


def test_kernels_are_told_and_no_bit_changes(tmp_path: Path) -> None:
    config = {"profiler": "torch", "torch_profiler_dir": str(tmp_path), "torch_profiler_record_shapes": True}
    with LLM("bundled", device="cpu", use_tqdm=False, profiler_config=config, enable_prefix_caching=False) as llm:
        before = said(llm)
        llm.start_profile()
        traced = said(llm)
        path = llm.stop_profile()
        after = said(llm)
        layers = llm._client.engine_plan.hf_config.num_hidden_layers
    assert before == traced == after
    trace = json.loads(gzip.decompress(Path(path).read_bytes()))
    steps = trace["otherData"]["steps"]
    assert steps == 24 and trace["otherData"]["how steps ran"].startswith("eagerly, one kernel after the other")
    ops = [each for each in trace["traceEvents"] if each.get("cat") == "op"]
    attention = [each for each in ops if each["name"] == "paged_attention"]
    assert len(attention) == steps * layers, "those of steps that are recorded without a trace, too"
    assert all(each["args"]["provider"] and each["args"]["shapes"] for each in attention)
    assert {each["cat"] for each in trace["traceEvents"] if "cat" in each} == {"engine", "op", "torch"}
