"""What a server counts and measures, as Prometheus reads it."""
