"""Python API: LLM, AsyncLLM, LLMEngine, EngineArgs, beam search, offline pooling."""
