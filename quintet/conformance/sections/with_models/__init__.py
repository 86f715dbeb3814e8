"""Checks that run models: loaded only where the reference checkpoints of quintet-tools are installed."""
