"""HTTP server: its settings, its processes and its API routes."""
