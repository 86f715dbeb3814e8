"""Requests and answers of OpenAI's API, with vLLM's additions: bodies are pydantic's, answers msgspec's."""
