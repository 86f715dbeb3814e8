"""Parts of scripts/bundled_draft/train.py: an EAGLE head for the bundled chat model."""
