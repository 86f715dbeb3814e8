"""The engines that compare.py measures side by side, each driven in a process and an environment of its own."""
