"""Helpers that know no model or engine: imports, plugins, interrupts, JSON files, suggestions, metric types."""
