"""Sampling: logits processors, penalties and bans, thinking budgets, the sampler."""
