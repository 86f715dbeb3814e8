"""Flags that `quintet COMMAND --help` shows; --help=GROUP and --help-all show the others."""

from collections.abc import Mapping

_MODEL = ("--model", "--max-model-len", "--dtype", "--quantization", "--device")
_ENGINE = ("--gpu-memory-utilization", "--kv-cache-memory-bytes", "--max-num-seqs", "--tensor-parallel-size")
_SAMPLING = ("--max-tokens", "--temperature", "--top-p", "--top-k", "--seed")
_CHAT = ("--system", *_SAMPLING, *_MODEL, "--reasoning-parser", "--tools", "--url", "--quiet")
_NUMBERS = ("--input", "--output", "--field", "--prompt-name", "--dimensions", "--normalize", *_MODEL, "--quiet")

COMMON_FLAGS: Mapping[str, tuple[str, ...]] = {
    "serve": (
        "--host", "--port", "--served-model-name", "--api-key", "--config", "--chat-template", "--tool-call-parser",
        "--reasoning-parser", *_MODEL, *_ENGINE,
    ),
    "router": (
        "--backend", "--policy", "--prefill", "--decode", "--host", "--port", "--api-key", "--backend-api-key",
        "--max-retries", "--queue-size",
    ),
    "generate": ("--chat", "--system", "--prompts-file", "--json", "--quiet", *_SAMPLING, "--stop", *_MODEL),
    "chat": _CHAT,
    "run": _CHAT,
    "complete": ("--model", *_SAMPLING, "--stop", "--url", "--api-key", "--quiet"),
    "embed": _NUMBERS,
    "rerank": ("--output", "--json", "--field", "--top-n", "--quiet", *_MODEL),
    "transcribe": (
        "--format", "--language", "--translate", "--prompt", "--output", "--condition-on-previous-text", *_MODEL,
        "--quiet",
    ),
    "run-batch": ("--input-file", "--output-file", "--resume", "--quiet", "--concurrency", "--url", *_MODEL, *_ENGINE),
    "show": ("--max-model-len", "--device", "--quantization", "--gpu-memory-utilization", "--kv-cache-dtype"),
    "verify": (
        "--against", "--logprobs", "--reference", "--prompts-file", "--max-tokens", "--mean-tolerance",
        "--max-tolerance", "--json", "--api-key", *_MODEL,
    ),
    "explain": (*_MODEL, *_ENGINE, "--max-num-batched-tokens", "--enable-prefix-caching"),
    "bench latency": ("--input-len", "--output-len", "--batch-size", "--num-iters", "--output-json", *_MODEL, *_ENGINE),
    "bench throughput": ("--num-prompts", "--input-len", "--output-len", "--output-json", *_MODEL, *_ENGINE),
    "bench serve": (
        "--url", "--model", "--backend", "--endpoint", "--dataset-name", "--dataset-path", "--input-len",
        "--output-len", "--num-prompts", "--request-rate", "--max-concurrency", "--ignore-eos", "--goodput", "--seed",
        "--output-json",
    ),
}  # fmt: skip
