"""Endpoints for operators: health, load, profile, sleep, tokenize, the web page, MCP servers."""
