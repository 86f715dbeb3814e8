"""Measures adapters (LoRA) in whole generations: tokens/s with one adapter, and with eight, beside the base alone.

    python -m benchmarks.lora [--model FOLDER] [--quantization int4] [--rank 16] [--out FILE.json]
        [--llama-cpp PYTHON --gguf FILE.gguf]

Rounds alternate: the base in an engine without adapters, the base in one with them, one adapter, several; then
llama.cpp with the same adapters, on a file of the same shapes (compare.py writes one). Without a model: random weights
of Qwen3-0.6B's shapes.
"""

import argparse
import json
import os
import statistics
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import gguf
import torch
from safetensors.torch import load_file

from benchmarks.checkpoints import checkpoint
from quintet import LLM, LoRARequest, SamplingParams
from quintet.lora.adapter import write_adapter
from quintet.platforms.cpu.cpu_info import describe
from quintet.platforms.host import threads

PEER_CASES = {
    "llama.cpp, base, 1 request": [0], "llama.cpp, 1 adapter, 1 request": [1],
    "llama.cpp, 8 adapters, 16 requests": [*range(1, 9), *range(1, 9)],
}  # fmt: skip
MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def random_adapter(folder: Path, config: Any, rank: int, seed: int) -> LoRARequest:
    """Writes an adapter with small random numbers for all products of a Llama-like model."""
    generator, width = torch.Generator().manual_seed(seed), config.hidden_size
    head = getattr(config, "head_dim", None) or width // config.num_attention_heads
    heads, kv, inner = config.num_attention_heads * head, config.num_key_value_heads * head, config.intermediate_size
    sizes = dict(
        zip(
            MODULES,
            ((width, heads), (width, kv), (width, kv), (heads, width), (width, inner), (width, inner), (inner, width)),
            strict=True,
        )
    )
    tensors = {}
    for layer in range(config.num_hidden_layers):
        for module, (inputs, outputs) in sizes.items():
            part = "self_attn" if module in MODULES[:4] else "mlp"
            name = f"base_model.model.model.layers.{layer}.{part}.{module}"
            tensors[f"{name}.lora_A.weight"] = torch.randn(rank, inputs, generator=generator) * 0.01
            tensors[f"{name}.lora_B.weight"] = torch.randn(outputs, rank, generator=generator) * 0.01
    write_adapter(folder / str(seed), {"peft_type": "LORA", "r": rank, "lora_alpha": rank}, tensors)
    return LoRARequest(f"adapter-{seed}", seed, str(folder / str(seed)))


