"""Measures decoding after a long prompt, and the memory that it takes: quintet beside llama.cpp.

    python benchmarks/long_context.py --work FOLDER --llama A/bin/python

    python benchmarks/long_context.py --work FOLDER --llama A/bin/python --model deepseek-v2-lite-3-layers \\
        --tokens 2048 --settings "quintet int4" "llama.cpp Q4_0"

Gemma 3's shapes by default: a cache can save on their windows. Every setting is a process that computes the
prompt once and then waits; a round has each of them decode a few tokens more, and the next goes in the opposite order.
llama.cpp keeps of its windows what they need (swa_full=False) and computes with flash attention.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.peers.protocol import Job  # noqa: E402  the path is set first, so that the script runs by itself

SPARE = 1024  # tokens to decode, at most
MIB = 2**20
SETTINGS = ("quintet bf16", "quintet int8", "llama.cpp F16", "llama.cpp Q8_0")

Tokens = Iterator[int]
Opened = tuple[Callable[[list[int]], Tokens], Callable[[], float]]  # a prompt's tokens as they come; MiB of the cache


def resident_mib() -> float:
    """Returns this process's memory without mapped files: weights used in place are not counted twice."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(status["RssAnon"].split()[0]) / 1024


# ------------------------------------------------------------------------------------------------- the engines


def open_quintet(job: Job, length: int) -> Opened:
    """With as many pages as the request takes."""
    from quintet import LLM, SamplingParams

    scheme = None if job.variant == "bf16" else job.variant
    pages = {"num_pages": _pages(job.checkpoint, length), "max_num_seqs": 1, "enable_prefix_caching": False}
    llm = LLM(
        job.checkpoint, dtype="bfloat16", device="cpu", quantization=scheme, max_model_len=length,
        skip_tokenizer_init=True, use_tqdm=False, **pages,
    )  # fmt: skip
    worker = llm._client.engine_plan.ranks.workers[0]
    params = SamplingParams(temperature=0, max_tokens=SPARE, ignore_eos=True, detokenize=False)

    def tokens(prompt: list[int]) -> Tokens:
        for output in llm.stream([prompt], params):
            yield from output.outputs[0].token_ids

    return tokens, lambda: pages["num_pages"] * worker.kv_cache_layout.page_bytes / MIB


def _pages(checkpoint: str, length: int) -> int:
    import torch

    from quintet import EngineConfig
    from quintet.engine.executor.model_part import ModelSizes
    from quintet.engine.executor.worker import Worker
    from quintet.hub.resolve import load_model_config
    from quintet.platforms import choose

    size = EngineConfig().page_size
    sizes = ModelSizes(torch.bfloat16, size, length)
    worker = Worker(choose("null").platform(), load_model_config(Path(checkpoint)), sizes)
    return worker.kv_cache_layout.max_pages(length, size, EngineConfig().step_tokens) + 1


def open_llama(job: Job, length: int) -> Opened:
    """Its own buffers' sizes are what it says when it makes them."""
    import llama_cpp

    from benchmarks.peers.engine_llama_cpp import Entry, LlamaCpp

    class Long(LlamaCpp):
        def _context(self, sequences: int) -> Any:
            if sequences not in self._contexts:
                params = llama_cpp.llama_context_default_params()
                params.n_ctx, params.n_batch, params.n_seq_max, params.swa_full = length, 2048, 1, False
                params.n_threads = params.n_threads_batch = self._threads
                params.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_ENABLED
                self._contexts[sequences] = llama_cpp.llama_init_from_model(self._model, params)
            return self._contexts[sequences]

    engine, said = Long(job), []
    listen = llama_cpp.llama_log_callback(lambda level, text, data: said.append(text.decode()))
    llama_cpp.llama_log_set(listen, None)

    def tokens(prompt: list[int]) -> Tokens:
        entries = [Entry(token, place, 0, place == len(prompt) - 1) for place, token in enumerate(prompt)]
        for place in range(len(prompt), length):
            best = engine._decode(engine._context(1), entries)[0]
            yield best
            entries = [Entry(best, place, 0, True)]

    def cache() -> float:
        assert listen is not None  # for as long as it is called
        sizes = [line.split("size =")[1].split()[0] for line in "".join(said).splitlines() if "KV buffer size" in line]
        return sum(map(float, sizes))

    return tokens, cache


