"""Metrics of a server, in Prometheus format."""
