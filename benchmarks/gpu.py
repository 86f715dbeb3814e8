"""Measures steps on a GPU as shares of the ceilings measured in the same run. Random weights of real shapes.

python benchmarks/gpu.py [--shape llama-3.1-8b] [--quantization fp8] [--profile] [--device cuda] [--out FILE]
python benchmarks/gpu.py --first-token

Decoding is held against the bandwidth of a copy, prompts against the rate of a bf16 product, both by torch. With
--results FILE each figure is a line of it as soon as it is there; what fails is a line too, and the rest goes on.
"""

import argparse
import gc
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402  the path is set first, so that the script runs by itself

from benchmarks.tpu_step import batch  # noqa: E402
from quintet.config import EngineConfig  # noqa: E402
from quintet.engine.executor.batch_builder import CaptureSizes  # noqa: E402
from quintet.engine.executor.worker import Worker  # noqa: E402
from quintet.engine.startup import EnginePlan, prepare  # noqa: E402
from quintet.interface.types import HostBatch  # noqa: E402
from quintet.layers.moe.moe import Experts  # noqa: E402
from quintet.model_loader.loader import num_bytes  # noqa: E402
from quintet.platforms import UnavailableError, choose  # noqa: E402
from scripts.on_gpu.jobs import note  # noqa: E402

GIGA = 1e9
TRIED = "tiny"  # a shape to try these scripts with, where a host stands in
SHAPES: dict[str, dict[str, Any]] = {
    "llama-3.1-8b": {
        "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 131072, "rope_theta": 500_000,
        "rms_norm_eps": 1e-5,
    },
    "llama-3.2-1b": {
        "vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64, "max_position_embeddings": 131072,
        "rope_theta": 500_000, "rms_norm_eps": 1e-5, "tie_word_embeddings": True,
    },
    "qwen3-0.6b": {
        "model_type": "qwen3", "vocab_size": 151936, "hidden_size": 1024, "intermediate_size": 3072,
        "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
        "max_position_embeddings": 40960, "rope_theta": 1_000_000, "tie_word_embeddings": True,
    },
    "qwen3-30b-a3b-12-layers": {  # of 48: all of them are 61 GB
        "model_type": "qwen3_moe", "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144,
        "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True,
        "num_hidden_layers": 12, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
        "max_position_embeddings": 40960, "rope_theta": 1_000_000,
    },
    TRIED: {
        "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 8192,
    },
}  # fmt: skip
DECODES = ((1, 512), (16, 512), (64, 512), (256, 512), (64, 4096))  # requests, tokens that each has behind it
PROMPTS = (512, 2048)  # tokens
ROUNDS = 30
REPEATS = 20  # of an op that is measured alone
WANTED = {"decode 1 x 512": 0.8, "attention 64 x 4096": 0.8, "prefill 2048": 0.7}  # shares; not reached yet, or unknown
FIRST_TOKEN = 10.0  # seconds from the start of the process, at most


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    what: str
    ms: float  # median
    host_ms: float  # until the host may go on
    rate: float  # GB/s or TFLOP/s
    ceiling: float
    share: float
    unit: str


def row(what: str, seconds: tuple[float, float], work: float, ceiling: float, unit: str) -> Row:
    """`work` in bytes or floating-point operations; the ceiling in the unit."""
    rate = work / seconds[0] / (GIGA if unit == "GB/s" else 1e12)
    ms, host = (round(each * 1e3, 4) for each in seconds)
    return Row(what, ms, host, round(rate, 1), round(ceiling, 1), round(rate / ceiling, 3), unit)


def timed(call: Callable[[], object], wait: Callable[[], object], rounds: int = ROUNDS) -> tuple[float, float]:
    """Median seconds (until the device is done, until the host may go on), after a few rounds to warm up."""
    times, hosts = [], []
    for turn in range(rounds + 5):
        wait()
        start = time.perf_counter()
        call()
        host = time.perf_counter() - start
        wait()
        if turn >= 5:
            times.append(time.perf_counter() - start)
            hosts.append(host)
    return statistics.median(times), statistics.median(hosts)


