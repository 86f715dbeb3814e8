"""`make gpu` where there is no GPU says what is missing and fails; its figures are what their names say."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import gpu as benchmark
from quintet.config import EngineConfig
from quintet.engine.startup import prepare
from quintet.platforms import discover

ROOT = Path(__file__).parents[4]
NO_GPU = not next(found.available for found in discover() if found.name == "cuda")


@pytest.mark.slow
@pytest.mark.skipif(not NO_GPU, reason="there is a GPU")
@pytest.mark.parametrize("command", ["scripts/gpu.py", "benchmarks/gpu.py"])
def test_without_a_gpu_it_says_so_and_fails(command: str) -> None:
    done = subprocess.run([sys.executable, command], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "device 'cuda' is not available: " in done.stderr
    assert "nothing was" in done.stdout + done.stderr


def test_shares_are_of_the_ceiling() -> None:
    decode = benchmark.row("decode", (0.004, 0.001), 16e9, 4800.0, "GB/s")
    assert (decode.ms, decode.host_ms, decode.rate, decode.share) == (4.0, 1.0, 4000.0, 0.833)
    prefill = benchmark.row("prefill", (0.05, 0.001), 32e12, 800.0, "TFLOP/s")
    assert (prefill.rate, prefill.share) == (640.0, 0.8)


def test_times_are_until_the_device_is_done() -> None:
    log: list[str] = []
    took, host = benchmark.timed(lambda: log.append("call"), lambda: log.append("wait"), rounds=3)
    assert log == ["wait", "call", "wait"] * 8 and took >= host >= 0


def test_a_decode_step_reads_all_weights_but_the_embedding(tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaModel

    small = {**benchmark.SHAPES["llama-3.2-1b"], "hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 512}
    for tied in (False, True):
        LlamaConfig(**{**small, "tie_word_embeddings": tied}).save_pretrained(tmp_path)
        config = EngineConfig(model=str(tmp_path), device="cpu", dtype="bfloat16", skip_tokenizer_init=True)
        made = prepare(config.replace(load_format="dummy", max_model_len=64))
        worker = made.ranks.workers[0]
        embedding = 512 * 64 * 2
        left = worker.weight_bytes - benchmark.read_bytes(worker)
        assert abs(left - (0 if tied else embedding)) <= 64 * 2 + 4096, "what is left is the last norm, and padding"
        theirs = LlamaModel(LlamaConfig(**small)).layers.parameters()
        assert benchmark.multiplied(made.hf_config) == sum(each.numel() for each in theirs if each.dim() == 2)


def test_a_mixtures_step_reads_the_experts_that_its_tokens_choose(tmp_path: Path) -> None:
    from transformers import Qwen3MoeConfig

    few = {"hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 512, "num_experts": 16, "num_experts_per_tok": 4}
    Qwen3MoeConfig(**{**benchmark.SHAPES["qwen3-30b-a3b-12-layers"], **few}).save_pretrained(tmp_path)
    config = EngineConfig(model=str(tmp_path), device="cpu", dtype="bfloat16", skip_tokenizer_init=True)
    made = prepare(config.replace(load_format="dummy", max_model_len=64))
    one = 3 * 64 * 768
    whole, share = benchmark.read_bytes(made.ranks.workers[0]), benchmark.share_of_experts(made.hf_config, 2)
    assert share == 1 - 0.75**2 and benchmark.share_of_experts(made.hf_config, 1) == 0.25
    read = benchmark.read_bytes(made.ranks.workers[0], share)
    assert whole - read == pytest.approx(2 * 2 * 16 * one * (1 - share), rel=0.01)
    attention = 2 * 64 * (2 * (32 + 4) * 128 + 16)
    assert benchmark.multiplied(made.hf_config) == attention + 2 * 4 * one, "four experts and the router"


def test_the_table_says_what_is_wanted() -> None:
    rows = [vars(benchmark.row("decode 1 x 512", (0.004, 0.001), 16e9, 4800.0, "GB/s"))]
    results = {
        "device": "H200", "ceilings": {"copy_gbs": 4800.0, "bf16_tflops": 790.0}, "rows": rows, "first_token_s": 4.2,
        "failed": ["x"],
    }  # fmt: skip
    said = benchmark.table(results)
    assert "83%     80%" in said and "first token 4.2 s" in said and said.endswith("failed: x")


def test_every_wanted_share_is_measured() -> None:
    measured = {f"decode {requests} x {context}" for requests, context in benchmark.DECODES}
    measured |= {f"prefill {count}" for count in benchmark.PROMPTS} | {"attention 64 x 4096"}
    assert set(benchmark.WANTED) <= measured


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_ceilings_are_rates() -> None:
    found = benchmark.ceilings(torch.device("cuda", 0), torch.cuda.synchronize)
    assert 50 < found["copy_gbs"] < 20_000 and 5 < found["bf16_tflops"] < 5000
