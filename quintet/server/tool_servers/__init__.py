"""Tools of MCP servers that the operator names (`--tool-server`): nothing here runs, or is imported, without that."""
