"""Pooling models: which models they are, what their files contain for it, and how their numbers are computed."""
