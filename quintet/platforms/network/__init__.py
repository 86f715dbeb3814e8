"""Ranks that meet over TCP: who they are is proven with a key, and what they tell each other is signed."""
