"""Drives a platform for the conformance kit: workers, batches, engines, traffic, fault injection."""