def ceilings(device: torch.device, wait: Callable[[], object]) -> dict[str, float]:
    """GB/s that a copy reads and writes, and TFLOP/s of a large bf16 product."""
    nbytes, size = (2**30, 8192) if device.type != "cpu" else (2**24, 256)  # a host stands in where this is tried
    x = torch.empty(nbytes, dtype=torch.uint8, device=device)
    y = torch.empty_like(x)
    copy, _ = timed(lambda: y.copy_(x), wait)
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    product, _ = timed(lambda: a @ b, wait)
    return {"copy_gbs": 2 * x.numel() / copy / GIGA, "bf16_tflops": 2 * size**3 / product / 1e12}


def place_of(made: EnginePlan) -> torch.device:
    """Returns the device of the model's tensors."""
    return made.ranks.workers[0]._state[0].device


def waiting(device: torch.device) -> Callable[[], object]:
    """Waits for what is queued there."""
    return torch.cuda.synchronize if device.type == "cuda" else lambda: None


def prepared(shape: str, device: str, quantization: str | None = None) -> EnginePlan:
    """The model with random weights, loaded."""
    from transformers import AutoConfig

    folder = tempfile.mkdtemp(prefix="quintet-shape-")
    AutoConfig.for_model(**{"model_type": "llama", **SHAPES[shape]}, dtype="bfloat16").save_pretrained(folder)
    limits: dict[str, Any] = {"max_model_len": 8192, "max_num_seqs": 256, "max_num_batched_tokens": 2048}
    if quantization:
        limits["quantization"] = quantization
    if shape == TRIED:
        limits |= {"max_model_len": 1024, "max_num_seqs": 8, "max_num_batched_tokens": 1024}
    config = EngineConfig.from_kwargs(
        model=folder, device=device, dtype="bfloat16", load_format="dummy", skip_tokenizer_init=True, **limits
    )
    made = prepare(config)
    made.ranks.workers[0].load(None, made.memory_plan.num_pages, made.buckets, True)
    return made


def steps(made: EnginePlan, wait: Callable[[], object], ceiling: dict[str, float]) -> Iterator[partial[Row | None]]:
    """Whole steps, from the host's arrays to logits on the device, each measured when it is called."""
    worker, config = made.ranks.workers[0], made.hf_config

    def decode(requests: int, context: int) -> Row | None:
        host = batch(requests, 1, context - 1)
        if not fits(made, host):
            return None
        took = stepped(worker, padded(made, host), wait)
        cache = requests * context * worker.kv_cache_layout.page_bytes / made.config.page_size
        weights = read_bytes(worker, share_of_experts(config, requests))
        return row(f"decode {requests} x {context}", took, weights + cache, ceiling["copy_gbs"], "GB/s")

    def prompt(tokens: int) -> Row | None:
        took = stepped(worker, padded(made, batch(1, tokens, 0)), wait)
        return row(f"prefill {tokens}", took, 2 * multiplied(config) * tokens, ceiling["bf16_tflops"], "TFLOP/s")

    for requests, context in DECODES:
        yield partial(decode, requests, context)
    for tokens in (each for each in PROMPTS if each <= made.config.step_tokens):
        yield partial(prompt, tokens)


def padded(made: EnginePlan, host: HostBatch) -> HostBatch:
    """The step in the size that the engine captures it in; as it is where no size holds it."""
    return host if made.fixed_shapes else CaptureSizes(made.buckets).pad(host)


def stepped(worker: Worker, host: HostBatch, wait: Callable[[], object]) -> tuple[float, float]:
    """Returns the times of timed() for a step of the worker."""
    return timed(lambda: worker.run(host), wait, ROUNDS if worker._state[0].device.type != "cpu" else 1)


def fits(made: EnginePlan, host: HostBatch) -> bool:
    return (
        int(host.groups[0].block_table.max()) < made.memory_plan.num_pages
        and len(host.query_start_loc) <= made.config.max_num_seqs + 1
    )


def read_bytes(worker: Worker, experts_read: float = 1.0) -> float:
    """Returns the bytes of weights that a decode step reads: all but the embedding (a few rows); a tied head counts."""
    model: Any = worker.model
    layers, platform = model.model.layers, worker.platform
    experts = sum(num_bytes(each, platform) for each in layers.modules() if isinstance(each, Experts))
    whole = num_bytes(layers, platform) + num_bytes(model.lm_head, platform)
    return whole - (1 - experts_read) * experts


