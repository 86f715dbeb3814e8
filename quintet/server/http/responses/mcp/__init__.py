"""Tools of MCP servers in responses: their calls, results and approvals."""
