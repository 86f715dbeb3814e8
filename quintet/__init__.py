"""quintet: one engine for language models on any accelerator. The public API, imported on first use."""

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOME = {
    "AsyncLLM": "quintet.engine.async_llm",
    "BatchUpdate": "quintet.engine.logits_processors",
    "CompletionOutput": "quintet.outputs",
    "EngineConfig": "quintet.config",
    "LLM": "quintet.engine.llm",
    "Logprob": "quintet.outputs",
    "LogitsProcessor": "quintet.engine.logits_processors",
    "RequestLogitsProcessor": "quintet.engine.logits_processors",
    "RequestOutput": "quintet.outputs",
    "RequestOutputKind": "quintet.sampling_params",
    "SamplingParams": "quintet.sampling_params",
    "BeamSearchParams": "quintet.sampling_params",
    "TextPrompt": "quintet.engine.prompts",
    "TokensPrompt": "quintet.engine.prompts",
    "StructuredOutputsParams": "quintet.sampling_params",
    "RepetitionDetectionParams": "quintet.sampling_params",
}

__all__ = ["__version__", *sorted(_HOME)]

if TYPE_CHECKING:
    from quintet.config import EngineConfig as EngineConfig
    from quintet.engine.async_llm import AsyncLLM as AsyncLLM
    from quintet.engine.llm import LLM as LLM
    from quintet.engine.logits_processors import BatchUpdate as BatchUpdate
    from quintet.engine.logits_processors import LogitsProcessor as LogitsProcessor
    from quintet.engine.logits_processors import RequestLogitsProcessor as RequestLogitsProcessor
    from quintet.engine.prompts import TextPrompt as TextPrompt
    from quintet.engine.prompts import TokensPrompt as TokensPrompt
    from quintet.outputs import CompletionOutput as CompletionOutput
    from quintet.outputs import Logprob as Logprob
    from quintet.outputs import RequestOutput as RequestOutput
    from quintet.sampling_params import BeamSearchParams as BeamSearchParams
    from quintet.sampling_params import RepetitionDetectionParams as RepetitionDetectionParams
    from quintet.sampling_params import RequestOutputKind as RequestOutputKind
    from quintet.sampling_params import SamplingParams as SamplingParams
    from quintet.sampling_params import StructuredOutputsParams as StructuredOutputsParams


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    from quintet.settings.lacking import NAMES

    if name in NAMES:  # an AttributeError would lose its message in `from quintet import ...`
        raise ImportError(f"quintet.{name} is not there: {NAMES[name]}")
    raise AttributeError(f"module 'quintet' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