def serve(job: Job, length: int) -> None:
    """A JSON object a line: to a prompt its first token's seconds, to a number those of so many more tokens."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    if job.engine == "llama.cpp":
        from benchmarks.peers import engine_llama_cpp

        engine_llama_cpp.convert(job)
    start, cache = (open_llama if job.engine == "llama.cpp" else open_quintet)(job, length)
    loaded = resident_mib()
    print("{}", file=answers, flush=True)
    tokens: Tokens = iter(())
    for line in sys.stdin:
        asked = json.loads(line)
        count = asked if isinstance(asked, int) else 1
        tokens = tokens if isinstance(asked, int) else start(asked)
        begin = time.perf_counter()
        said = [next(tokens) for _ in range(count)]
        took = time.perf_counter() - begin
        told = {"seconds": took, "tokens": said, "cache_mib": cache(), "loaded_mib": loaded, "mib": resident_mib()}
        print(json.dumps(told), file=answers, flush=True)


# ------------------------------------------------------------------------------------------------ the comparison


class Side:
    """The process of one setting."""

    def __init__(self, job: Job, interpreter: str, length: int) -> None:
        command = [interpreter, __file__, "--serve", json.dumps(vars(job)), "--tokens", str(length)]
        environment, pipe = {**os.environ, "OMP_NUM_THREADS": str(job.threads)}, subprocess.PIPE
        with (Path(job.work) / "long_context.log").open("a") as log:
            self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=log, env=environment, text=True)
        self._answer()  # loaded

    def ask(self, what: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        print(json.dumps(what), file=self._process.stdin, flush=True)
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"it ended with status {self._process.wait()}; long_context.log says why")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


def compare(sides: dict[str, Side], prompt: list[int], rounds: int, tokens: int) -> dict[str, dict[str, Any]]:
    """Returns, for each setting, the seconds of its prompt, tokens a second in every round, and its memory."""
    found: dict[str, dict[str, Any]] = {}
    for name, side in sides.items():
        first = side.ask(prompt)
        found[name] = {"prompt_s": first["seconds"], "said": first["tokens"], "rates": []}
        print(f"{name}: {len(prompt)} tokens in {first['seconds']:.1f} s", file=sys.stderr, flush=True)
    for index in range(rounds + 1):
        for name in list(sides) if index % 2 else list(sides)[::-1]:
            told = sides[name].ask(tokens)
            found[name]["said"] += told.pop("tokens")
            if index:  # the first round only wakes up processes that slept
                found[name]["rates"].append(tokens / told.pop("seconds"))
            found[name] |= {key: round(told[key], 1) for key in ("cache_mib", "loaded_mib", "mib")}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="gemma-3-1b-6-layers")
    parser.add_argument("--work", type=Path, help="folder for converted checkpoints and logs; it is kept")
    parser.add_argument("--llama", default=sys.executable, help="python of an environment with llama-cpp-python")
    parser.add_argument("--tokens", type=int, default=32768, help="of context")
    parser.add_argument("--settings", nargs="*", default=SETTINGS, metavar='"ENGINE FORMAT"', help=", ".join(SETTINGS))
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path, help="write the figures to this file too")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        return serve(Job(**json.loads(args.serve)), args.tokens)
    from benchmarks.checkpoints import checkpoint
    from benchmarks.compare import machine

    folder, work = checkpoint(args.model), args.work.resolve()
    prompt = [(place * 104729) % 30000 + 10 for place in range(args.tokens)]
    sides = {}
    for name in args.settings:
        engine, variant = name.split()
        job = Job(engine, "", variant, str(folder), str(work), args.threads)
        sides[name] = Side(job, args.llama if engine == "llama.cpp" else sys.executable, args.tokens + SPARE)
    try:
        found = compare(sides, prompt, args.rounds, 16)
    finally:
        for side in sides.values():
            side.close()
    ours, theirs = ([name for name in found if name.startswith(engine)] for engine in ("quintet", "llama.cpp"))
    for name in ours:
        pairs = {
            peer: [a / b for a, b in zip(found[name]["rates"], found[peer]["rates"], strict=True)] for peer in theirs
        }
        found[name]["ratios"] = {
            peer: {"median": statistics.median(each), "least": min(each), "most": max(each)}
            for peer, each in pairs.items()
        }
    for name, each in found.items():
        each["tokens_per_s"] = round(statistics.median(each["rates"]), 2)
        memory = f"cache {each['cache_mib']:.0f} MiB, {each['mib'] - each['loaded_mib']:.0f} more than without context"
        print(f"{name:16} {each['tokens_per_s']:6.1f} tokens/s, {memory}")
    if args.json:
        told = {"date": time.strftime("%Y-%m-%d"), "model": args.model, "tokens": args.tokens, "machine": machine()}
        args.json.write_text(json.dumps({**told, "settings": found}, indent=2) + "\n")


if __name__ == "__main__":
    main()
