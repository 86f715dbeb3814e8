"""Parts of scripts/reference.py."""
