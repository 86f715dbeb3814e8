"""Measures two ranks with whole experts (-ep), and with experts moved by load (EPLB), beside cut experts.

python -m benchmarks.expert_parallel [--rounds 5] [--out benchmarks/results/expert_parallel.json]

The model is random, 16 experts of 2,048 features in 3 layers, with a router that has no favourites (`even`) or sends
most tokens to 4 neighbours (`skewed`), which one rank keeps until experts move. Each way is two processes, started
before anything is timed; they work in turn, a round each. Ratios are taken within a round, and their median is shown.
"""

import argparse
import json
import statistics
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.ways import Way, answering
from quintet.platforms.cpu.cpu_info import describe
from quintet.platforms.host import threads

EVERY = 100  # steps from one placement to the next: about as many as two rounds of all work
EPLB = {"enable_eplb": True, "eplb_config": {"window_size": EVERY, "step_interval": EVERY, "num_redundant_experts": 2}}
WAYS: dict[str, dict[str, Any]] = {
    "cut": {},
    "-ep": {"enable_expert_parallel": True},
    "-ep, EPLB": {"enable_expert_parallel": True, **EPLB},
}
ROUTERS = {"even": 0.0, "skewed": 16.0}  # how much more a favourite's logit is
EXPERTS, HIDDEN, FAVOURITES = 16, 512, 4
# requests, tokens of a prompt, of an output
WORK = {"one request": (1, 16, 48), "a prompt of 512 tokens": (1, 512, 1), "8 requests": (8, 32, 24)}


def make(folder: Path, favour: float) -> None:
    """Writes a checkpoint: its embeddings share a direction, along which the router prefers its first experts."""
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "vocab_size": 4096, "hidden_size": HIDDEN, "intermediate_size": HIDDEN, "moe_intermediate_size": 2048,
        "num_hidden_layers": 3, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64,
        "num_experts": EXPERTS, "num_experts_per_tok": 2, "norm_topk_prob": True, "max_position_embeddings": 1024,
    }  # fmt: skip
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes)).bfloat16()
    with torch.no_grad():
        common = torch.randn(HIDDEN).sign()
        model.model.embed_tokens.weight += 0.05 * common * bool(favour)
        for layer in model.model.layers:
            gate = layer.mlp.gate.weight
            gate *= 5
            gate -= torch.outer(gate.float() @ common, common).to(gate.dtype) / HIDDEN  # no favourites by chance
            gate[:FAVOURITES] += (favour * common / HIDDEN).to(gate.dtype)
    model.save_pretrained(folder)


def serve(way: str, folder: str) -> None:
    """In a way's own process: answers with seconds, and how even the load of the last window was."""
    from quintet import LLM, SamplingParams

    settings: dict[str, Any] = {"max_model_len": 1024, "kv_cache_memory_bytes": "64M", "enable_prefix_caching": False}
    llm = LLM(
        folder, device="cpu", skip_tokenizer_init=True, use_tqdm=False, tensor_parallel_size=2, **settings, **WAYS[way]
    )
    first = 0.0
    for _ in range(4):  # so that steps are recorded, and experts placed twice
        for name in WORK:
            _seconds(llm, name, SamplingParams)
            first = first or _balancedness(llm)
    answering(lambda work: [_seconds(llm, work, SamplingParams), first, _balancedness(llm)])


def _balancedness(llm: Any) -> float:
    """Returns the balancedness of the last window; 0 if none has ended, or nothing is counted."""
    return next(float(each.value) for each in llm.get_metrics() if each.name == "quintet:expert_balancedness")


def _seconds(llm: Any, name: str, params: Any) -> float:
    requests, prompt, output = WORK[name]
    greedy = params(temperature=0, max_tokens=output, ignore_eos=True, detokenize=False)
    prompts = [{"prompt_token_ids": [(37 * i + 11 * at) % 4096 for at in range(prompt)]} for i in range(requests)]
    start = time.perf_counter()
    llm.generate(prompts, greedy, use_tqdm=False)
    return time.perf_counter() - start


@dataclass(frozen=True)
class Rate:
    """Token rate of one way at one work, over the rounds."""

    router: str
    work: str
    way: str
    tokens_per_s: float  # the median
    of_cut: float  # times the rate of cut experts in the same round; the median
    first_balancedness: float  # of the window before experts first moved; 0: nothing is counted
    balancedness: float  # of the last window


def measure(router: str, folder: Path, rounds: int) -> list[Rate]:
    """The ways in turn."""
    ways, found = {name: Way("benchmarks.expert_parallel", name, folder) for name in WAYS}, []
    for work, (requests, prompt, output) in WORK.items():
        took = [{name: way.numbers(work) for name, way in ways.items()} for _ in range(rounds)]
        tokens = requests * (output if output > 1 else prompt)
        for name in ways:
            rate = statistics.median(tokens / each[name][0] for each in took)
            of_cut = statistics.median(each["cut"][0] / each[name][0] for each in took)
            balanced = round(took[-1][name][1], 3), round(took[-1][name][2], 3)
            found.append(Rate(router, work, name, round(rate, 1), round(of_cut, 3), *balanced))
            print(found[-1], flush=True)
    for way in ways.values():
        way.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--routers", nargs="+", choices=tuple(ROUTERS), default=tuple(ROUTERS))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--way", help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.way:
        serve(args.way, args.folder)
        return
    rates = []
    with tempfile.TemporaryDirectory() as made:
        for router in args.routers:
            make(Path(made) / router, ROUTERS[router])
            rates += measure(router, Path(made) / router, args.rounds)
    if args.out:
        head = {"date": time.strftime("%Y-%m-%d"), "cpu": describe(), "cores": threads()}
        content = {**head, "rounds": args.rounds, "rates": [asdict(each) for each in rates]}
        args.out.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
