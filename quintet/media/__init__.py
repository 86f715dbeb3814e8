"""Media in requests: files of callers are decoded in child processes with limits, and become arrays."""
