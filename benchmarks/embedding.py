"""Compares embedding with the peers that are installed here, in alternation: speed ratios.

python benchmarks/embedding.py --work FOLDER --peer onnxruntime=A/bin/python --peer openvino=A/bin/python \\
    --peer llama.cpp=B/bin/python --json benchmarks/results/embedding.json

    python -m venv A && A/bin/pip install openvino nncf onnx onnxscript onnxruntime sentence-transformers
    python -m venv B && CMAKE_ARGS=-DGGML_NATIVE=ON B/bin/pip install llama-cpp-python gguf safetensors

Random-weight checkpoints of real shapes; every text of a call has the same length, so that no engine pads. Each
engine with a weight format is a process that loads the model once and then waits. A round asks each of them once while
the others sleep, and the next goes in opposite order. Ratios are taken within rounds, to the best peer of these bits.
"""

import argparse
import json
import os
import platform
import random
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402  the path is set first, so that the script runs by itself
import torch  # noqa: E402

from benchmarks.peers.client import Worker, WorkerError  # noqa: E402
from benchmarks.peers.protocol import Job  # noqa: E402

SHAPES: dict[str, dict[str, int]] = {
    "minilm-l6": {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12, "intermediate_size": 1536},
    "bge-base": {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072},
}
FORMATS: dict[str, dict[str, list[str]]] = {
    "float32": {
        "quintet": ["float32"],
        "sentence-transformers": ["float32"],
        "onnxruntime": ["float32"],
        "openvino": ["float32"],
        "llama.cpp": ["F32"],
    },
    "bfloat16": {
        "quintet": ["bfloat16"],
        "sentence-transformers": ["bfloat16"],
        "openvino": ["bfloat16"],
        "llama.cpp": ["F16", "BF16"],
    },
    "int8": {
        "quintet": ["bfloat16:w8a8"],
        "onnxruntime": ["int8"],
        "openvino": ["int8"],
        "llama.cpp": ["Q8_0"],
    },
}
TEXTS, TOKENS = (1, 8, 64), (16, 128, 512)
# cosine to ours, of the same weights and text: an engine that computes something else is not compared
ALIKE = {"float32": 0.9999, "bfloat16": 0.99, "int8": 0.9}


def checkpoint(name: str, work: Path) -> Path:
    """BERT with random weights, of these sizes."""
    from transformers import BertConfig, BertModel, BertTokenizerFast

    folder = work / name
    if not (folder / "model.safetensors").exists():
        torch.manual_seed(0)
        BertModel(BertConfig(**SHAPES[name]), add_pooling_layer=False).eval().save_pretrained(folder)
        words = folder / "vocab.txt"  # Sentence Transformers needs a tokenizer, and never uses it
        words.write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]))
        BertTokenizerFast(vocab=str(words)).save_pretrained(folder)
    return folder


def rounds(
    workers: dict[str, Worker], cases: list[tuple[int, int]], count: int, seconds: float, alike: float
) -> dict[str, Any]:
    """Milliseconds of each engine, round by round, and whether its vectors are ours."""
    draw = random.Random(0)
    found: dict[str, Any] = {}
    for texts, tokens in cases:
        ids = [[draw.randrange(1000, 20000) for _ in range(tokens)] for _ in range(texts)]
        took: dict[str, list[float]] = {name: [] for name in workers}
        vectors: dict[str, Any] = {}
        for number in range(count):
            for name in list(workers)[:: 1 if number % 2 == 0 else -1]:
                answer = workers[name].ask({"texts": ids, "seconds": seconds})
                took[name].append(1e3 * statistics.median(answer["took"]))
                vectors[name] = np.array(answer["vector"])
        ours = next(iter(vectors.values()))
        wrong = [name for name, each in vectors.items() if float(each @ ours) < alike]
        if wrong:
            raise SystemExit(f"{texts} x {tokens}: {', '.join(wrong)} gave other vectors, so nothing is compared")
        found[f"{texts} x {tokens}"] = took
        print(row(f"{texts} x {tokens}", took), flush=True)
    return found


def row(case: str, took: dict[str, list[float]]) -> str:
    """One line: milliseconds, and the ratio to the best peer."""
    figures = "  ".join(f"{name} {statistics.median(each):8.2f}" for name, each in took.items())
    ours, *peers = took.values()
    if not peers:
        return f"{case:>9}: {figures}"
    ratios = [min(others) / mine for mine, *others in zip(ours, *peers, strict=True)]
    return f"{case:>9}: {figures}  ratio {statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="where checkpoints and what is made of them lie")
    parser.add_argument("--peer", action="append", default=[], help="ENGINE=PYTHON of the environment that holds it")
    parser.add_argument("--model", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--bits", nargs="+", choices=FORMATS, default=list(FORMATS))
    parser.add_argument("--texts", nargs="+", type=int, default=TEXTS)
    parser.add_argument("--tokens", nargs="+", type=int, default=TOKENS)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=0.5, help="of each engine in a round")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    python = {"quintet": sys.executable, "sentence-transformers": sys.executable}
    python |= dict(each.split("=", 1) for each in args.peer)
    args.work.mkdir(parents=True, exist_ok=True)
    cases = [(texts, tokens) for texts in args.texts for tokens in args.tokens]
    results: dict[str, Any] = {"machine": machine(args.threads), "milliseconds": {}}
    for model in args.model:
        folder = checkpoint(model, args.work)
        for bits in args.bits:
            workers = started(bits, folder, args, python)
            print(f"{model}, {bits}, milliseconds a call:")
            try:
                found = rounds(workers, cases, args.rounds, args.seconds, ALIKE[bits])
                results["milliseconds"][f"{model} {bits}"] = found
            finally:
                for worker in workers.values():
                    worker.close()
            if args.json:
                args.json.write_text(json.dumps(results, indent=1) + "\n")


def started(bits: str, folder: Path, args: argparse.Namespace, python: dict[str, str]) -> dict[str, Worker]:
    """Every engine and format that can be had, ours first."""
    workers: dict[str, Worker] = {}
    for engine, variants in FORMATS[bits].items():
        for variant in variants if engine in python else []:
            job = Job(engine, bits, variant, str(folder), str(args.work), args.threads)
            log = args.work / f"{engine}-{variant.replace(':', '-')}.log"
            try:
                made = Worker(job, python[engine], log, module="benchmarks.peers.embedders").ready()
            except WorkerError as error:
                print(f"{engine} {variant}: {error}", flush=True)
                continue
            workers[f"{engine} {variant}"] = made
    return workers


def machine(threads: int) -> dict[str, Any]:
    """Returns the machine and the commit that the figures were measured with."""
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip()
    from quintet import _cpu

    return {
        "processor": platform.processor() or platform.machine(),
        "isa": _cpu.isa(),
        "threads": threads,
        "commit": commit,
    }


if __name__ == "__main__":
    main()
