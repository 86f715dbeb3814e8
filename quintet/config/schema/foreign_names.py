"""Flags and commands of other programs (llama.cpp, Ollama, older vLLM) that have another name here."""

from collections.abc import Mapping

_CONTEXT = "use --max-model-len"
_LAYERS = "the whole model runs on one platform; use --device"
_THREADS = "all cores are used; set OMP_NUM_THREADS, or leave it out"
_DRAWS = "use --{0} of `quintet generate` and `quintet chat`, or the field {1} of a request"
_SEQUENCES = "use --max-num-seqs"
_REPOSITORY = "give OWNER/REPOSITORY:QUANTIZATION as the model"
_LOGS = "texts of requests are never logged; leave it out"

FLAGS: Mapping[str, str] = {
    "--lora-modules": "adapters do not exist yet; leave it out",
    **dict.fromkeys(("-c", "--ctx-size", "--n-ctx", "--num-ctx"), _CONTEXT),
    **dict.fromkeys(("-ngl", "--ngl", "--n-gpu-layers", "--gpu-layers"), _LAYERS),
    **dict.fromkeys(("-t", "--threads", "--threads-batch", "-tb"), _THREADS),
    **dict.fromkeys(("-np", "--parallel"), _SEQUENCES),
    **dict.fromkeys(("-hf", "-hfr", "--hf-repo", "-hff", "--hf-file"), _REPOSITORY),
    "-m": "use --model",
    "--temp": _DRAWS.format("temperature", "temperature"),
    "--repeat-penalty": _DRAWS.format("repetition-penalty", "repetition_penalty"),
    **dict.fromkeys(("--predict", "--n-predict"), _DRAWS.format("max-tokens", "max_tokens")),
    "--jinja": "the model's chat template is always used; leave it out",
    **dict.fromkeys(("-fa", "--flash-attn"), "the platform chooses; leave it out, or use --attention-backend"),
    **dict.fromkeys(("--mmap", "--no-mmap", "--mlock"), "files are mapped where that helps; leave it out"),
    **dict.fromkeys(("-b", "--batch-size", "-ub", "--ubatch-size"), "use --max-num-batched-tokens"),
    **dict.fromkeys(("-ctk", "--cache-type-k", "-ctv", "--cache-type-v"), "use --kv-cache-dtype"),
    **dict.fromkeys(("-md", "--model-draft"), "no second model guesses yet; use --speculative-config.method ngram"),
    "--alias": "use --served-model-name",
    "--keep-alive": "a model stays loaded while its server runs; leave it out",
    **dict.fromkeys(("--disable-log-requests", "--enable-log-requests", "--max-log-len"), _LOGS),
}

COMMANDS: Mapping[str, str] = {
    "run": "`quintet chat MODEL` talks with a model, `quintet generate --model MODEL TEXT` completes a text",
    "pull": "a model of the hub is downloaded at its first use: `quintet generate --model OWNER/NAME TEXT`",
    **dict.fromkeys(("list", "ls"), "`hf cache scan` lists downloaded models; others are where their folders are"),
    "show": "`quintet explain MODEL` shows how a model would run",
    "ps": "each server runs one model and is a process of its own; GET /v1/models names it",
    "stop": "Ctrl-C or SIGTERM ends a server",
    "rm": "delete the folder, or use `hf cache delete` for models of the hub",
    "create": "give --chat-template and the request's fields; there are no files of settings for a model",
    "server": "it is `quintet serve`",
}
