"""The parts of train_bundled_embed.py: what the bundled embedding model reads, its teacher, its training, its card."""
