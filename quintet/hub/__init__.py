"""Finds a model's files (hub, ModelScope, folder, GGUF) and reads its configuration."""
