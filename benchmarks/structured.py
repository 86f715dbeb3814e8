"""Measures structured output: the mask of each token, a batch beside one without, and a new schema.

python benchmarks/structured.py [--model qwen3-0.6b] [--out benchmarks/results/structured.json]

Batches with and without run in turn, in one process, so that a busy machine slows both; a ratio is the median of its
rounds. The vocabulary has 151,936 tokens of one to three bytes, of any kind: more of them fit than of a real one.
Masks are of a document that is written as JSON is, and of one that is drawn at random from them, which costs more.
"""

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
from cpuinfo import get_cpu_info

from benchmarks.checkpoints import checkpoint, small, with_tokenizer  # the path is set first: the script runs by itself
from benchmarks.engine_step import LARGE, SHAPE
from quintet import LLM, SamplingParams, StructuredOutputsParams
from quintet.config import StructuredOutputsConfig
from quintet.engine import step_output as answers
from quintet.engine.request import CoreRequest, Request
from quintet.platforms.cpu.cpu_info import describe
from quintet.platforms.host import threads
from quintet.server.processes.grammar_checks import GrammarChecks
from quintet.structured_output.grammar import GrammarCompiler, MaskFiller, Matcher
from quintet.tokenizers.tokenizer import Tokenizer, load_tokenizer

RESULTS = Path(__file__).parent / "results"
EOS = 2
ROWS = 64
TOKENS = 24  # of each request in a round
ROUNDS = 5
DOCUMENT = [{"name": f"item {place}", "size": place % 1000} for place in range(200)]


@dataclass(frozen=True)
class Masks:
    """Microseconds for each row and token: the matcher takes the last token and fills the mask of the next."""

    document: str
    rows: int
    median_us: float
    mean_us: float


@dataclass(frozen=True)
class Batch:
    """Tokens a second of requests that decode together, and the share of those without a shape.

    drawn: each token is, also where the shape leaves no other; shaped: as it is served.
    """

    model: str
    rows: int
    shaped: float
    drawn: float
    plain: float
    ratio: float  # of shaped to plain, the median of the rounds'
    ratio_drawn: float


@dataclass(frozen=True)
class Delay:
    """Milliseconds until an answer of this shape may begin: tried, and compiled for the vocabulary."""

    schema_bytes: int
    first_ms: float  # with the processes that try it already there
    known_ms: float


def masks(tokenizer: Tokenizer, rows: int, pick: Callable[[int, Any], int], document: str) -> Masks:
    grammars = GrammarCompiler(lambda: tokenizer, LARGE, [EOS])
    text = grammars.compile_and_wait(StructuredOutputsParams(**SHAPE))
    requests = [Request(CoreRequest(str(row), [0], SamplingParams(), (0, row), 1000)) for row in range(rows)]
    matchers = [grammars.matcher(text) for _ in requests]
    bits = np.zeros((rows, -(-LARGE // 32)), np.int32)
    times, fill_masks = [], MaskFiller()
    for place in range(120):
        choices: list[tuple[Matcher, int]] = []
        start = time.perf_counter()
        for row, (request, matcher, words) in enumerate(zip(requests, matchers, bits, strict=True)):
            if why := matcher.advance(request):
                raise RuntimeError(why)
            if matcher.fill(words) is not None:
                choices.append((matcher, row))
        fill_masks(choices, bits)
        times.append((time.perf_counter() - start) * 1e6 / rows)
        for request, words in zip(requests, bits, strict=True):
            request.append_sampled(pick(place, words))
    grammars.close()
    return Masks(document, rows, round(statistics.median(times[20:]), 1), round(statistics.mean(times[20:]), 1))


def with_end(folder: Path, target: Path) -> Path:
    """The same model in another folder, with an end-of-text token, which an answer with a shape needs."""
    for file in folder.iterdir():
        (target / file.name).symlink_to(file)
    (target / "generation_config.json").unlink(missing_ok=True)
    (target / "generation_config.json").write_text(json.dumps({"eos_token_id": EOS}))
    return target


def batch(folder: Path, model: str) -> Batch:
    settings: dict[str, Any] = {"max_model_len": 512, "max_num_seqs": ROWS, "kv_cache_memory_bytes": "4G"}
    llm = LLM(str(folder), device="cpu", use_tqdm=False, **settings)
    prompts = [{"prompt_token_ids": [300 + row, 7, 8, 9]} for row in range(ROWS)]

    def run(**shape: Any) -> float:
        params = SamplingParams(temperature=1.0, seed=1, max_tokens=TOKENS, ignore_eos=True, detokenize=False, **shape)
        start = time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        return sum(len(each.outputs[0].token_ids) for each in outputs) / (time.perf_counter() - start)

    def drawn() -> float:
        most, answers.MAX_JUMP = answers.MAX_JUMP, 0
        try:
            return run(structured_outputs=SHAPE)
        finally:
            answers.MAX_JUMP = most

    run(), run(structured_outputs=SHAPE)
    rounds = [(run(structured_outputs=SHAPE), drawn(), run()) for _ in range(ROUNDS)]
    llm.close()
    medians = [round(statistics.median(column), 1) for column in zip(*rounds, strict=True)]
    ratios = [round(statistics.median(each[place] / each[2] for each in rounds), 3) for place in (0, 1)]
    return Batch(model, ROWS, *medians, *ratios)


async def delay(tokenizer: Tokenizer) -> Delay:
    shapes, grammars = (
        GrammarChecks(StructuredOutputsConfig()),
        GrammarCompiler(lambda: tokenizer, LARGE, [EOS], is_checked=True),
    )
    grammars.warm()

    def schema(number: int) -> dict[str, Any]:
        kinds = [
            {"type": "string", "maxLength": 20},
            {"type": "integer", "minimum": number},
            {"enum": ["a", "b", None]},
        ]
        fields = {f"field_{number}_{place}": kinds[place % 3] for place in range(40)}
        return {"type": "object", "properties": fields, "required": list(fields)[::2], "additionalProperties": False}

    async def once(number: int) -> float:
        start = time.perf_counter()
        text = await shapes.grammar(StructuredOutputsParams(json=schema(number)))
        if why := grammars.matcher(text).wait():
            raise RuntimeError(why)
        return (time.perf_counter() - start) * 1e3

    await once(0)
    first = statistics.median([await once(number) for number in range(1, 20)])
    known = statistics.median([await once(number) for number in range(1, 20)])
    shapes.close(), grammars.close()
    return Delay(len(json.dumps(schema(1))), round(first, 2), round(known, 2))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen3-0.6b")
    parser.add_argument("--out", type=Path, default=RESULTS / "structured.json")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = load_tokenizer(with_tokenizer(small(Path(folder), LARGE)))
    written = tokenizer.encode(json.dumps(DOCUMENT, separators=(",", ":")), add_special_tokens=False)
    rng = np.random.default_rng(0)

    def drawn(place: int, words: Any) -> int:
        return int(rng.choice(np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))))

    found: list[Any] = [
        masks(tokenizer, rows, lambda place, _: written[place], "as JSON is written") for rows in (1, ROWS)
    ]
    found += [masks(tokenizer, rows, drawn, "drawn at random") for rows in (1, ROWS)]
    found.append(asyncio.run(delay(tokenizer)))
    with tempfile.TemporaryDirectory() as folder:
        found.append(batch(with_end(with_tokenizer(checkpoint(given.model)), Path(folder)), given.model))
    for each in found:
        print(each)
    report = {
        "processor": get_cpu_info().get("brand_raw"),
        "cpu": describe(),
        "threads": threads(),
        "found": [{type(e).__name__: asdict(e)} for e in found],
    }
    given.out.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
