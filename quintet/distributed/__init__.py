"""Rendezvous and authenticated TCP connections between ranks of several machines."""
