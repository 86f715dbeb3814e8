"""Readers of config.json for model types that transformers does not know, beside those of legacy_configs."""
