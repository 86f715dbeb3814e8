"""Parallelism of one engine over processes and machines: tensor, pipeline and expert parallel ranks."""
