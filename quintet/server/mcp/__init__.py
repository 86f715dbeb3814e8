"""Tools of MCP servers that a quintet server calls."""
