"""KV connector for LMCache."""
