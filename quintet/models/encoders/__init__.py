"""Encoders of encoder-decoder models: a second model of a worker, which writes what the decoder's layers read."""