def share_of_experts(config: Any, tokens: int) -> float:
    """Returns the share of a layer's experts that so many tokens are expected to choose, each as likely as another."""
    count = getattr(config, "num_experts", 0)
    return 1 - (1 - config.num_experts_per_tok / count) ** tokens if count else 1.0


def multiplied(config: Any) -> int:
    """Returns how many weights a prompt's token is multiplied by: those of the layers, of chosen experts alone."""
    hidden, heads, kv_heads = config.hidden_size, config.num_attention_heads, config.num_key_value_heads
    dim = getattr(config, "head_dim", None) or hidden // heads
    width = config.intermediate_size
    if count := getattr(config, "num_experts", 0):
        width = config.moe_intermediate_size * config.num_experts_per_tok + count / 3  # the router has one of three
    return int(config.num_hidden_layers * hidden * (2 * (heads + kv_heads) * dim + 3 * width))


def attention(made: EnginePlan, wait: Callable[[], object], ceiling: dict[str, float]) -> Row | None:
    """Paged decode attention alone, in the layout of the model."""
    from quintet.interface.types import AttentionSpec, StepContext

    worker, config = made.ranks.workers[0], made.hf_config
    host, requests, context = batch(64, 1, 4095), 64, 4096
    if not fits(made, host):
        return None
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    spec = AttentionSpec(heads, kv_heads, dim, dim**-0.5, torch.bfloat16, made.config.page_size)
    (group,) = host.groups
    plan = worker.platform.mixer(spec, worker.ops, 0).plan(host, group)
    planned = host._replace(groups=(group._replace(plan=plan),))
    there = planned.on(worker.device.to_device(planned.leaves()))
    step_context, kv = StepContext(there, there.groups[0]), worker._state[0]
    q = torch.randn(len(host.token_ids), heads, dim, device=kv.device, dtype=torch.bfloat16)
    call = partial(worker.ops.paged_attention, q, kv, step_context, spec, None)
    seconds, host_seconds = timed(repeated(call, kv.device), wait)
    took = seconds / REPEATS, host_seconds / REPEATS
    read = requests * context * 2 * kv_heads * dim * 2
    return row("attention 64 x 4096", took, read, ceiling["copy_gbs"], "GB/s")


def repeated(call: Callable[[], object], device: torch.device) -> Callable[[], object]:
    """REPEATS calls one after the other: in a graph on a GPU, so that the host's launches do not count."""

    def calls() -> None:
        for _ in range(REPEATS):
            call()

    if device.type != "cuda":
        return calls
    call()  # compiles its kernels
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        calls()
    return graph.replay


def first_token(device: str, cache: str) -> float:
    """Seconds from the start of a process to the bundled model's first token; its kernels are kept in that folder."""
    code = (
        "import time, psutil; from quintet import LLM, SamplingParams;"
        f"LLM(device={device!r}, use_tqdm=False).generate(['Once'], SamplingParams(max_tokens=1), use_tqdm=False);"
        "print(time.time() - psutil.Process().create_time())"
    )
    own = {**os.environ, "TRITON_CACHE_DIR": cache}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, env=own, stdout=subprocess.PIPE, text=True, check=True)
    return float(done.stdout.splitlines()[-1])


def table(results: dict[str, Any]) -> str:
    """Formats the results as a text table."""
    copy, product = results["ceilings"]["copy_gbs"], results["ceilings"]["bf16_tflops"]
    lines = [f"{results['device']}: a copy moves {copy:.0f} GB/s, a bf16 product makes {product:.0f} TFLOP/s", ""]
    lines.append(f"{'step':<24}{'ms':>10}{'host ms':>10}{'rate':>12}{'share':>8}{'wanted':>8}")
    for each in results["rows"]:
        wanted = WANTED.get(each["what"])
        rate = f"{each['rate']:.0f} {each['unit']}"
        end = f"{each['share']:>8.0%}" + (f"{wanted:>8.0%}" if wanted else "")
        lines.append(f"{each['what']:<24}{each['ms']:>10.3f}{each['host_ms']:>10.3f}{rate:>12}{end}")
    if (first := results.get("first_token_s")) is not None:
        lines += ["", f"first token {first:.1f} s after the start, wanted {FIRST_TOKEN:.0f} s at most"]
    return "\n".join([*lines, *(f"failed: {each}" for each in results["failed"])])


