"""Trial of an architecture: a small random copy of it runs here and in transformers, and the tokens are compared."""
