"""For platform developers, tests and benchmarks: reference checkpoints, and loads in virtual time."""
