"""Pictures of requests in the engine: whether a model takes them, and where their tokens stand for its text model."""
