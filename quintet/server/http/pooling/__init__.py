"""The routes of models that answer with numbers: embeddings, classes, scores, rankings; as vLLM, OpenAI, Cohere."""
