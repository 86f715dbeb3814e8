"""Runs steps: worker, model runner, batch arrays, shape buckets, warm-up."""
