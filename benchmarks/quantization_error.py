"""Measures how quantization changes a model's next-token distributions, against the model as its checkpoint holds it.

    python -m benchmarks.quantization_error                 # the bundled model on its own test conversations
    python -m benchmarks.quantization_error --scheme int4 --group 64 --text FILE --model FOLDER

Every scheme sees the same tokens: the prompts and the unquantized model's greedy answers, or the text of a file. Per
position: the Kullback-Leibler divergence of the quantized model's distribution from the unquantized one's, in nats, and
whether both have the same likeliest token.
"""

import argparse
import json
from pathlib import Path

from quintet import LLM, SamplingParams
from quintet.config import BUNDLED, SCHEMES, EngineConfig
from quintet.conformance.divergence import divergence

CASES = Path(__file__).parent.parent / "tests" / "e2e" / "bundled_cases.json"
LONGEST = 512  # tokens of one sequence


def sequences(model: str, text: Path | None) -> list[list[int]]:
    """Token ids to look at."""
    llm = LLM(model, device="cpu", max_model_len=LONGEST, use_tqdm=False)
    tokenizer = llm.get_tokenizer()
    if text is not None:
        ids = tokenizer.encode(text.read_text())
        return [ids[start : start + LONGEST] for start in range(0, len(ids), LONGEST)]
    messages = [case["messages"] for case in json.loads(CASES.read_text())]
    found = llm.chat(messages, SamplingParams(temperature=0, max_tokens=128), use_tqdm=False)
    return [[*output.prompt_token_ids, *output.outputs[0].token_ids] for output in found]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=BUNDLED)
    parser.add_argument("--scheme", action="append", choices=SCHEMES, help="may be repeated; all if not given")
    parser.add_argument("--group", type=int, help="inputs that share a scale, where the scheme has groups")
    parser.add_argument("--activation-bits", type=int, choices=(8, 16), help="what activations are rounded to")
    parser.add_argument("--text", type=Path, help="a file to look at, instead of the bundled conversations")
    args = parser.parse_args()
    rows = sequences(args.model, args.text)
    plain = EngineConfig(args.model, device="cpu", max_model_len=LONGEST)
    for scheme in args.scheme or SCHEMES:
        group = None if scheme == "w8a8" else args.group
        config = plain.replace(quantization=scheme, quantization_group_size=group, activation_bits=args.activation_bits)
        print(f"{scheme:5} {'' if group is None else group}", divergence(plain, config, rows))


if __name__ == "__main__":
    main()
