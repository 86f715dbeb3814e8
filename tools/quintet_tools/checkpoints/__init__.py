"""Small random checkpoints of every model family, for the conformance kit and tests."""
