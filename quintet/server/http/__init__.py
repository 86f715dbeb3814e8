"""The HTTP side of the server: routes, limits and errors in OpenAI's shapes, over any quintet.server.backend."""
