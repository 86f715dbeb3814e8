"""Ollama's API below /api. Source: Ollama's repository, docs/api.md and api/types.go."""
