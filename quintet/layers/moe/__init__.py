"""Mixture-of-experts layers, their routers, and the placement of experts on ranks."""
