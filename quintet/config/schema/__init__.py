"""Metadata of configuration fields, and what is generated from it: flags, environment variables, help, error names."""
