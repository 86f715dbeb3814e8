"""Command line: `quintet` and its configuration file; `commands/` has one module for each command."""
