"""Trunks of Gemma 3n and 4: streams of which a layer computes one (AltUp), and embeddings of each layer's own."""
