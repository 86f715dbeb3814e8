"""Names of other engines (vLLM, llama.cpp, Ollama) that do not exist here, and the replacement for each."""

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import ParamSpec, TypeVar

from quintet.common.suggestions import nearest_name
from quintet.config.schema.unsupported_settings import ENCODERS, LAYERS
from quintet.config.schema.unsupported_settings import UNSUPPORTED as UNSUPPORTED

P = ParamSpec("P")
T = TypeVar("T")

_DRAWS = "use --{0} of `quintet generate` and `quintet chat`; over HTTP it is a field of the request"


def unsupported_reason(name: str) -> str | None:
    """Why a setting, or the one that it is an entry of, is not there; None if this says nothing of it."""
    while name and name not in UNSUPPORTED:
        name = name.rpartition(".")[0]
    return UNSUPPORTED.get(name)


# of the command line, where the name of a setting is another's
FLAGS: Mapping[str, str] = {
    # llama.cpp
    **dict.fromkeys(("-c", "--ctx-size", "--num-ctx"), "use --max-model-len"),
    **dict.fromkeys(("-ngl", "--ngl", "--gpu-layers"), LAYERS),
    **dict.fromkeys(
        ("-t", "--threads", "--threads-batch", "-tb"), "all cores are used; set OMP_NUM_THREADS, or leave it out"
    ),
    **dict.fromkeys(("-np", "--parallel"), "use --max-num-seqs"),
    **dict.fromkeys(
        ("-hf", "-hfr", "--hf-repo", "-hff", "--hf-file"), "give OWNER/REPOSITORY:QUANTIZATION as the model"
    ),
    "-m": "give the model as the first argument, or use --model",
    **dict.fromkeys(("-p", "--prompt"), "give the prompt as an argument: `quintet generate MODEL PROMPT`"),
    **dict.fromkeys(("-f", "--file"), "use --prompts-file of `quintet generate`, or pipe the text in"),
    **dict.fromkeys(("-i", "--interactive", "-cnv", "--conversation"), "`quintet chat MODEL` is a conversation"),
    **dict.fromkeys(("-sys", "--system-prompt"), "use --system"),
    "--temp": _DRAWS.format("temperature"),
    "--repeat-penalty": _DRAWS.format("repetition-penalty"),
    **dict.fromkeys(("-n", "--predict", "--n-predict"), _DRAWS.format("max-tokens")),
    "-s": _DRAWS.format("seed"),
    **dict.fromkeys(
        ("--grammar", "--grammar-file", "-j", "--json-schema"),
        "use --structured-outputs of `quintet generate`, or the field structured_outputs of a request",
    ),
    "--jinja": "the model's chat template is always used; leave it out",
    "--chat-template-file": "use --chat-template, which takes a file",
    **dict.fromkeys(("-fa", "--flash-attn"), "the platform chooses; leave it out, or use --attention-backend"),
    **dict.fromkeys(("--mmap", "--no-mmap", "--mlock"), "files are mapped where that helps; leave it out"),
    **dict.fromkeys(("-b", "--batch-size", "-ub", "--ubatch-size"), "use --max-num-batched-tokens"),
    **dict.fromkeys(("-ctk", "--cache-type-k", "-ctv", "--cache-type-v"), "use --kv-cache-dtype"),
    **dict.fromkeys(("-md", "--model-draft"), "use --speculative-config.model MODEL"),
    **dict.fromkeys(("--embedding", "--embeddings", "--reranking"), "such a model is known by its files; leave it out"),
    **dict.fromkeys(("--lora", "--lora-scaled"), "use --enable-lora --lora-modules NAME=FOLDER"),
    **dict.fromkeys(("-mmu", "--mmproj-url"), "download the file, and give its path to --mmproj"),
    "--mmproj-auto": "one that lies beside the model is always found; leave it out",
    **dict.fromkeys(("--no-mmproj", "--no-mmproj-auto"), "use --language-model-only"),
    **dict.fromkeys(("--mmproj-offload", "--no-mmproj-offload"), ENCODERS),
    **dict.fromkeys(("-cb", "--cont-batching"), "requests always share steps; leave it out"),
    **dict.fromkeys(
        ("--metrics", "--slots", "--props"), "GET /metrics and GET /v1/models are always there; leave it out"
    ),
    "--no-webui": "use --no-playground",
    "--alias": "use --served-model-name",
    # Ollama
    "--keep-alive": "a model stays loaded while its server runs; leave it out",
    "--verbose": "figures are shown unless --quiet is given; QUINTET_LOG_LEVEL=DEBUG logs more",
    "--nowordwrap": "text is not wrapped; leave it out",
    **dict.fromkeys(
        ("--think", "--hidethinking"), "use --chat-template-kwargs '{\"enable_thinking\": false}', or --quiet"
    ),
    # flags of other commands
    "--max-tokens": _DRAWS.format("max-tokens"),
    "--system": "use --system of `quintet generate` and `quintet chat`; over HTTP it is a message",
    "--url": "`quintet chat`, `complete`, `ps` and `bench serve` ask a server",
    **dict.fromkeys(("--host", "--port"), "it is for `quintet serve`; commands that ask a server take --url"),
    "--lora-path": "use --lora-modules NAME=FOLDER",
    "--image": "send images over HTTP, or use LLM.chat (docs/images.md)",
    # vLLM
    **dict.fromkeys(
        ("--disable-log-requests", "--enable-log-requests", "--max-log-len"),
        "texts of requests are never logged; leave it out",
    ),
    **dict.fromkeys(("--use-v2-block-manager", "--num-lookahead-slots"), "there is one block manager; leave it out"),
    **dict.fromkeys(("--worker-use-ray", "--engine-use-ray"), "use --distributed-executor-backend ray"),
    **dict.fromkeys(
        ("--allow-credentials", "--allowed-methods", "--allowed-headers"),
        "--allowed-origins lets pages of these origins use every method and header, without cookies; leave it out",
    ),
    **dict.fromkeys(
        ("--enable-log-outputs", "--enable-log-deltas"), "texts of requests are never logged; leave it out"
    ),
    **dict.fromkeys(
        ("--disable-fastapi-docs", "--enable-offline-docs"), "/openapi.json is the description; leave it out"
    ),
    **dict.fromkeys(
        ("--h11-max-incomplete-event-size", "--h11-max-header-count"), "headers have fixed limits; leave it out"
    ),
    "--chat-template-content-format": "what the template takes is found by trying it; leave it out",
    "--response-role": "an answer is the assistant's; leave it out",
    "--enable-prompt-tokens-details": "usage always has prompt_tokens_details; leave it out",
    "--enable-request-id-headers": "answers always have the header X-Request-Id; leave it out",
    "--enable-scale-out": "the routes render, derender and /inference/v1/generate are always there; leave it out",
    "--enable-flash-late-interaction": "the platform chooses how late interaction is computed; leave it out",
    "--trust-request-mm-kwargs": "requests may have mm_processor_kwargs and media_io_kwargs; leave it out",
    **dict.fromkeys(
        ("--cohere-format", "--cohere-is-reasoning-model"), "/cohere/v2/chat is not there; use /v1/chat/completions"
    ),
    **dict.fromkeys(
        (
            "--data-parallel-supervisor-port",
            "--dp-supervisor-probe-interval-s",
            "--dp-supervisor-probe-timeout-s",
            "--dp-supervisor-probe-failure-threshold",
        ),
        "`quintet route` probes several servers, and answers /health for all; leave it out",
    ),
    "--grpc-port": "there is no gRPC server; use HTTP",
    "--multi-step-stream-outputs": "one step is scheduled at a time; leave it out",
    "--disable-frontend-multiprocessing": "the engine has a process of its own; leave it out",
    "--disable-async-output-proc": "the platform chooses; leave it out",
    # vLLM's benchmark
    **dict.fromkeys(
        ("--percentile-metrics", "--metric-percentiles"), "all metrics are shown with p50 to p99; leave it out"
    ),
    "--ready-check-timeout-sec": "the first warm-up request is the check; leave it out",
    "--temperature": "it is a field of a request; `quintet bench serve` sends --extra-body '{\"temperature\": 0.7}'",
}

