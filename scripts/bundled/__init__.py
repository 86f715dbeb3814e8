"""The parts of train_bundled.py: what the bundled model is taught, its tokenizer, and its training."""
