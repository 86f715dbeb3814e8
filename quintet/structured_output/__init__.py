"""Structured output: from JSON schemas, regular expressions, EBNF and structural tags to llguidance grammars."""
