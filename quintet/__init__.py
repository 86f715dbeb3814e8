"""quintet: one engine for language models on any accelerator. The public API, imported on first use."""

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

from quintet.common.imports import without_garbage_collection

__version__ = "0.1.0"
__version_tuple__ = tuple(map(int, __version__.split(".")))

_HOME = {
    "AdapterLogitsProcessor": "quintet.engine.sampling.vllm_compat",
    "AsyncEngineArgs": "quintet.api.engine_args",
    "AsyncLLM": "quintet.api.async_llm",
    "AsyncLLMEngine": "quintet.api.async_llm",
    "BatchUpdate": "quintet.engine.sampling.logits_processors",
    "CompletionOutput": "quintet.outputs",
    "Counter": "quintet.engine.observability.metrics",
    "EngineArgs": "quintet.api.engine_args",
    "EngineConfig": "quintet.config",
    "FlexibleArgumentParser": "quintet.api.engine_args",
    "Gauge": "quintet.engine.observability.metrics",
    "Histogram": "quintet.engine.observability.metrics",
    "LLM": "quintet.api.llm",
    "LLMEngine": "quintet.api.llm_engine",
    "LoRARequest": "quintet.lora.request",
    "Logprob": "quintet.outputs",
    "LogitsProcessor": "quintet.engine.sampling.logits_processors",
    "Metric": "quintet.engine.observability.metrics",
    "ModelRegistry": "quintet.api.model_registry",
    "ClassificationOutput": "quintet.pooling_outputs",
    "ClassificationRequestOutput": "quintet.pooling_outputs",
    "EmbeddingOutput": "quintet.pooling_outputs",
    "EmbeddingRequestOutput": "quintet.pooling_outputs",
    "PoolingOutput": "quintet.pooling_outputs",
    "PoolingParams": "quintet.pooling_params",
    "PoolerConfig": "quintet.config",
    "PoolingRequestOutput": "quintet.pooling_outputs",
    "ScoringOutput": "quintet.pooling_outputs",
    "ScoringRequestOutput": "quintet.pooling_outputs",
    "PromptType": "quintet.chat.prompts",
    "RequestLogitsProcessor": "quintet.engine.sampling.logits_processors",
    "RequestOutput": "quintet.outputs",
    "RequestOutputKind": "quintet.sampling_params",
    "SamplingParams": "quintet.sampling_params",
    "BeamSearchParams": "quintet.sampling_params",
    "TextPrompt": "quintet.chat.prompts",
    "TokensPrompt": "quintet.chat.prompts",
    "StructuredOutputsParams": "quintet.sampling_params",
    "RepetitionDetectionParams": "quintet.sampling_params",
    "ShardedStateLoader": "quintet.model_loader.sharded_state",
    "VllmConfig": "quintet.config",
    "cleanup_dist_env_and_memory": "quintet.distributed",
    "Vector": "quintet.engine.observability.metrics",
}

__all__ = ["__version__", "__version_tuple__", *sorted(_HOME)]

if TYPE_CHECKING:
    from quintet.api.async_llm import AsyncLLM as AsyncLLM
    from quintet.api.async_llm import AsyncLLMEngine as AsyncLLMEngine
    from quintet.api.engine_args import AsyncEngineArgs as AsyncEngineArgs
    from quintet.api.engine_args import EngineArgs as EngineArgs
    from quintet.api.engine_args import FlexibleArgumentParser as FlexibleArgumentParser
    from quintet.api.llm import LLM as LLM
    from quintet.api.llm_engine import LLMEngine as LLMEngine
    from quintet.api.model_registry import ModelRegistry as ModelRegistry
    from quintet.chat.prompts import PromptType as PromptType
    from quintet.chat.prompts import TextPrompt as TextPrompt
    from quintet.chat.prompts import TokensPrompt as TokensPrompt
    from quintet.config import EngineConfig as EngineConfig
    from quintet.config import PoolerConfig as PoolerConfig
    from quintet.config import VllmConfig as VllmConfig
    from quintet.distributed import cleanup_dist_env_and_memory as cleanup_dist_env_and_memory
    from quintet.engine.observability.metrics import Counter as Counter
    from quintet.engine.observability.metrics import Gauge as Gauge
    from quintet.engine.observability.metrics import Histogram as Histogram
    from quintet.engine.observability.metrics import Metric as Metric
    from quintet.engine.observability.metrics import Vector as Vector
    from quintet.engine.sampling.logits_processors import BatchUpdate as BatchUpdate
    from quintet.engine.sampling.logits_processors import LogitsProcessor as LogitsProcessor
    from quintet.engine.sampling.logits_processors import RequestLogitsProcessor as RequestLogitsProcessor
    from quintet.engine.sampling.vllm_compat import AdapterLogitsProcessor as AdapterLogitsProcessor
    from quintet.lora.request import LoRARequest as LoRARequest
    from quintet.model_loader.sharded_state import ShardedStateLoader as ShardedStateLoader
    from quintet.outputs import CompletionOutput as CompletionOutput
    from quintet.outputs import Logprob as Logprob
    from quintet.outputs import RequestOutput as RequestOutput
    from quintet.pooling_outputs import ClassificationOutput as ClassificationOutput
    from quintet.pooling_outputs import ClassificationRequestOutput as ClassificationRequestOutput
    from quintet.pooling_outputs import EmbeddingOutput as EmbeddingOutput
    from quintet.pooling_outputs import EmbeddingRequestOutput as EmbeddingRequestOutput
    from quintet.pooling_outputs import PoolingOutput as PoolingOutput
    from quintet.pooling_outputs import PoolingRequestOutput as PoolingRequestOutput
    from quintet.pooling_outputs import ScoringOutput as ScoringOutput
    from quintet.pooling_outputs import ScoringRequestOutput as ScoringRequestOutput
    from quintet.pooling_params import PoolingParams as PoolingParams
    from quintet.sampling_params import BeamSearchParams as BeamSearchParams
    from quintet.sampling_params import RepetitionDetectionParams as RepetitionDetectionParams
    from quintet.sampling_params import RequestOutputKind as RequestOutputKind
    from quintet.sampling_params import SamplingParams as SamplingParams
    from quintet.sampling_params import StructuredOutputsParams as StructuredOutputsParams


def _home(module: str) -> ModuleType:
    if module in sys.modules:
        return sys.modules[module]
    with without_garbage_collection():
        return importlib.import_module(module)


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(_home(_HOME[name]), name)
    from quintet.config.schema.unsupported import NAMES as NAMES

    if name in NAMES:  # an AttributeError would lose its message in `from quintet import ...`
        raise ImportError(f"quintet.{name} is not there: {NAMES[name]}")
    raise AttributeError(f"module 'quintet' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
