"""Ops of the TPU platform in JAX and Pallas."""
