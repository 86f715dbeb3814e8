"""New weights for a running engine: pauses, updates, the ways by which tensors come, and calls of workers."""
