"""ASGI middleware: authentication, access limits, content encoding, request paths, slow clients."""
