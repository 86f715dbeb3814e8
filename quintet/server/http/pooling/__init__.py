"""The routes of models that answer with numbers: embeddings, classes, scores and rankings; vLLM's, OpenAI's, Cohere's."""
