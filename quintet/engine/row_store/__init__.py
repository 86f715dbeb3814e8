"""Row store: which rows of the device stand for which tokens of prompts, and when they are written."""