def measure(
    shape: str, device: str, tell: Callable[..., None], quantization: str | None = None, profile: bool = False
) -> dict[str, Any]:
    """Measures everything, and the ceilings again at the end, so that a device that slowed down shows. Failures are
    named in the result. With `profile`, also the kernels of each step and the host's part of it."""
    detail = choose(device).capabilities.detail
    start = time.perf_counter()
    made = prepared(shape, device, quantization)
    name = f"{shape}-{quantization}" if quantization else shape
    kind, loaded = place_of(made), time.perf_counter() - start
    wait = waiting(kind)
    before = ceilings(kind, wait)
    tell(kind="ceilings", shape=name, detail=detail, loaded_s=round(loaded, 1), **before)
    rows, failed = [], []
    measured: list[partial[Row | None]] = [*steps(made, wait, before), partial(attention, made, wait, before)]
    for each in measured:
        try:
            found = each()
        except Exception as error:  # one figure less
            failed.append(f"{each.args}: {type(error).__name__}: {error}")
            tell(kind="failed", shape=name, what=failed[-1])
            continue
        if found is not None:
            rows.append(asdict(found))
            tell(kind="speed", shape=name, **rows[-1])
    ops = {choice.op: choice.provider for choice in made.ranks.workers[0].ops.bound}
    if profile:
        print(table({"device": detail, "ceilings": before, "rows": rows, "failed": failed}), flush=True)
        from benchmarks import gpu_profile  # it imports this module

        gpu_profile.measure(made, name, tell)
    del made, each, measured  # or there may be no room for the ceilings
    gc.collect()
    if kind.type == "cuda":
        torch.cuda.empty_cache()
    after = ceilings(kind, wait)
    tell(kind="ceilings", shape=name, detail="at the end", **after)
    return {
        "date": time.strftime("%Y-%m-%d"), "device": detail.split(";")[0], "detail": detail, "shape": name,
        "ceilings": before, "ceilings_after": after, "loaded_s": round(loaded, 1), "ops": ops, "rows": rows,
        "failed": failed,
    }  # fmt: skip


def main() -> int:
    """0 if all of it was measured, 1 if there is no device or something failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="llama-3.1-8b")
    parser.add_argument("--quantization", help="of the weights, as `quintet serve` takes it: fp8, int8, int4")
    parser.add_argument("--profile", action="store_true", help="then also each step kernel by kernel, and on the host")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, help="benchmarks/results/gpu-<device>-<shape>.json if not given")
    parser.add_argument("--results", type=Path, help="a file that gets a line for each figure")
    parser.add_argument("--first-token", action="store_true", help="only the seconds to a process's first token")
    args = parser.parse_args()
    tell = partial(note, args.results) if args.results else lambda **values: None
    try:
        choose(args.device)
    except UnavailableError as error:
        print(f"nothing was measured: {error}", file=sys.stderr)
        return 1
    if args.first_token:
        with tempfile.TemporaryDirectory(prefix="quintet-triton-") as cache:
            for turn in ("cold", "again"):  # the second time, kernels are compiled
                tell(kind="first token", turn=turn, seconds=(seconds := round(first_token(args.device, cache), 2)))
                print(f"first token {seconds} s after the process's start, {turn}; wanted {FIRST_TOKEN:.0f} s at most")
        return 0
    results = measure(args.shape, args.device, tell, args.quantization, args.profile)
    name = re.sub(r"[^a-z0-9]+", "-", f"gpu-{results['device']}-{results['shape']}".lower()).strip("-")
    out = args.out or ROOT / "benchmarks" / "results" / f"{name}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(results, indent=2) + "\n")
    print(f"{table(results)}\n\nwritten to {out}")
    return int(bool(results["failed"]))


if __name__ == "__main__":
    sys.exit(main())
