"""Names of other engines (vLLM, llama.cpp, Ollama) that do not exist here, and the replacement for each."""

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import ParamSpec, TypeVar

from quintet.common.suggestions import nearest_name

P = ParamSpec("P")
T = TypeVar("T")

_ENCODERS = "the platform decides how encoders of images run; leave it out"
_NO_TORCH_COMPILE = "no platform uses torch.compile; leave it out"
_ATTENTION = "an attention backend has no settings of its own; leave it out, and choose by attention_backend"
_AS_THE_MODEL = "a draft model has the model's setting of that name; leave it out"
_DRAWS = "use --{0} of `quintet generate` and `quintet chat`; over HTTP it is a field of the request"
_LAYERS = "the whole model runs on one platform; use device"
UNSUPPORTED: Mapping[str, str] = {
    "enable_sleep_mode": "sleep() is there wherever the platform can; leave it out (`quintet serve` has the flag)",
    "io_processor_plugin": "it is the server's (`quintet serve --io-processor-plugin`); leave it out",
    "swap_space": "a preempted request is computed again, nothing is swapped; leave it out, or use kv_offloading_size",
    "kv_transfer_config.kv_connector_module_path": "a connector of the caller's own is no setting; leave it out",
    "kv_transfer_config.kv_connector_extra_config.use_layerwise": "a step of all layers is one launch, and its pages "
    "count when it has landed; leave it out",
    "kv_transfer_config.enable_permute_local_kv": "pages travel in one form, whatever each side keeps; leave it out",
    "cpu_offload_gb": "weights are not offloaded: every step would bring them over the bus again, which takes longer "
    "than a step; quantize (quantization='int8' or 'int4'), share layers out over devices (tensor_parallel_size), or "
    "run on device='cpu'",
    **dict.fromkeys(
        ("data_parallel_address", "data_parallel_rpc_port", "data_parallel_backend"),
        "engines of several machines do not speak to each other: each machine has a server of its own "
        "(data_parallel_hybrid_lb), and something before them balances; leave it out",
    ),
    **dict.fromkeys(
        ("decode_context_parallel_size", "prefill_context_parallel_size", "dcp_kv_cache_interleave_size"),
        "every rank keeps its heads' pages for all positions; leave it out, and where the cache is too large for a "
        "device share layers out over stages (pipeline_parallel_size)",
    ),
    **dict.fromkeys(
        ("enable_dbo", "ubatch_size", "dbo_decode_token_threshold", "dbo_prefill_token_threshold"),
        "no token travels to another rank's experts, so that two batches have nothing to overlap; leave it out",
    ),
    "disable_custom_all_reduce": "the platform chooses how sums are taken, and `quintet explain` says it; leave it out",
    "max_parallel_loading_workers": "each rank reads its own part of the weights; leave it out",
    "numa_bind": "ranks stay at their memory nodes by themselves (tensor_parallel_size='auto' has one for each); leave "
    "it out, and set QUINTET_CPU_BIND=0 where the system is to move them",
    **dict.fromkeys(
        ("disable_log_requests", "enable_log_requests", "max_log_len"),
        "texts of requests are never logged; leave it out",
    ),
    "worker_cls": "a platform package decides how it runs; see quintet/interface/platform.py",
    "default_mm_loras": "adapters are of the text model alone; leave it out",
    "specialize_active_lora": "steps compute the adapters that their requests have, and no others; leave it out",
    "enable_tower_connector_lora": "adapters are of the text model alone; leave it out",
    "pt_load_map_location": "tensors are read into the host's memory wherever they were; leave it out",
    "use_tqdm_on_load": "use use_tqdm",
    "task": "use runner='pooling', and convert",
    "disable_sliding_window": "use hf_overrides={'sliding_window': None}",
    "rope_scaling": "use hf_overrides={'rope_scaling': {...}}",
    "rope_theta": "use hf_overrides={'rope_theta': ...}",
    "max_seq_len_to_capture": "the platform chooses what it captures; enforce_eager=True turns it off",
    "num_scheduler_steps": "one step is scheduled at a time; leave it out",
    "preemption_mode": "a preempted request is always computed again; leave it out",
    "guided_decoding_backend": "use structured_outputs_config={'backend': ...}",
    "async_scheduling": "leave it out",
    "n_ctx": "use max_model_len",
    "context_length": "use max_model_len",
    "mem_fraction_static": "use gpu_memory_utilization",
    "n_gpu_layers": _LAYERS,
    "speculative_config.draft_tensor_parallel_size": _AS_THE_MODEL,
    "speculative_config.tensor_parallel_size": _AS_THE_MODEL,
    "speculative_config.max_model_len": "past the length of the draft model there are no drafts; leave it out",
    "speculative_config.code_revision": _AS_THE_MODEL,
    "speculative_config.draft_load_config": _AS_THE_MODEL,
    "speculative_config.enforce_eager": _AS_THE_MODEL,
    "speculative_config.disable_padded_drafter_batch": _AS_THE_MODEL,
    "speculative_config.parallel_drafting": "a head's own files say whether it drafts a block at once (P-EAGLE, "
    "DFlash); leave it out",
    "speculative_config.speculative_token_tree": "guesses are one line of tokens, no tree; leave it out",
    "structured_outputs_config.disable_fallback": "there is one backend, so nothing falls back; leave it out",
    "profiler_config.torch_profiler_dump_cuda_time_total": "a trace holds every time; leave it out",
    "profiler_config.capture_torch_profiler": "a trace covers steps, not their capture; leave it out",
    "profiler_config.detailed_trace_annotation": "events have their counts as arguments; leave it out",
    "profiler_config.ignore_frontend": "processes that speak HTTP are not in a trace; leave it out",
    "profiler_config.warmup_iterations": "use delay_iterations",
    "profiler_config.active_iterations": "use max_iterations",
    "profiler_config.wait_iterations": "use delay_iterations",
    "attention_config.flash_attn_version": _ATTENTION,
    "attention_config.use_prefill_decode_attention": _ATTENTION,
    "attention_config.flash_attn_max_num_splits_for_cuda_graph": _ATTENTION,
    "attention_config.use_cudnn_prefill": _ATTENTION,
    "attention_config.use_trtllm_ragged_deepseek_prefill": _ATTENTION,
    "attention_config.use_trtllm_attention": _ATTENTION,
    "attention_config.disable_flashinfer_prefill": _ATTENTION,
    "attention_config.disable_flashinfer_q_quantization": _ATTENTION,
    "eplb_config.log_balancedness_interval": "it is logged whenever experts are placed; leave it out",
    "eplb_config.use_async": "experts move between two steps, and in none; leave it out",
    "eplb_config.policy": "there is one way to place them; leave it out",
    "eplb_config.communicator": "experts move as sums do; leave it out",
    "compilation_config.backend": _NO_TORCH_COMPILE,
    "compilation_config.use_inductor": _NO_TORCH_COMPILE,
    "compilation_config.use_inductor_graph_partition": _NO_TORCH_COMPILE,
    "compilation_config.inductor_compile_config": _NO_TORCH_COMPILE,
    "compilation_config.inductor_passes": _NO_TORCH_COMPILE,
    "compilation_config.inductor_specialize_for_cudagraph_no_more_than": _NO_TORCH_COMPILE,
    "compilation_config.compile_sizes": _NO_TORCH_COMPILE,
    "compilation_config.compile_ranges_split_points": _NO_TORCH_COMPILE,
    "compilation_config.compile_ranges_endpoints": _NO_TORCH_COMPILE,
    "compilation_config.compile_cache_save_format": _NO_TORCH_COMPILE,
    "compilation_config.dynamic_shapes_config": _NO_TORCH_COMPILE,
    "compilation_config.ir_enable_torch_wrap": _NO_TORCH_COMPILE,
    "compilation_config.fast_moe_cold_start": _NO_TORCH_COMPILE,
    "compilation_config.splitting_ops": "steps are captured whole, nothing is split; leave it out",
    "compilation_config.full_cuda_graph": "steps are always captured whole; leave it out",
    "compilation_config.use_cudagraph": "use cudagraph_capture_sizes, or enforce_eager=True, which captures nothing",
    "compilation_config.custom_ops": "each op has the platform's first provider that serves; leave it out",
    "compilation_config.pass_config": "what is fused is the platform's own ops, without passes; leave it out",
    "compilation_config.debug_dump_path": "where XLA compiles, XLA_FLAGS=--xla_dump_to=FOLDER; nowhere else",
    "compilation_config.cudagraph_num_of_warmups": "each captured step has run once before; leave it out",
    "compilation_config.cudagraph_copy_inputs": "inputs are always copied to where a captured step reads; leave it out",
    "compilation_config.cudagraph_specialize_lora": "steps with and without adapters are captured apart; leave it out",
    "compilation_config.compile_mm_encoder": _ENCODERS,
    "compilation_config.cudagraph_mm_encoder": _ENCODERS,
    "compilation_config.encoder_cudagraph_token_budgets": _ENCODERS,
    "compilation_config.encoder_cudagraph_max_images_per_batch": _ENCODERS,
    "compilation_config.encoder_cudagraph_max_vision_items_per_batch": _ENCODERS,
    "compilation_config.encoder_cudagraph_max_frames_per_batch": _ENCODERS,
}


def unsupported_reason(name: str) -> str | None:
    """Why a setting, or the one that it is an entry of, is not there; None if this says nothing of it."""
    while name and name not in UNSUPPORTED:
        name = name.rpartition(".")[0]
    return UNSUPPORTED.get(name)


# of the command line, where the name of a setting is another's
FLAGS: Mapping[str, str] = {
    # llama.cpp
    **dict.fromkeys(("-c", "--ctx-size", "--num-ctx"), "use --max-model-len"),
    **dict.fromkeys(("-ngl", "--ngl", "--gpu-layers"), _LAYERS),
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
    **dict.fromkeys(("--mmproj-offload", "--no-mmproj-offload"), _ENCODERS),
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
    "check_health": "every call says so where the engine has ended",
    "get_vllm_config": "use config",
    "get_model_config": "use config",
}

# of the module quintet
NAMES: Mapping[str, str] = {
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
