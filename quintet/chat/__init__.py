"""Chat: messages and tools to prompts, and output to messages, reasoning and tool calls."""
