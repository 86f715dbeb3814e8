"""Statistics, metrics, spans, Chrome traces and profiles of an engine."""
