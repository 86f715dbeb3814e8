"""Bytes of media that URLs name: data:, files of one folder, and hosts that the operator allows."""
