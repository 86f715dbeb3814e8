"""Simulates load on an engine in virtual time, from measured step costs."""
