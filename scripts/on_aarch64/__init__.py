"""Builds and tests for aarch64 on another machine."""
