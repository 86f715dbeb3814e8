"""Every way to a quantized model: KL divergence, perplexity and bytes, into benchmarks/results/quantize.json.

    python -m benchmarks.quantize                                   # the bundled model
    python -m benchmarks.quantize --model FOLDER --calibration FILE --evaluate FILE

The bundled model is calibrated and compared on conversations drawn from the generators that it was trained on, with
seeds of their own. Results of other models and columns that others measured stay in the file.
"""

import argparse
import json
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from quintet.config import BUNDLED, SCHEMES, EngineConfig
from quintet.conformance.divergence import divergence
from quintet.hub.resolve import resolve_model
from quintet.quantize.config import QuantizeConfig
from quintet.quantize.eval_text import held_out
from quintet.quantize.quantize import quantize
from quintet.tokenizers.tokenizer import load_tokenizer

RESULTS = Path(__file__).parent / "results" / "quantize.json"
WRITTEN = {  # our name for it -> how it is written
    "W8A16": {"scheme": "W8A16"},
    "W8A8": {"scheme": "W8A8"},
    "FP8_DYNAMIC": {"scheme": "FP8_DYNAMIC"},
    "FP8_BLOCK": {"scheme": "FP8_BLOCK"},
    "W4A16 rtn": {"scheme": "W4A16"},
    "W4A16 gptq": {"scheme": "W4A16", "method": "gptq"},
    "W4A16 gptq, act-order": {"scheme": "W4A16", "method": "gptq", "act_order": True},
    "W4A16 awq": {"scheme": "W4A16", "method": "awq"},
    "W4A16_ASYM rtn": {"scheme": "W4A16_ASYM"},
    "W4A16_ASYM awq": {"scheme": "W4A16_ASYM", "method": "awq"},
    "W4A8 gptq": {"scheme": "W4A8", "method": "gptq"},
}


def conversations(folder: Path, seed: int, count: int) -> Path:
    """A file with so many of the bundled model's kind."""
    from scripts.bundled.samples import draw_sample, render, source

    tokenizer, drawn = load_tokenizer(resolve_model(EngineConfig(BUNDLED))).hf, source(seed)
    file = folder / f"{seed}.jsonl"
    texts = [render(draw_sample(drawn), tokenizer)[0].removeprefix(tokenizer.bos_token) for _ in range(count)]
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return file


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=BUNDLED)
    parser.add_argument("--calibration", type=Path)
    parser.add_argument("--evaluate", type=Path)
    parser.add_argument("--only", action="append", help="one of the names in the file; may be repeated")
    parser.add_argument("--num-samples", type=int, default=64)
    parser.add_argument("--sequence-length", type=int, default=256)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as home:
        folder = Path(home)
        args.calibration = args.calibration or conversations(folder, 7, 400)
        args.evaluate = args.evaluate or conversations(folder, 1007, 80)
        before = EngineConfig(args.model, device="cpu")
        rows = held_out(before, str(args.evaluate), 16, 512)
        for name in args.only or [*SCHEMES, *WRITTEN]:
            keep(args.model, name, measured(name, before, rows, args, folder))


def measured(name: str, before: EngineConfig, rows: list[list[int]], args: Any, folder: Path) -> dict[str, Any]:
    if name in SCHEMES:
        return asdict(divergence(before, before.replace(quantization=name), rows))
    text = {"calibration": str(args.calibration)} if "method" in WRITTEN[name] else {}
    sizes = {"num_samples": args.num_samples, "sequence_length": args.sequence_length}
    asked = QuantizeConfig(output=str(folder / name.replace(" ", "-")), **WRITTEN[name], **text, **sizes)  # type: ignore[arg-type]
    done = quantize(args.model, asked, progress=False)
    found = asdict(divergence(before, before.replace(model=str(done.folder)), rows))
    return {**found, "bytes": done.bytes_after, "bytes_before": done.bytes_before, "seconds": round(done.seconds, 1)}


def keep(model: str, name: str, found: dict[str, Any]) -> None:
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    of_model = results.setdefault(model, {})
    of_model[name] = {**of_model.get(name, {}), **found}
    RESULTS.write_text(json.dumps(results, indent=2) + "\n")
    print(name, found, flush=True)


if __name__ == "__main__":
    main()
