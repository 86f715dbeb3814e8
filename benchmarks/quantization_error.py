"""What quantization does to a model's next-token distributions, against the same model as its checkpoint holds it.

    python -m benchmarks.quantization_error                 # the bundled model on its own test conversations
    python -m benchmarks.quantization_error --scheme int4 --group 64 --text FILE --model FOLDER

Every scheme sees the same tokens: the prompts and the unquantized model's greedy answers, or the text of a file. Per
position: the Kullback-Leibler divergence of the quantized model's distribution from the unquantized one's, in nats, and
whether both have the same likeliest token.
"""

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from quintet import LLM, SamplingParams
from quintet.config import BUNDLED, SCHEMES, EngineConfig
from quintet.conformance.laid import Stretch, laid
from quintet.engine.start import prepare

CASES = Path(__file__).parent.parent / "tests" / "e2e" / "bundled_cases.json"
LONGEST = 512  # tokens of one sequence


@dataclass(frozen=True)
class Divergence:
    """Over all positions of all sequences."""

    mean: float  # nats
    p99: float
    worst: float
    same: float  # share of positions with the same likeliest token
    positions: int

    def __str__(self) -> str:
        return (
            f"KL mean {self.mean:.5f}  p99 {self.p99:.4f}  worst {self.worst:.3f} nats, "
            f"same top-1 {self.same:.2%} of {self.positions} positions"
        )


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


def logits(config: EngineConfig, rows: list[list[int]]) -> Iterator[Tensor]:
    """[T, V] float32 for each sequence, straight from the step."""
    prepared = prepare(config)
    worker, size = prepared.ranks.workers[0], config.page_size
    pages, groups = -(-LONGEST // size), worker.arrangement.groups
    worker.load(prepared.folder, pages * len(groups) + 1, (), progress=False)
    own = [range(1 + pages * index, 1 + pages * (index + 1)) for index in range(len(groups))]
    for ids in rows:
        logits = worker.run(laid([Stretch(ids, 0, own)], size, [kept.window for kept in groups])).logits
        assert logits is not None
        yield worker.device.to_host(logits)().float().clone()


def divergence(config: EngineConfig, rows: list[list[int]]) -> Divergence:
    """Of the config's model from the same without quantization."""
    plain = config.replace(quantization=None, quantization_group_size=None)
    divergences, same = [], []
    for want, got in zip(logits(plain, rows), logits(config, rows), strict=True):
        p, q = want.double().log_softmax(-1), got.double().log_softmax(-1)
        divergences.append((p.exp() * (p - q)).sum(-1))
        same.append(want.argmax(-1) == got.argmax(-1))
    each, agreed = torch.cat(divergences), torch.cat(same)
    return Divergence(
        mean=each.mean().item(),
        p99=each.quantile(0.99).item(),
        worst=each.max().item(),
        same=agreed.double().mean().item(),
        positions=len(each),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=BUNDLED)
    parser.add_argument("--scheme", action="append", choices=SCHEMES, help="may be repeated; all if not given")
    parser.add_argument("--group", type=int, help="inputs that share a scale, where the scheme has groups")
    parser.add_argument("--text", type=Path, help="a file to look at, instead of the bundled conversations")
    args = parser.parse_args()
    rows = sequences(args.model, args.text)
    for scheme in args.scheme or SCHEMES:
        group = None if scheme == "w8a8" else args.group
        config = EngineConfig(args.model, device="cpu", quantization=scheme, quantization_group_size=group)
        print(f"{scheme:5} {'' if group is None else group}", divergence(config.replace(max_model_len=LONGEST), rows))


if __name__ == "__main__":
    main()