COMMANDS: Mapping[str, str] = {
    "create": "give --chat-template and the request's fields; there are no files of settings for a model",
    "cp": "copy the file; --served-model-name gives a model several names",
    "push": "`hf upload OWNER/NAME FOLDER` publishes a model on the hub",
    **dict.fromkeys(("server", "llama-server"), "it is `quintet serve`"),
    **dict.fromkeys(("cli", "llama-cli"), "it is `quintet chat` and `quintet generate`"),
    "llama-bench": "it is `quintet bench latency` and `quintet bench throughput`",
    "llama-quantize": "it is `quintet quantize`",
    **dict.fromkeys(
        ("download", "search"), "`quintet pull MODEL` downloads a model; https://huggingface.co/models has a list"
    ),
}

_NOT_SCALED = "engines are not added while a server runs; start another server, and put `quintet route` before both"
_DECISIONS = "use /v1/chat/completions with response_format, or /classify and /generative_scoring for scores of labels"

# paths of a server
ROUTES: Mapping[str, str] = {
    **dict.fromkeys(("/scale_elastic_ep", "/is_scaling_elastic_ep"), _NOT_SCALED),
    **dict.fromkeys(
        ("/fault_tolerance/apply", "/fault_tolerance/status"),
        "a server whose engine fails ends, and is started again; GET /health says what failed",
    ),
    "/kv_event_sources": "subscribe to the address of --kv-events-config.endpoint",
    **dict.fromkeys(("/v1/decisions", "/v1/systemone"), _DECISIONS),
    **dict.fromkeys(
        ("/cohere/v2/chat", "/cohere/v2/chat/render"), "use /v1/chat/completions; of Cohere's API there is /v2/embed"
    ),
}

