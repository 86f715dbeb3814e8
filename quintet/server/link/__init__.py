"""The engine in a process of its own, and the wire between it and the processes that speak HTTP."""
