"""Media of requests in the engine: which kinds a model takes, and where their tokens stand for its text model."""