# of LLM and AsyncLLM
METHODS: Mapping[str, str] = {
    "set_tokenizer": "use the engine argument tokenizer",
    "reset_mm_cache": "media are known by their content; leave it out",
    "from_vllm_config": "use from_engine_args",
    "request_states": "use abort(request_id), or pause_generation(mode='abort') for all requests",
    "engine_core": "use abort(request_id), or pause_generation(mode='abort') for all requests",
    "model_config": "use config",
    "vllm_config": "use config",
    "do_log_stats": "use get_metrics()",
    "get_status": "use is_running and get_stats()",
    "should_keep_api_server_alive": "use is_running",
    "get_kv_event_sources": "subscribe to config.kv_events_config.endpoint",
    "handle_fault": "an engine that failed has ended; make a new one",
    **dict.fromkeys(("checkpoint_prepare", "checkpoint_restore"), "use sleep(level=1) and wake_up()"),
    **dict.fromkeys(("scale_elastic_ep", "get_external_elastic_ep_status"), "make a new AsyncLLM with other sizes"),
    "notify_kv_transfer_request_rejected": "pages that no engine asks for are freed after a time; leave it out",
    "check_health": "every call says so where the engine has ended",
    "get_vllm_config": "use config",
    "get_model_config": "use config",
}

# of the module quintet
NAMES: Mapping[str, str] = {
    "initialize_ray_cluster": "set distributed_executor_backend='ray', which joins or starts a cluster",
    "GuidedDecodingParams": "use StructuredOutputsParams",
}

# of calls that run prompts
ARGUMENTS: Mapping[str, str] = {
    "prompt_adapter_request": "vLLM has taken prompt adapters out; use lora_request with a LoRA adapter",
    "prompt_token_ids": "give the ids themselves as the prompt, or {'prompt_token_ids': ids}",
    "multi_modal_data": "give {'prompt': text, 'multi_modal_data': {'image': image}} as the prompt",
    "guided_options_request": "use SamplingParams(structured_outputs=...)",
    "tokenization_kwargs": "use SamplingParams(truncate_prompt_tokens=...), or tokenize first and give token ids",
    "chat_template_content_format": "parts and text are both taken, as the template wants them; leave it out",
    "concurrency_limit": "requests share steps as max_num_seqs says; leave it out",
    "trace_headers": "only `quintet serve` traces; leave it out",
    "data_parallel_rank": "a request goes to the engine that has less to do or knows its beginning; leave it out",
    "arrival_time": "a request arrives when it is added; leave it out, or use priority",
    "prompt_text": "give {'prompt': text, 'prompt_token_ids': ids} as the prompt",
}

# of a prompt that is a dict
PROMPT_KEYS: Mapping[str, str] = {
    **dict.fromkeys(("encoder_prompt", "decoder_prompt"), "this model has no encoder; give 'prompt'"),
}

# of SamplingParams
PARAMETERS: Mapping[str, str] = {
    "guided_decoding": "use structured_outputs",
    "best_of": "use n, and choose by cumulative_logprob (logprobs=0)",
    "use_beam_search": "use LLM.beam_search",
    "length_penalty": "use LLM.beam_search, whose BeamSearchParams have it",
    "early_stopping": "use LLM.beam_search, which ends when no other output can be better",
    "logits_processors": "they are the engine's: LLM(logits_processors=[...]); extra_args is what a request tells them",
    "skip_reading_prefix_cache": "give the prompt a cache_salt of its own, which finds nothing there",
    "skip_clone": "parameters are never changed; leave it out",
    "watermarking": "texts are not marked; leave it out",
    "output_text_buffer_length": "it follows from stop; leave it out",
    "extra_kwargs": "poolers take no arguments of a request; leave it out",
    "requires_token_ids": "token ids are always there; leave it out",
    "response_format": "use structured_outputs",
    "max_new_tokens": "use max_tokens",
    "max_length": "use max_tokens, which does not count the prompt",
    "do_sample": "use temperature; 0 is greedy",
    "num_return_sequences": "use n",
    "stop_words": "use stop",
    "eos_token_id": "use stop_token_ids",
}


def no_attribute(owner: str, name: str, there: Iterable[str]) -> AttributeError:
    """Returns the error to raise for an attribute that does not exist."""
    if name in METHODS:
        return AttributeError(f"{owner}.{name} is not there: {METHODS[name]}")
    match = None if name.startswith("_") else nearest_name(name, [each for each in there if not each.startswith("_")])
    return AttributeError(f"{owner} has no attribute {name!r}" + (f"; did you mean {match!r}?" if match else ""))


def refuses_unsupported(call: Callable[P, T]) -> Callable[P, T]:
    """The call, which refuses arguments of ARGUMENTS, unless they ask for nothing."""
    own = inspect.signature(call).parameters

    @functools.wraps(call)
    def checked(*args: P.args, **kwargs: P.kwargs) -> T:
        for name in [name for name in kwargs if name in ARGUMENTS and name not in own]:
            asks = kwargs.pop(name)
            if not (asks is None or asks == {} or asks == "auto"):
                raise ValueError(f"{call.__qualname__}({name}=...) is not there: {ARGUMENTS[name]}")
        return call(*args, **kwargs)

    return checked