class LlamaCpp:
    """llama.cpp in a process of its own, with the same adapters in its format."""

    def __init__(self, python: str, model: Path, adapters: list[LoRARequest]) -> None:
        files = [_as_gguf(Path(each.lora_path), model) for each in adapters]
        command = [python, "-m", "benchmarks.peers.lora_llama_cpp", str(model), str(threads()), *map(str, files)]
        pipe, folder = subprocess.PIPE, Path(__file__).parents[1]
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, cwd=folder)
        self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        answer: dict[str, Any] = json.loads(self._process.stdout.readline() or "{}")
        if not answer:
            raise RuntimeError("llama.cpp ended; its error is above")
        return answer

    def rate(self, adapters: list[int], tokens: int) -> float:
        """Returns tokens per second of requests with these adapters; 0: none."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"adapters": adapters, "tokens": tokens}) + "\n")
        self._process.stdin.flush()
        return float(self._answer()["rate"])

    def close(self) -> None:
        """Ends the process."""
        self._process.kill()
        self._process.wait()


def _as_gguf(folder: Path, model: Path) -> Path:
    """Writes an adapter as llama.cpp reads it, in float16."""
    fields = gguf.GGUFReader(model).fields
    name = str(fields["general.architecture"].contents())
    architecture = {each: key for key, each in gguf.MODEL_ARCH_NAMES.items()}[name]
    names = gguf.get_tensor_name_map(architecture, int(fields[f"{name}.block_count"].contents()))
    settings = json.loads((folder / "adapter_config.json").read_text())
    writer = gguf.GGUFWriter(folder / "adapter.gguf", name)
    writer.add_type(gguf.GGUFType.ADAPTER)
    writer.add_string(gguf.Keys.Adapter.TYPE, "lora")
    writer.add_float32(gguf.Keys.Adapter.LORA_ALPHA, settings["lora_alpha"])
    for key, tensor in load_file(folder / "adapter_model.safetensors").items():
        module, side = key.removeprefix("base_model.model.").removesuffix(".weight").rsplit(".", 1)
        place = names.get_name(module)
        assert place is not None, f"{module} has no name in a GGUF file"
        writer.add_tensor(f"{place}.weight.{side.lower()}", tensor.half().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return folder / "adapter.gguf"


class Case:
    """One row of the table: an engine, and the adapter of each request."""

    def __init__(self, name: str, llm: LLM, adapters: list[LoRARequest | None], tokens: int) -> None:
        self.name, self._llm, self._adapters = name, llm, adapters
        self._params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True, detokenize=False)
        self._tokens, self.rates = tokens, list[float]()
        self._prompts = [{"prompt_token_ids": [7 + at, 11, 13]} for at in range(len(adapters))]

    def run(self) -> None:
        """One round."""
        begin = time.perf_counter()
        outputs = self._llm.generate(self._prompts, self._params, use_tqdm=False, lora_request=self._requests)
        assert all(output.outputs[0].error is None for output in outputs), outputs[0].outputs[0].error
        self.rates.append(len(self._prompts) * self._tokens / (time.perf_counter() - begin))

    @property
    def _requests(self) -> list[LoRARequest | None] | None:
        return self._adapters if any(self._adapters) else None


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Rounds of all cases in turn -> tokens/s of each, and ratios to the base without adapters."""
    settings: dict[str, Any] = {
        "model": arguments.model or str(checkpoint("qwen3-0.6b")), "device": "cpu", "skip_tokenizer_init": True,
        "quantization": arguments.quantization, "max_model_len": 512, "use_tqdm": False, "weights_cache": "none",
        "enable_prefix_caching": False,
    }  # fmt: skip
    base = LLM(**settings)
    lora = LLM(**settings, enable_lora=True, max_loras=8, max_lora_rank=arguments.rank)
    with tempfile.TemporaryDirectory() as folder:
        made = [
            random_adapter(Path(folder), base._client.engine_plan.hf_config, arguments.rank, n) for n in range(1, 9)
        ]
        cases = [
            Case("base, 1 request", base, [None], arguments.tokens),
            Case("adapters on, none used, 1 request", lora, [None], arguments.tokens),
            Case("1 adapter, 1 request", lora, [made[0]], arguments.tokens),
            Case("base, 16 requests", base, [None] * 16, arguments.tokens),
            Case("8 adapters, 16 requests", lora, [*made, *made], arguments.tokens),
        ]
        peer = LlamaCpp(arguments.llama_cpp, arguments.gguf, made) if arguments.llama_cpp else None
        found: dict[str, list[float]] = {}
        for _ in range(arguments.rounds + 1):
            for case in cases:
                case.run()
            for name, adapters in PEER_CASES.items() if peer is not None else ():
                found.setdefault(name, []).append(peer.rate(adapters, arguments.tokens))
        if peer is not None:
            peer.close()
    rates = {case.name: case.rates[1:] for case in cases}  # the first round records steps
    rates |= {name: each[1:] for name, each in found.items()}
    ratios = {}
    for name in list(rates)[1 : len(cases)]:
        ratios[name] = _ratio(rates, name, "base, 16 requests" if "16" in name else "base, 1 request")
    beside = {name: _ratio(rates, name.removeprefix("llama.cpp, "), name) for name in found}
    return {
        "processor": describe(), "threads": threads(), "load_average": round(os.getloadavg()[0], 1),
        "rank": arguments.rank, "quantization": arguments.quantization, "rounds": arguments.rounds,
        "tokens_per_second": {name: round(statistics.median(each), 2) for name, each in rates.items()},
        "ratio_to_base": ratios,
        **({"ratio_to_llama_cpp": beside, "gguf": arguments.gguf.name} if beside else {}),
    }  # fmt: skip


def _ratio(rates: dict[str, list[float]], name: str, to: str) -> float:
    """Returns the median of the rounds' ratios."""
    return round(statistics.median(a / b for a, b in zip(rates[name], rates[to], strict=True)), 3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a Llama-like model; by default random weights of Qwen3-0.6B's shapes")
    parser.add_argument("--quantization")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--llama-cpp", metavar="PYTHON", help="an interpreter that has llama-cpp-python")
    parser.add_argument("--gguf", type=Path, help="what llama.cpp reads")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    if bool(arguments.llama_cpp) != bool(arguments.gguf):
        parser.error("--llama-cpp needs --gguf, and the other way round")
    found = measure(arguments)
    print(json.dumps(found, indent=2))
    if arguments.out is not None:
        rows = json.loads(arguments.out.read_text()) if arguments.out.exists() else []
        arguments.out.write_text(json.dumps([*rows, found], indent=2) + "\n")


if __name__ == "__main__":
    main()
