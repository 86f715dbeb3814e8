"""Measures whole generations on a GPU through `LLM`, beside transformers' generate() of the same shape.

python benchmarks/gpu_generate.py [--shape llama-3.2-1b] [--requests 1 16 64] [--tokens 64] [--results FILE]

Random weights of a real shape, prompts of 512 token ids, greedy, ends of sequences ignored. Tokens per second are those
that are generated; the time includes the prompts. transformers runs the same requests in one batch.
"""

import argparse
import gc
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch  # the path is set first, so that the script runs by itself

from benchmarks.gpu import SHAPES, TRIED, waiting
from quintet import LLM, SamplingParams
from scripts.on_gpu.jobs import note

PROMPT = 512  # tokens


def prompts(requests: int, count: int) -> list[list[int]]:
    """Different from the first token on, so that no prefix is shared."""
    return [[(7 * at + 13 * request) % 500 + 1 for at in range(count)] for request in range(requests)]


def _report(  # noqa: PLR0913  # one line of results
    tell: Callable[..., None], by: str, shape: str, turn: str, requests: int, tokens: int, seconds: float
) -> None:
    figures = {"requests": requests, "seconds": round(seconds, 3), "tokens_s": round(requests * tokens / seconds)}
    print(by, turn, figures, flush=True)
    tell(kind="generate", by=by, shape=shape, turn=turn, **figures)


def ours(shape: str, device: str, counts: list[int], tokens: int, tell: Callable[..., None]) -> None:
    from transformers import AutoConfig

    folder = tempfile.mkdtemp(prefix="quintet-shape-")
    AutoConfig.for_model(**{"model_type": "llama", **SHAPES[shape]}, dtype="bfloat16").save_pretrained(folder)
    llm = LLM(
        folder, device=device, dtype="bfloat16", load_format="dummy", skip_tokenizer_init=True, max_model_len=1024,
        max_num_seqs=max(counts), use_tqdm=False, enable_prefix_caching=False,
    )  # fmt: skip
    length = PROMPT if shape != TRIED else 40
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
    for requests in counts:
        asked = [{"prompt_token_ids": each} for each in prompts(requests, length)]
        for turn in ("cold", "warm"):
            start = time.perf_counter()
            got = llm.generate(asked, params, use_tqdm=False)
            seconds = time.perf_counter() - start
            assert all(len(each.outputs[0].token_ids) == tokens for each in got)
            _report(tell, "quintet", shape, turn, requests, tokens, seconds)
    del llm


def theirs(shape: str, device: str, counts: list[int], tokens: int, tell: Callable[..., None]) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(**{"model_type": "llama", **SHAPES[shape]}, dtype="bfloat16")
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa").eval()
    wait, length = waiting(torch.device(device)), PROMPT if shape != TRIED else 40
    for requests in counts:
        ids = torch.tensor(prompts(requests, length), device=device)
        more: dict[str, Any] = {"do_sample": False, "max_new_tokens": tokens, "min_new_tokens": tokens}
        for turn in ("cold", "warm"):
            start = time.perf_counter()
            with torch.inference_mode():
                model.generate(ids, attention_mask=torch.ones_like(ids), pad_token_id=0, eos_token_id=None, **more)
            wait()
            seconds = time.perf_counter() - start
            _report(tell, "transformers", shape, turn, requests, tokens, seconds)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="llama-3.2-1b")
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--tokens", type=int, default=64, help="of each request")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--results", type=Path, help="a file that gets a line for each figure")
    args = parser.parse_args()
    tell = partial(note, args.results) if args.results else lambda **values: None
    failed = 0
    for measure in (ours, theirs):
        try:
            measure(args.shape, args.device, args.requests, args.tokens, tell)
        except Exception as error:  # the other one's figures are still wanted
            failed += 1
            print(f"{measure.__name__}: {type(error).__name__}: {error}", flush=True)
            tell(kind="failed", by=measure.__name__, why=f"{type(error).__name__}: {error}"[:300])
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
