"""The Messages API of Anthropic."""
