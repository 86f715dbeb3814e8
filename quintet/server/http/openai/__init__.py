"""OpenAI's chat completions, completions and models endpoints, with vLLM's additions."""
