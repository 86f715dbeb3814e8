"""How the entries of model types that transformers does not know are read, beside those of legacy_configs."""
