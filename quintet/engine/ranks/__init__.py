"""Ranks that are processes: each runs the same engine on the same numbered inbox, and no plan travels."""
