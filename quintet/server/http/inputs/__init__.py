"""Reads parts of request bodies that several APIs share: prompts, sampling parameters, tools, response format."""
