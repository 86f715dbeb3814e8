"""Checks that run models: loaded only where the reference checkpoints of quintet-llm-tools are installed."""
