"""Encoders of encoder-decoder models: passes of requests' media, and the pages that hold what they give."""
