"""One engine in one process: loads a model once, then times runs on demand, a JSON object a line.

python -m benchmarks.peers.worker '{"engine": "quintet", ...}' [--convert]      (the fields of protocol.Job)

It says {"ready": facts} or {"error": why}. To {"prompts": [[ids]], "tokens": n} it answers what Watch reports and its
peak memory, or {"error": why}; the end of its input ends it. What engines print goes to the error stream.
"""

import argparse
import importlib
import json
import os
import resource
import sys
from pathlib import Path
from typing import Any, TextIO

from benchmarks.peers.protocol import Engine, Job, Watch

ENGINES = {
    "quintet": "engine_quintet",
    "transformers": "engine_transformers",
    "llama.cpp": "engine_llama_cpp",
    "openvino": "engine_openvino",
    "vllm": "engine_vllm",
}


def peak_rss_bytes() -> int:
    """Returns this program's peak RSS; ru_maxrss, used where /proc is missing, may hold the starting process's own."""
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    line = next(line for line in status.splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024


def private_output() -> TextIO:
    """The stream of our answers; whatever else is printed from here on, by C too, goes to the error stream."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return answers


def say(answers: TextIO, message: dict[str, Any]) -> None:
    print(json.dumps(message), file=answers, flush=True)


def answer(engine: Engine, command: dict[str, Any]) -> dict[str, Any]:
    prompts, tokens = command["prompts"], command["tokens"]
    watch = Watch(len(prompts))
    engine.generate(prompts, tokens, watch)
    return {**watch.report(tokens), "peak_rss_bytes": peak_rss_bytes()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("job", type=json.loads)
    parser.add_argument("--convert", action="store_true", help="write the checkpoint in the engine's format, and end")
    args = parser.parse_args()
    job, answers = Job(**args.job), private_output()
    try:
        module = importlib.import_module(f"benchmarks.peers.{ENGINES[job.engine]}")
        if args.convert:
            module.convert(job)
            return say(answers, {"ready": {}})
        engine: Engine = module.load(job)
    except Exception as error:
        say(answers, {"error": f"{type(error).__name__}: {error}"})
        raise
    say(answers, {"ready": engine.facts})
    for line in sys.stdin:
        try:
            say(answers, answer(engine, json.loads(line)))
        except Exception as error:
            say(answers, {"error": f"{type(error).__name__}: {error}"})
            raise


if __name__ == "__main__":
    main()
