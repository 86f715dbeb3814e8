"""Routes before and behind /inference/v1/generate: requests become token ids, and token ids become answers."""
