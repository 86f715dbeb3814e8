"""Loads checkpoint files of every kind into the weights of a model on its platform."""
