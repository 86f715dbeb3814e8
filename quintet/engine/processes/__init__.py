"""Engines in processes of their own, which a server or an LLM starts."""
